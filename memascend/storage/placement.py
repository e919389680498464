"""Assignment of sub-groups to paths: Eq. 1 of MLP-Offload, and a variant that balances times. Imports no torch.

A path that reads R and writes W bytes per second moves a sub-group of s bytes in and out in s/R + s/W seconds. All
paths finish together if each has a share in inverse proportion to that time. The paper uses min(R, W) instead, which is
equivalent if R/W is the same on all paths; otherwise it gives too much to paths whose two rates differ less
(erratum M2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PLACEMENTS", "Rates", "arrange", "counts", "first_done", "update_seconds"]

PLACEMENTS = ("balanced", "as_published")


@dataclass(frozen=True)
class Rates:
    """Read and write bandwidth of a path in bytes per second."""

    read: float
    write: float

    def __post_init__(self) -> None:
        if not (self.read > 0 and self.write > 0 and math.isfinite(self.read) and math.isfinite(self.write)):
            raise ValueError(f"the rates of a path are positive, got {self.read} read and {self.write} written")

    @property
    def slower(self) -> float:
        """The slower of both rates: B_i of Eq. 1."""
        return min(self.read, self.write)

    @property
    def round_trip(self) -> float:
        """Bytes per second that are read and written back, one direction at a time."""
        return 1 / (1 / self.read + 1 / self.write)


def weights(placement: str | Sequence[float], rates: Sequence[Rates]) -> list[float]:
    """Return the weights of the paths' shares. A sequence is a user-given ratio, as in the authors' artifact."""
    if not isinstance(placement, str):
        if len(placement) != len(rates) or min(placement) < 0 or sum(placement) <= 0:
            raise ValueError(f"a ratio names a share for each of {len(rates)} paths, got {list(placement)}")
        return [float(share) for share in placement]
    if placement not in PLACEMENTS:
        raise ValueError(f"placement {placement!r} is unknown; choose one of {', '.join(PLACEMENTS)}, or a ratio")
    return [each.slower if placement == "as_published" else each.round_trip for each in rates]


def counts(groups: int, placement: str | Sequence[float], rates: Sequence[Rates]) -> list[int]:
    """Return how many of `groups` equal sub-groups each path gets; the sum is `groups`.

    `as_published`: T_i = ceil(M B_i / sum B) (Eq. 1); the excess of the ceilings is taken from the paths that were
    rounded up most. `balanced`: the counts for which the slowest path ends first.
    """
    shares = weights(placement, rates)
    total = sum(shares)
    if placement == "as_published":
        exact = [groups * share / total for share in shares]
        found = [math.ceil(each - 1e-9) for each in exact]
        for path in sorted(range(len(found)), key=lambda i: found[i] - exact[i], reverse=True):
            if sum(found) > groups and found[path] > 0:
                found[path] -= 1
        return found
    found = [0] * len(shares)
    for _ in range(groups):
        found[first_done(found, shares)] += 1
    return found


def first_done(loads: Sequence[float], shares: Sequence[float], more: float = 1) -> int:
    """Return the index of the path that would finish first with `more` added to its load."""
    usable = [i for i, share in enumerate(shares) if share > 0]
    return min(usable, key=lambda i: ((loads[i] + more) / shares[i], i))


def arrange(sizes: Mapping[str, int], placement: str | Sequence[float], rates: Sequence[Rates]) -> dict[str, int]:
    """Return the path index of each sub-group; neighbours in the order of `sizes` (bytes) go to different paths.

    So at any point of a pass, in either direction, each path has processed about its share.
    """
    shares = weights(placement, rates)
    left = counts(len(sizes), placement, rates) if placement == "as_published" else None
    loads = [0.0] * len(shares)
    places = {}
    for name, size in sizes.items():
        open_shares = shares if left is None else [s if n else 0.0 for s, n in zip(shares, left, strict=True)]
        path = first_done(loads, open_shares, 1 if left is not None else size)
        loads[path] += 1 if left is not None else size
        if left is not None:
            left[path] -= 1
        places[name] = path
    return places


def update_seconds(bytes_by_path: Sequence[float], rates: Sequence[Rates], duplex: bool = False) -> float:
    """Return the seconds to read and write each path's load on all paths at once; `duplex`: both directions too."""
    each = (
        max(nbytes / r.read, nbytes / r.write) if duplex else nbytes / r.read + nbytes / r.write
        for nbytes, r in zip(bytes_by_path, rates, strict=True)
    )
    return max(each, default=0.0)

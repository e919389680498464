"""A hard limit on host memory: requests of our buffers beyond it are refused, by name, before memory is allocated.

The key `host_memory` ("24GiB") applies to the machine; each of its ranks has an equal share. A budget counts the bytes
that allocators reserve for the host (`Ledger.in_use`), since those become resident. The interpreter, the libraries and
what the training script allocates itself are not in the ledger: the planner adds them, but a run cannot refuse them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

KEY = "host_memory"
_GIB = 2**30
_UNITS = {"": 1, "b": 1}
_LEAST_PLAIN_NUMBER = 1024  # smaller numbers without a unit were probably meant in GiB
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
# Number of processes on this machine as set by torchrun, DeepSpeed's launcher or Open MPI; else all ranks are local.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "WORLD_SIZE")


class HostBudgetExceeded(MemoryError):
    """An allocation of ours would exceed the budget; nothing was allocated.

    `name` and `owner` identify the buffer; `requested_bytes` would be reserved, `left_bytes` would still fit; `in_use`
    has the bytes by owner at that moment.
    """

    def __init__(self, budget: HostBudget, name: str, owner: str, requested_bytes: int, in_use: Mapping[str, int]):
        self.name, self.owner, self.requested_bytes = name, owner, requested_bytes
        self.in_use = {owner: size for owner, size in in_use.items() if size}
        self.left_bytes = budget.limit_bytes - sum(self.in_use.values())
        largest_first = sorted(self.in_use.items(), key=lambda item: -item[1])
        by_owner = ", ".join(f"{owner} {_text(size)}" for owner, size in largest_first) or "nothing"
        needed = (sum(self.in_use.values()) + requested_bytes) * budget.ranks
        super().__init__(
            f"{owner} asks for {_text(requested_bytes)} of host memory ({name!r}), and "
            f"{_text(max(0, self.left_bytes))} are left of the budget of {_text(budget.limit_bytes)}{budget.share}; "
            f"in use: {by_owner}; raise {KEY} to at least {math.ceil(needed / _GIB * 100) / 100:.2f}GiB, or use a "
            "smaller model, batch or context"
        )


@dataclass(frozen=True, kw_only=True)
class HostBudget:
    """The limit of one process: `limit_bytes`, its share of a machine's budget divided among `ranks` processes."""

    limit_bytes: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.limit_bytes < 1 or self.ranks < 1:
            raise ValueError(f"{KEY}: {self.limit_bytes} bytes divided by {self.ranks} ranks leave none: use more")

    @classmethod
    def of_machine(cls, amount: str | int, ranks: int | None = None) -> HostBudget:
        """Return a rank's share of a machine's `amount` (see `parse_bytes`); `ranks` default to the environment's."""
        ranks = local_ranks() if ranks is None else ranks
        return cls(limit_bytes=parse_bytes(amount) // ranks, ranks=ranks)

    @property
    def share(self) -> str:
        """A note for messages about which part of the machine's budget this is; empty for the whole."""
        return f" (this rank's share of {_text(self.limit_bytes * self.ranks)})" if self.ranks > 1 else ""

    def check(self, name: str, owner: str, requested_bytes: int, in_use: Mapping[str, int]) -> None:
        """Raise HostBudgetExceeded if `requested_bytes` plus what is `in_use` (bytes by owner) exceed the limit."""
        if sum(in_use.values()) + requested_bytes > self.limit_bytes:
            raise HostBudgetExceeded(self, name, owner, requested_bytes, in_use)


def parse_bytes(amount: str | int, what: str = KEY) -> int:
    """Return the bytes of an amount such as 24GiB, 24 GB, 512MiB or a number of bytes; `what` names the key in errors.

    A GiB is 2**30 bytes, a GB 10**9. Raises ValueError, in one line, for anything else, including 24G, which programs
    interpret differently.
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        size, unit = float(amount), ""
    else:
        found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
        size, unit = (float(found[1]), found[2].lower()) if found else (math.nan, "")
    if unit not in _UNITS or not size * _UNITS[unit] >= 1:
        raise ValueError(f"{what}: {amount!r} is not an amount of memory: write 24GiB, 24GB, 512MiB or bytes")
    if not unit and size < _LEAST_PLAIN_NUMBER:
        raise ValueError(f"{what}: {amount!r} is taken as bytes, which is too little to be meant: write {size:g}GiB")
    return amount if isinstance(amount, int) else int(size * _UNITS[unit])


def local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that share this machine, as set by their launcher; 1 if unknown."""
    variables = os.environ if environment is None else environment
    said = (variables.get(name, "") for name in _LOCAL_RANKS)
    return next((int(text) for text in said if text.isdecimal() and int(text) > 0), 1)


def _text(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.2f} MiB"

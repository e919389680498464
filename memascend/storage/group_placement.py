"""Assignment of a multi-path tier's groups to paths, based on the paths' rates (MLP-Offload 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from memascend.storage import placement as placements
from memascend.storage.placement import Rates
from memascend.storage.storage_path import StoragePath

__all__ = ["GroupPlacement"]

_GAIN = 0.05  # least relative reduction of a pass's time for which groups move


class GroupPlacement:
    """The path and the size of each group. Not thread-safe: callers hold the tier's lock."""

    def __init__(
        self, paths: Sequence[StoragePath], placement: str | Sequence[float], group_of: Callable[[str], str]
    ) -> None:
        """Create a placement without groups. Raises ValueError for an invalid `placement`."""
        self._paths, self.placement, self._group_of = paths, placement, group_of
        self.path_of: dict[str, StoragePath] = {}
        self.group_bytes: dict[str, int] = {}
        placements.weights(placement, self.rates())

    def drop(self, path: StoragePath) -> int:
        """Unassign a removed path's groups, so that their next write goes elsewhere; return their number."""
        there = [group for group, placed in self.path_of.items() if placed is path]
        for group in there:
            del self.path_of[group]
        return len(there)

    def count(self, path: StoragePath) -> int:
        """Return the number of groups assigned to a path."""
        return sum(placed is path for placed in self.path_of.values())

    def idle(self) -> list[StoragePath]:
        """Return usable paths without any group; none if the user has fixed the shares."""
        if not self.path_of or not isinstance(self.placement, str):
            return []
        return [path for path in self._paths if path.usable and not path.full and not self.count(path)]

    def rates(self, paths: Sequence[StoragePath] | None = None) -> list[Rates]:
        """Return the rates of `paths` (default: all); unknown ones are taken as the mean of the known ones."""
        asked = self._paths if paths is None else paths
        known = [path.rates for path in self._paths if path.rates is not None] or [Rates(1.0, 1.0)]
        mean = Rates(sum(r.read for r in known) / len(known), sum(r.write for r in known) / len(known))
        return [path.rates or mean for path in asked]

    def weights(self, paths: Sequence[StoragePath]) -> list[float]:
        """Return the weights of the paths' shares, by the placement and the current rates."""
        return placements.weights(self.placement_on(paths), self.rates(paths))

    def placement_on(self, paths: Sequence[StoragePath]) -> str | list[float]:
        """Return the placement for `paths`; of a user-given ratio, the shares of these paths."""
        if isinstance(self.placement, str):
            return self.placement
        ratio = [share for path, share in zip(self._paths, self.placement, strict=True) if path in paths]
        return ratio if sum(ratio) > 0 else [1.0] * len(ratio)

    def plan(self) -> bool:
        """Plan new paths for all groups except those on full paths, if that is worth it; return whether any changed."""
        usable = [path for path in self._paths if path.usable and not path.full]
        fixed = {group for group, placed in self.path_of.items() if placed.full and placed.usable}
        sizes = {group: nbytes for group, nbytes in self.group_bytes.items() if group not in fixed}
        if not usable or not sizes:
            return False
        rates = self.rates(usable)
        places = placements.arrange(sizes, self.placement_on(usable), rates)
        new = {group: usable[number] for group, number in places.items()}
        if all(self.path_of.get(group) in usable for group in new):
            now_bytes, new_bytes = self._bytes_by_path(self.path_of, usable), self._bytes_by_path(new, usable)
            now, then = placements.update_seconds(now_bytes, rates), placements.update_seconds(new_bytes, rates)
            if now_bytes == new_bytes or (self.placement == "balanced" and then > (1 - _GAIN) * now):
                return False
        changed = any(self.path_of.get(group) is not path for group, path in new.items())
        self.path_of.update(new)
        return changed

    def _bytes_by_path(self, path_of: dict[str, StoragePath], paths: Sequence[StoragePath]) -> list[float]:
        """Return the bytes of the groups that `path_of` assigns to each of `paths`."""
        assigned = dict.fromkeys(paths, 0.0)
        for group, nbytes in self.group_bytes.items():
            if path_of.get(group) in assigned:
                assigned[path_of[group]] += nbytes
        return list(assigned.values())

    def choose(self, key: str, nbytes: int, tried: Collection[StoragePath]) -> StoragePath | None:
        """Return the path for a whole tensor, or None if none is left; failed paths come last. Requires the lock."""
        left = [path for path in self._paths if path not in tried and not path.hanging]
        usable = [path for path in left if path.usable] or left
        if not usable:
            return None
        group = self._group_of(key)
        placed = self.path_of.get(group)
        if placed is None or placed not in usable:
            not_full = [path for path in usable if not path.full] or usable
            others = {g: self.path_of[g] for g in self.group_bytes if g != group and g in self.path_of}
            assigned_bytes = [sum(self.group_bytes[g] for g, p in others.items() if p is path) for path in not_full]
            placed = not_full[
                placements.first_done(
                    assigned_bytes, self.weights(not_full), max(1, self.group_bytes.get(group, nbytes))
                )
            ]
            self.path_of[group] = placed
        return placed

    def note(self, key: str, before: int, nbytes: int | None) -> None:
        """Update a group's bytes: a tensor of `before` bytes (0: new) now has `nbytes`; None: it was removed."""
        group = self._group_of(key)
        total = self.group_bytes.get(group, 0) - before + (nbytes or 0)
        if nbytes is not None:
            self.group_bytes[group] = total
        elif total <= 0:
            self.group_bytes.pop(group, None)
            self.path_of.pop(group, None)
        else:
            self.group_bytes[group] = total

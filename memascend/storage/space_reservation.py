"""Reservation of space on several paths before it is needed."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from memascend.storage.errors import StorageError
from memascend.storage.storage_path import StoragePath

__all__ = ["reserve"]


def reserve(shares: Mapping[StoragePath, float], more_bytes: int, place: str) -> None:
    """Reserve `more_bytes` over the paths in proportion to `shares`; what does not fit on one goes to the others.

    `place` is for messages. Raises StorageError (ENOSPC) if all paths together do not have that much.
    """
    left = more_bytes
    free = {path: path.free_bytes for path in shares}
    if more_bytes > sum(free.values()):
        reason = f"the tier has not that much free ({', '.join(f'{p.name} {free[p]}' for p in free)})"
        raise StorageError("allocation", place, 0, more_bytes, sum(free.values()), errno.ENOSPC, reason)
    open_paths, reserved = dict(shares), dict.fromkeys(shares, 0)
    while left > 0 and open_paths:
        total = sum(open_paths.values()) or 1.0
        asked = {path: min(free[path], -int(-left * share // total)) for path, share in open_paths.items()}
        for path, part in asked.items():
            part = min(part, left)
            try:
                path.tier.reserve(reserved[path] + part)
            except OSError:  # not all of its free space is usable for tensors, or the path is gone
                free[path] = 0
                continue
            reserved[path] += part
            free[path] -= part
            left -= part
        open_paths = {path: max(s, 1e-9) for path, s in open_paths.items() if free[path] > 0 and asked[path] > 0}
    if left > 0:
        reason = f"the tier has not that much free ({left} of {more_bytes} bytes found no room)"
        raise StorageError("allocation", place, 0, more_bytes, more_bytes - left, errno.ENOSPC, reason)

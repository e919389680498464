"""Space of removed files that is still to come back.

A file that an io_uring engine had open keeps its blocks after it was closed and unlinked, until the kernel has taken
down the rings in the background: some 50 ms, and more than a second where the cores are busy. On a nearly full disk the
next file would find no room meanwhile.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

__all__ = ["free_bytes", "unlink"]

_MOST_S = 5.0
_TICK_S = 0.01
_lock = threading.Lock()
_removed: list[tuple[tuple[int, int], int, float]] = []  # (file system, bytes, when) in the last `_MOST_S`


def unlink(path: Path) -> None:
    """Remove a file, if it is there, whose space may come back late."""
    try:
        status, file_system = os.lstat(path), _file_system(path.parent)
        path.unlink()
    except FileNotFoundError:
        return
    with _lock:
        _removed.append((file_system, status.st_blocks * 512, time.monotonic()))


def free_bytes(folder: Path, wanted: int) -> int:
    """Of the folder's file system. Where that is less than `wanted`, and would not be with what this process has
    removed there, it waits for that: at most 5 s from the removal."""
    file_system = _file_system(folder)
    while (free := shutil.disk_usage(folder).free) < wanted <= free + _to_come(file_system):
        time.sleep(_TICK_S)
    return free


def _file_system(folder: Path) -> tuple[int, int]:
    """Its device and its id: an unmounted file system's device number is given to the next."""
    return os.stat(folder).st_dev, os.statvfs(folder).f_fsid


def _to_come(file_system: tuple[int, int]) -> int:
    """At most so much."""
    with _lock:
        _removed[:] = [each for each in _removed if time.monotonic() - each[2] < _MOST_S]
        return sum(size for where, size, _ in _removed if where == file_system)

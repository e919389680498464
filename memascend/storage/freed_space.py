"""Allocating disk space, and accounting for that of removed files, which the kernel frees with a delay.

A file that an io_uring engine had open keeps its blocks after close and unlink until the kernel has torn down the rings
in the background. That takes about 50 ms, and more than a second when the cores are busy. On a nearly full disk, the
next file would find no space meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

__all__ = ["allocate_space", "free_bytes", "unlink"]

_MOST_S = 5.0
_TICK_S = 0.01
_lock = threading.Lock()
_removed: list[tuple[tuple[int, int], int, float]] = []  # (file system, bytes, time) in the last `_MOST_S`


def allocate_space(fd: int, size_bytes: int) -> None:
    """Allocate the first `size_bytes` of an open file; its contents stay. Raises OSError (ENOSPC) if they do not fit.

    Without the look at the free space, file systems such as ext4 would allocate all of it before they fail, and other
    programs' writes would fail meanwhile.
    """
    if size_bytes - os.fstat(fd).st_blocks * 512 > shutil.disk_usage(fd).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, 0, size_bytes)


def unlink(path: Path) -> None:
    """Remove a file, if it exists, whose space may be freed late."""
    try:
        status, file_system = os.lstat(path), _file_system(path.parent)
        path.unlink()
    except FileNotFoundError:
        return
    with _lock:
        _removed.append((file_system, status.st_blocks * 512, time.monotonic()))


def free_bytes(folder: Path, wanted: int) -> int:
    """Return the free bytes of the folder's file system.

    If that is less than `wanted`, but would suffice with what this process has removed there, wait for that space: for
    at most 5 s from the removal.
    """
    file_system = _file_system(folder)
    while (free := shutil.disk_usage(folder).free) < wanted <= free + _to_come(file_system):
        time.sleep(_TICK_S)
    return free


def _file_system(folder: Path) -> tuple[int, int]:
    """Return the device number and the id, since the device number of an unmounted file system is reused."""
    return os.stat(folder).st_dev, os.statvfs(folder).f_fsid


def _to_come(file_system: tuple[int, int]) -> int:
    """Return an upper bound of the bytes that recent removals will still free."""
    with _lock:
        _removed[:] = [each for each in _removed if time.monotonic() - each[2] < _MOST_S]
        return sum(size for where, size, _ in _removed if where == file_system)

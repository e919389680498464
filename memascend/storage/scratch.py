"""Files for volatile engines: locked while their process lives, removed with the engine, collected after a kill.

A scratch file says in its superblock whose it is (owner and process). Whether that process lives is told by a lock on
the open file, never by its number: a number can be another process's by now, or of another container.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memascend.storage.errors import StorageError
from memascend.storage.locks import try_lock
from memascend.storage.native import _C

PREFIX = "memascend-scratch-"
_UNIT = 4096
_UNITS_AT_MOST = 8 << 20  # so that the map of them takes at most 1 MiB of memory; larger files have larger units
_LOG_BYTES = 4096  # nothing is ever committed to it
_EMPTY_BYTES = 2 << 20  # superblocks, the log, and the first of the space
_LIVE_BYTE = (1 << 60) + 1  # its lock says that the process lives; the store's own is the byte before


def room_for(sizes: Iterable[int]) -> int:
    """The space that tensors of these sizes in bytes take in one scratch file."""
    each = list(sizes)
    unit = _unit_bytes(sum(each))
    return sum(-(-size // unit) * unit for size in each)


def _unit_bytes(size_bytes: int) -> int:
    unit = _UNIT
    while size_bytes > unit * _UNITS_AT_MOST:
        unit *= 2
    return unit


@dataclass
class ScratchFile:
    """A formatted file, empty but for its index, locked by `fd` in process `pid`."""

    path: str
    fd: int
    pid: int

    def remove(self) -> None:
        """Idempotent. Only in the process that made it: after a fork it is the parent's."""
        if self.fd >= 0 and os.getpid() == self.pid:
            Path(self.path).unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1


def create_scratch_file(folder: str | os.PathLike[str], size_bytes: int, owner: str) -> ScratchFile:
    """A file that is to hold `size_bytes`, which it is still to be grown to. Raises StorageError."""
    while True:
        path = os.path.join(os.path.realpath(folder), f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError("create", path, 0, size_bytes, 0, error.errno, error.strerror) from error
        if try_lock(fd, _LIVE_BYTE) and os.fstat(fd).st_nlink > 0:  # else somebody who collects leftovers was faster
            break
        os.close(fd)
    scratch = ScratchFile(path, fd, os.getpid())
    try:
        unit = _unit_bytes(size_bytes)
        os.ftruncate(fd, _EMPTY_BYTES + unit)
        _C.storage_format([path], owner, [], unit, _LOG_BYTES, os.getpid())
    except BaseException:
        scratch.remove()
        raise
    return scratch


def require_room(path: str, more_bytes: int) -> None:
    """Raises StorageError (ENOSPC) if the file system has not that much: filling it up would hurt its other users."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if more_bytes > free:
        reason = "the file system has not that much free"
        raise StorageError("allocation", path, 0, more_bytes, free, errno.ENOSPC, reason)


def collect_scratch_files(folder: str | os.PathLike[str], control_folder: str) -> list[tuple[str, str, int]]:
    """Removes the files in `folder` whose processes are dead. Returns (path, owner, bytes on disk) of each."""
    removed = []
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, a link, or gone by now
            continue
        try:
            status = os.fstat(fd)
            owner = _dead_owner(str(path), fd) if stat.S_ISREG(status.st_mode) else None
            if owner is not None:
                uuid, name = owner
                path.unlink(missing_ok=True)
                if uuid:
                    Path(control_folder, f"memascend-{uuid}").unlink(missing_ok=True)
                removed.append((str(path), name, status.st_blocks * 512))
        finally:
            os.close(fd)
    return removed


def _dead_owner(path: str, fd: int) -> tuple[str, str] | None:
    """The store's uuid and owner, empty if it was killed while it made the file. None: it lives, or it is not ours."""
    if not try_lock(fd, _LIVE_BYTE):
        return None
    try:
        block = _C.storage_superblock(path)
    except (OSError, RuntimeError):
        return None
    if block is None:
        return None if any(os.pread(fd, 2 * _UNIT, 0)) else ("", "")
    return (block["uuid"], block["owner"]) if block["scratch_pid"] else None

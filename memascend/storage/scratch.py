"""Scratch files of volatile engines: locked while their process lives, removed with the engine or after its death.

The superblock of a scratch file names its owner and process. Whether that process lives is decided by a lock on the
open file, never by its PID, which may by now belong to another process, or to a process of another container. If locks
are local to a node (BeeGFS, Lustre with localflock, NFS with nolock), they say nothing about processes of other hosts.
The file name therefore has marks of the kernel boot and of the host, and a file that matches neither is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memascend.storage.errors import StorageError
from memascend.storage.hosts import is_of_another_host, marks
from memascend.storage.locks import try_lock
from memascend.storage.names import SCRATCH_PREFIX
from memascend.storage.native import _C

UNIT_BYTES = 4096  # allocation unit of a file that grows with its tensors
_UNITS_AT_MOST = 8 << 20  # limits the allocation bitmap to 1 MiB of memory; larger files use larger units
_LOG_BYTES = 4096  # minimal, since nothing is ever committed to it
_EMPTY_BYTES = 2 << 20  # superblocks, the log, and the first part of the space
_OWNER = f"{SCRATCH_PREFIX}owner"  # the locked JSON file of a scratch folder
_LIVE_BYTE = (1 << 60) + 1  # locked while the process lives; the store itself locks the byte before it


def space_for(sizes: Iterable[int]) -> int:
    """Return the space that tensors of these sizes take in one scratch file, in bytes."""
    each = list(sizes)
    unit = _unit_bytes(sum(each))
    return sum(-(-size // unit) * unit for size in each)


def _unit_bytes(size_bytes: int) -> int:
    """Return the allocation unit of a file of this size: larger for large files, to limit the bitmap."""
    unit = UNIT_BYTES
    while size_bytes > unit * _UNITS_AT_MOST:
        unit *= 2
    return unit


def _new_path(folder: str | os.PathLike[str]) -> str:
    """Return a new path in the folder, with this process's id and its marks of boot and host in the name."""
    name = f"{SCRATCH_PREFIX}{os.getpid()}-{'-'.join(marks())}-{secrets.token_hex(4)}"
    return os.path.join(os.path.realpath(folder), name)


def _is_locked(fd: int, path: str) -> bool:
    """Take the lock that marks this process as alive. Without lock support, delete the file and raise StorageError."""
    try:
        return try_lock(fd, _LIVE_BYTE)
    except OSError as error:
        os.close(fd)
        Path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # if it was the owner file of a folder
            if os.path.basename(path) == _OWNER:
                os.rmdir(os.path.dirname(path))
        reason = (
            f"{error.strerror}: the file system keeps no locks on files, which tell living processes from dead ones: "
            "name a folder on a local drive, or mount it with locks (NFS without nolock, Lustre with flock)"
        )
        raise StorageError("lock", path, 0, 0, 0, error.errno, reason) from error


def _is_dead(fd: int) -> bool:
    """Return whether nobody has the lock; False if the file system has no locks, which proves nothing."""
    try:
        return try_lock(fd, _LIVE_BYTE)
    except OSError:
        return False


@dataclass
class ScratchFile:
    """A formatted file with an empty index, locked through `fd` by process `pid`."""

    path: str
    fd: int
    pid: int

    def remove(self) -> None:
        """Remove the file, if called in the process that created it: after a fork it is the parent's. Idempotent."""
        if self.fd >= 0 and os.getpid() == self.pid:
            Path(self.path).unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1


def create_scratch_file(folder: str | os.PathLike[str], size_bytes: int, owner: str) -> ScratchFile:
    """Create a scratch file for `size_bytes` of tensors; it still has to be grown to that. Raises StorageError."""
    while True:
        path = _new_path(folder)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError("create", path, 0, size_bytes, 0, error.errno, error.strerror or str(error)) from error
        if _is_locked(fd, path) and os.fstat(fd).st_nlink > 0:  # else a process that collects leftovers was faster
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


@dataclass
class ScratchFolder:
    """A folder for one process's files, removed with them; `fd` has the lock on its owner file, in process `pid`."""

    path: str
    fd: int
    pid: int

    @property
    def owner_file(self) -> str:
        """Path of the locked file that names the folder's owner."""
        return os.path.join(self.path, _OWNER)

    def remove(self) -> None:
        """Remove the folder and its files, if called in the process that created it. Idempotent."""
        if self.fd >= 0 and os.getpid() == self.pid:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.fd)
            self.fd = -1


def create_scratch_folder(folder: str | os.PathLike[str], owner: str) -> ScratchFolder:
    """Create a scratch folder in `folder`, which must exist. Raises StorageError."""
    while True:
        path = _new_path(folder)
        try:
            os.mkdir(path, 0o700)
            fd = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except FileNotFoundError as error:
            if os.path.isdir(folder):  # a process that collects leftovers removed the empty folder
                continue
            raise StorageError("create", path, 0, 0, 0, error.errno, error.strerror or str(error)) from error
        except OSError as error:
            raise StorageError("create", path, 0, 0, 0, error.errno, error.strerror or str(error)) from error
        if _is_locked(fd, os.path.join(path, _OWNER)) and os.fstat(fd).st_nlink > 0:
            os.write(fd, json.dumps({"owner": owner, "pid": os.getpid()}).encode())
            return ScratchFolder(path, fd, os.getpid())
        os.close(fd)


def require_space(path: str, more_bytes: int) -> None:
    """Raise StorageError (ENOSPC) if the file system has less than `more_bytes` free, rather than fill it up."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if more_bytes > free:
        reason = "the file system has not that much free"
        raise StorageError("allocation", path, 0, more_bytes, free, errno.ENOSPC, reason)


@dataclass(frozen=True)
class RemovedScratch:
    """A scratch file that was removed: its `bytes` on disk, and its owner according to its superblock.

    `owner` is empty and `pid` is 0 if the process was killed before it had written a superblock.
    """

    path: str
    owner: str
    pid: int
    bytes: int

    def __str__(self) -> str:
        if not self.pid:
            whose = "of a process that was killed while it made the file"
        else:
            whose = f"of '{self.owner}', process {self.pid}"
        return f"{self.bytes:>14,} bytes {self.path} {whose}: dead, its lock is not held by any process"


def collect_scratch_files(folder: str | os.PathLike[str], control_folder: str) -> list[RemovedScratch]:
    """Remove the files and folders in `folder` whose processes are dead, and the control files of their stores.

    What another host has created is left alone, since its locks may be local to it.
    """
    removed = []
    for path in sorted(Path(folder).glob(f"{SCRATCH_PREFIX}*")):
        if is_of_another_host(path.name.removeprefix(SCRATCH_PREFIX).split("-")[1:-1]):  # older names have no marks
            continue
        if path.is_dir() and not path.is_symlink():
            removed += _collect_scratch_folder(path)
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's file, a link, or removed meanwhile
            continue
        try:
            status = os.fstat(fd)
            owner = _dead_owner(str(path), fd) if stat.S_ISREG(status.st_mode) else None
            if owner is not None:
                uuid, name, pid = owner
                path.unlink(missing_ok=True)
                if uuid:
                    Path(control_folder, f"memascend-{uuid}").unlink(missing_ok=True)
                removed.append(RemovedScratch(str(path), name, pid, status.st_blocks * 512))
        finally:
            os.close(fd)
    return removed


def _collect_scratch_folder(path: Path) -> list[RemovedScratch]:
    """Remove a scratch folder; return an empty list if its owner lives, or if it is not a scratch folder."""
    try:
        fd = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with contextlib.suppress(OSError):  # killed before it wrote one, or not ours: then it is not empty
            path.rmdir()
        return []
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not _is_dead(fd):
            return []
        try:
            said = json.loads(os.pread(fd, 4096, 0) or b'{"owner": "", "pid": 0}')
            owner, pid = str(said["owner"]), int(said["pid"])
        except (ValueError, KeyError, TypeError):
            return []
        size = sum(each.lstat().st_blocks * 512 for each in path.iterdir())
        shutil.rmtree(path, ignore_errors=True)
        return [RemovedScratch(str(path), owner, pid, size)]
    finally:
        os.close(fd)


def _dead_owner(path: str, fd: int) -> tuple[str, str, int] | None:
    """Return the store's uuid, owner and PID; empty strings and 0 if it was killed while creating the file.

    Returns None if the owner lives (it holds the lock), or if the file is not a scratch file.
    """
    if not _is_dead(fd):
        return None
    try:
        block = _C.storage_superblock(path)
    except (OSError, RuntimeError):
        return None
    if block is None:
        return None if any(os.pread(fd, 2 * UNIT_BYTES, 0)) else ("", "", 0)
    return (block["uuid"], block["owner"], block["scratch_pid"]) if block["scratch_pid"] else None

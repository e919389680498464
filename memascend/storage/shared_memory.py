"""Detection and removal of what killed processes have left in shared memory (/dev/shm).

There are two kinds of files. A store's control file (2 MiB or more) carries locks that its living users hold, so it is
certain when their process is dead (csrc/core/control_file.cpp). DeepSpeed's all-reduce buffers (66 MiB per rank) carry
none, and DeepSpeed never removes them: one counts as left over if no process maps it and it is not newly created.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memascend.storage.locks import try_lock

CONTROL_FOLDER = "/dev/shm"
# Sizes of a control file (csrc/core/control_layout.h): header and reservations, and one bit per unit of space.
_CONTROL_BYTES, _PAGE_BYTES = 4096 + 16 * 131072, 4096
_CONTROL = re.compile(r"memascend-[0-9a-f]{32}")
# Buffers of one rank that DeepSpeed's CPU all-reduce creates (shm.cpp): twice 1 and twice 32 MiB, and a header.
_ALL_REDUCE_BYTES = 67 << 20
_BUFFER_PREFIX = "deepspeed_allreduce_buffer_"
_OPENING, _PRESENCE = 0, 1  # locked bytes of a control file: while it is being opened, and while it is in use
_UNLOCKED = "dead, its locks are not held by any process"
_UNMAPPED = "dead, no process maps it"
_YOUNG_S = 60  # by then ranks of another container, whose mappings are not visible here, have opened their buffers


@dataclass(frozen=True)
class Leftover:
    """A removed file and its bytes; `kind` says what it was, `sign` why its owner is known to be dead."""

    path: str
    kind: str
    sign: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.bytes:>14,} bytes {self.path}, {self.kind}: {self.sign}"


def control_file_bytes(data_bytes: int, unit_bytes: int) -> int:
    """Return the bytes of the control file of a one-file store with `data_bytes` of space in such units."""
    units = -(-data_bytes // unit_bytes)
    return _CONTROL_BYTES + -(-units // (8 * _PAGE_BYTES)) * _PAGE_BYTES


@dataclass(frozen=True)
class Headroom:
    """Free shared memory, and what DeepSpeed training on a CPU device needs there, in bytes."""

    free_bytes: int
    needed_bytes: int

    FIX = "start a container with --shm-size=1g (Podman, Docker); elsewhere: sudo mount -o remount,size=1g /dev/shm"

    @property
    def suffices(self) -> bool:
        return self.free_bytes >= self.needed_bytes


def headroom(ranks: int, folder: str | os.PathLike[str] = CONTROL_FOLDER) -> Headroom:
    """Return free and needed bytes. A container has 64 MiB by default, which is less than one rank's buffers."""
    status = os.statvfs(folder)
    return Headroom(status.f_bavail * status.f_frsize, ranks * (_ALL_REDUCE_BYTES + _CONTROL_BYTES))


def collect_shared_memory(folder: str | os.PathLike[str] = CONTROL_FOLDER) -> list[Leftover]:
    """Remove the control files and DeepSpeed buffers of dead processes; other users' files are left alone."""
    root, removed = Path(folder), []
    for path in sorted(root.glob("memascend-*")):
        size = _remove_control(path) if _CONTROL.fullmatch(path.name) else None
        if size is not None:
            removed.append(Leftover(str(path), "control file", _UNLOCKED, size))
    buffers = [path for path in sorted(root.glob(f"{_BUFFER_PREFIX}*")) if _is_old_file_of_ours(path)]
    mapped = _mapped_files() if buffers else set()
    for path in buffers:
        status = path.lstat()
        if (status.st_dev, status.st_ino) not in mapped:
            path.unlink(missing_ok=True)
            kind = "DeepSpeed's all-reduce buffer"
            removed.append(Leftover(str(path), kind, _UNMAPPED, status.st_blocks * 512))
    return removed


def _remove_control(path: Path) -> int | None:
    """Remove a control file as a store's last user would; return the bytes freed, or None if in use or not ours."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not (try_lock(handle, _OPENING) and try_lock(handle, _PRESENCE)):
            return None
        path.unlink(missing_ok=True)
        return status.st_blocks * 512
    finally:
        os.close(handle)


def _is_old_file_of_ours(path: Path) -> bool:
    """Return whether this is a regular file of this user (for root: of any user) that is not newly created."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = status.st_uid == os.geteuid() or os.geteuid() == 0
    return stat.S_ISREG(status.st_mode) and mine and time.time() - status.st_mtime > _YOUNG_S


def _mapped_files() -> set[tuple[int, int]]:
    """Return (device, inode) of every file that visible processes map, as far as permissions allow."""
    return {entry for maps in Path("/proc").glob("[0-9]*/maps") for entry in _mappings(maps)}


def _mappings(maps: Path) -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of each mapped file of a process; nothing if its `maps` cannot be read."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:  # the process has ended, or is another user's
        return
    for line in lines:
        device, inode = line.split(None, 5)[3:5]
        if inode != "0":
            major, minor = device.split(":")
            yield os.makedev(int(major, 16), int(minor, 16)), int(inode)

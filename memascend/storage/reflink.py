"""Files that share blocks with another file, created without copying, that later writes to either do not change.

A *reflink* (Btrfs, XFS, and other file systems with FICLONERANGE) shares ranges of any file until one side is written.
A *hard link* is a second name of a whole file, so it is safe only if the owner of the other name writes to new files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

REFLINK, LINK = "reflink", "link"
_FICLONERANGE = 0x4020940D  # linux/fs.h: struct file_clone_range {s64 fd; u64 offset; u64 length; u64 to}
BLOCK_BYTES = 4096  # ranges begin and end at multiples of the file system's block size


def reflinked(source: str | os.PathLike[str], ranges: Sequence[tuple[int, int]], target: Path, nbytes: int) -> bool:
    """Create `target` from the `ranges` (offset, bytes) of `source`, truncated to `nbytes`.

    Offsets are multiples of 4096. Returns False, and leaves no file, if that is not possible: different file systems,
    no reflinks, larger blocks. Raises OSError if `target` cannot be created. Syncing `target` also makes the data
    written to `source` durable.
    """
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = shared(source, ranges, handle, 0)
        if done:
            os.ftruncate(handle, nbytes)
        else:
            os.unlink(target)
        return done
    finally:
        os.close(handle)


def shared(source: str | os.PathLike[str], ranges: Sequence[tuple[int, int]], handle: int, at: int) -> bool:
    """Share the `ranges` of `source` with the file open as `handle`, from byte `at` on; return whether that succeeded.

    `at` is a multiple of 4096, and the file ends at or before it. Whole blocks are shared, up to the end of `source`.
    On failure (the file systems cannot), `handle` may have some of the blocks.
    """
    try:
        with open(source, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for offset, length in ranges:
                whole = min(-(-length // BLOCK_BYTES) * BLOCK_BYTES, size - offset)
                fcntl.ioctl(handle, _FICLONERANGE, struct.pack("=qQQQ", file.fileno(), offset, whole, at))
                at += whole
        return True
    except OSError:
        return False


def hard_linked(source: str | os.PathLike[str], target: Path) -> bool:
    """Create `target` as another name of `source`; return False, and leave no file, if that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def detach(path: str | os.PathLike[str], *, keep_content: bool) -> None:
    """Give `path` its own file before a write, if the file has another name too.

    With `keep_content` that is a copy; else `path` is removed, and the writer creates it. A missing `path` is ignored.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_nlink == 1:
            return
        if not keep_content:
            os.unlink(path)
            return
        own = f"{os.fspath(path)}.own"
        with open(path, "rb") as source, open(own, "wb") as target:
            while sent := os.sendfile(target.fileno(), source.fileno(), None, 1 << 30):
                del sent
        os.replace(own, path)

"""Files that share their blocks with another one: made without moving a byte, and left alone by whoever writes it next.

A *reflink* (Btrfs, XFS, and others that know FICLONERANGE) shares ranges of any file until one side is written. A *hard
link* is a second name of a whole file, so it is safe only while the other name's owner writes to new files.
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
BLOCK_BYTES = 4096  # ranges begin and end at multiples of the file system's block


def reflinked(source: str | os.PathLike[str], ranges: Sequence[tuple[int, int]], target: Path, nbytes: int) -> bool:
    """Make `target` of the `ranges` (offset, bytes) of `source`, cut off at `nbytes`. Offsets are multiples of 4096.

    False, and nothing is left, where the file systems cannot: another one, no reflinks, larger blocks. Raises OSError
    where `target` cannot be made. What `source` was written is on the disk when `target` has been synced.
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
    """Have the file open as `handle`, which ends no later than there, share the `ranges` of `source` from byte `at` on,
    a multiple of 4096; whole blocks, as far as `source` goes. False where the file systems cannot: `handle` may then
    have some of the blocks."""
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
    """Make `target` another name of `source`; False, and nothing is left, where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def detach(path: str | os.PathLike[str], *, keep_content: bool) -> None:
    """Before `path` is written: where its file has another name too, `path` gets a file of its own.

    With `keep_content` a copy, else none, which the writer makes. A `path` that is not there is left so.
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

"""Quick measurements of the speed of this machine's SSD and memory, of about a second each.

They only tell a suitable drive from an unsuitable one; the benchmark `memascend bench nvme` compares with fio.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
BLOCK_BYTES = 8 * MIB
# Requests in flight, enough to saturate a drive with blocks of this size.
DEPTH = 4
# Large enough to exceed a drive's internal cache, small enough to write in a second or two.
DEFAULT_BYTES = 1 << 30
_ENOUGH_S = 2.0


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Bytes per second of sequential O_DIRECT requests of 8 MiB, four at a time, and the bytes that were written."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    tried_bytes: int


@contextlib.contextmanager
def temporary_file(folder: Path, flags: int = 0) -> Iterator[int]:
    """Yield the descriptor of a new file in `folder` that is unlinked as soon as it is open, so it never stays behind.

    Raises OSError, naming a path in the folder, if it cannot be created (EINVAL: the file system refuses O_DIRECT).
    """
    descriptor, name = -1, ""
    try:
        fd, name = tempfile.mkstemp(prefix=".memascend-doctor-", dir=folder)
        os.close(fd)
        descriptor = os.open(name, os.O_RDWR | flags)
    finally:
        if name:
            os.unlink(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def takes_direct_io(folder: Path) -> str:
    """Write and read one page with O_DIRECT in `folder`; return an empty string on success, otherwise the reason."""
    try:
        with temporary_file(folder, os.O_DIRECT) as descriptor, mmap.mmap(-1, 4096) as page:
            page[:9] = b"memascend"
            if os.pwritev(descriptor, [page], 0) != 4096:
                return "a write of 4096 bytes was cut short"
            page[:9] = bytes(9)
            if os.preadv(descriptor, [page], 0) != 4096 or page[:9] != b"memascend":
                return "what was written did not come back"
            if not _is_served(descriptor):
                return "it is accepted, and goes through the page cache all the same"
    except OSError as error:
        return "the file system refuses it (EINVAL)" if error.errno == errno.EINVAL else str(error.strerror)
    return ""


def _is_served(descriptor: int) -> bool:
    """Return whether the kernel reports direct I/O for the file; True if the extension that asks is missing."""
    try:
        from memascend.storage.native import _C
    except ImportError:
        return True
    return _C.direct_limits(f"/proc/self/fd/{descriptor}")[0]


def device_speed(folder: Path, size_bytes: int = DEFAULT_BYTES) -> DeviceSpeed:
    """Write `size_bytes` to an unnamed file in `folder` and read them back, bypassing the page cache.

    Each direction stops after two seconds. Raises OSError if O_DIRECT is unsupported or space is missing.
    """
    blocks = max(DEPTH, size_bytes // BLOCK_BYTES)
    with temporary_file(folder, os.O_DIRECT) as descriptor, contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(DEPTH)]
        for index, buffer in enumerate(buffers):
            buffer[:] = os.urandom(MIB) * (BLOCK_BYTES // MIB)  # zeros are not written by some drives and hosts
            buffer[:1] = bytes([index])
        written, write_s = _stream(os.pwritev, descriptor, buffers, blocks)
        start = time.monotonic()
        os.fdatasync(descriptor)
        write_s += time.monotonic() - start
        read, read_s = _stream(os.preadv, descriptor, buffers, written)
    return DeviceSpeed(
        write_bytes_per_s=written * BLOCK_BYTES / write_s,
        read_bytes_per_s=read * BLOCK_BYTES / read_s,
        tried_bytes=written * BLOCK_BYTES,
    )


def _stream(
    call: Callable[[int, list[mmap.mmap], int], int], descriptor: int, buffers: list[mmap.mmap], blocks: int
) -> tuple[int, float]:
    """Move up to `blocks` blocks until the time is up; return (blocks moved, seconds). Each thread has one buffer."""
    start = time.monotonic()

    def worker(lane: int) -> int:
        moved = 0
        for block in range(lane, blocks, DEPTH):
            if call(descriptor, [buffers[lane]], block * BLOCK_BYTES) != BLOCK_BYTES:
                raise OSError(errno.EIO, f"a request of {BLOCK_BYTES} bytes was cut short at {block * BLOCK_BYTES}")
            moved += 1
            if time.monotonic() - start > _ENOUGH_S:
                break
        return moved

    with ThreadPoolExecutor(DEPTH) as pool:
        moved = sum(pool.map(worker, range(DEPTH)))
    return moved, time.monotonic() - start


def memory_speed(size_bytes: int = 256 * MIB) -> float:
    """Return the read bandwidth of memory in bytes per second.

    It is the best of three runs of torch's sum over a tensor far larger than the caches.
    """
    import torch

    tensor = torch.ones(size_bytes // 4)
    best = float("inf")
    for _ in range(3):
        start = time.monotonic()
        tensor.sum()
        best = min(best, time.monotonic() - start)
    return size_bytes / best

"""How fast this machine's SSD and memory are, tried for about a second each.

Not a benchmark: `memascend bench nvme` measures against fio. This tells a drive that will do from one that will not.
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
# Requests that are in flight at once: what it takes to fill a drive with blocks of this size.
DEPTH = 4
# Large enough to outlast a drive's answer from its own memory, small enough to write in a second or two.
DEFAULT_BYTES = 1 << 30
_ENOUGH_S = 2.0


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Bytes per second of sequential O_DIRECT requests of 8 MiB, four at a time; and how many bytes each took."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    tried_bytes: int


@contextlib.contextmanager
def temporary_file(folder: Path, flags: int = 0) -> Iterator[int]:
    """Descriptor of a new file in `folder` that has no name as soon as it is open: nothing is left behind, ever.

    OSError with the folder's name where it cannot be made (EINVAL: the file system refuses O_DIRECT).
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
    """Write and read one page with O_DIRECT in `folder`: an empty text where it works, else why it does not."""
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
    """What the kernel says of the file; yes where the extension that asks is not installed."""
    try:
        from memascend.storage.native import _C
    except ImportError:
        return True
    return _C.direct_limits(f"/proc/self/fd/{descriptor}")[0]


def device_speed(folder: Path, size_bytes: int = DEFAULT_BYTES) -> DeviceSpeed:
    """Write `size_bytes` to a nameless file in `folder` and read them back, past the page cache.

    Stops early after two seconds each way. Raises OSError where O_DIRECT or space is missing.
    """
    blocks = max(DEPTH, size_bytes // BLOCK_BYTES)
    with temporary_file(folder, os.O_DIRECT) as descriptor, contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(DEPTH)]
        for index, buffer in enumerate(buffers):
            buffer[:] = os.urandom(MIB) * (BLOCK_BYTES // MIB)  # not zeros: some drives and hosts write those for free
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
    """(blocks moved, seconds): up to `blocks`, each thread with a buffer of its own, until the time is up."""
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
    """Bytes per second that memory delivers: torch's sum of a tensor far larger than the caches, the best of three."""
    import torch

    tensor = torch.ones(size_bytes // 4)
    best = float("inf")
    for _ in range(3):
        start = time.monotonic()
        tensor.sum()
        best = min(best, time.monotonic() - start)
    return size_bytes / best

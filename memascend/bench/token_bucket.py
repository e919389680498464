"""Drives of a known rate, by a token bucket, where the kernel cannot hold them to one.

The kernel throttles each direction by itself, and for root. Here each transfer takes its turn on a clock in a file that
all processes share, and ends no sooner than that: bytes over the rate of its direction, in the order in which they were
asked for; one after the other (*simplex*, as the papers' models assume), or each direction by itself (*duplex*). The
data go to a faster drive meanwhile, which must keep up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch

from memascend.storage.completion import Completion, Promise
from memascend.storage.path import Busy
from memascend.storage.tier import Tier, Transferred

_CLOCK = struct.Struct("d")  # one for reads, and where they are apart one for writes


class PacedDrive:
    """The clock of one drive, in the file `clock`, which is made; rates in bytes a second. Thread-safe."""

    def __init__(
        self, clock: str | os.PathLike[str], read_bytes_per_s: float, write_bytes_per_s: float, duplex: bool = False
    ) -> None:
        self._rates, self._duplex = (read_bytes_per_s, write_bytes_per_s), duplex
        self._lock = threading.Lock()
        self._file = os.open(clock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 2 * _CLOCK.size)
        self._free_at = mmap.mmap(self._file, 2 * _CLOCK.size)

    @property
    def name(self) -> str:
        """The same in all processes that share the clock."""
        status = os.fstat(self._file)
        return f"paced-{os.major(status.st_dev)}-{os.minor(status.st_dev)}-{status.st_ino}"

    def book(self, nbytes: int, *, write: bool) -> float:
        """When a transfer that is asked for now ends, on this machine's monotonic clock."""
        at = _CLOCK.size * (self._duplex and write)
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                begin = max(time.monotonic(), *_CLOCK.unpack_from(self._free_at, at))
                end = begin + nbytes / self._rates[write]
                _CLOCK.pack_into(self._free_at, at, end)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return end


_Turns = queue.SimpleQueue[tuple[float, int, Promise] | None]


class PacedTier:
    """`tier`, whose transfers end when the drive's clock says; all else is the tier's own."""

    def __init__(self, tier: Tier, drive: PacedDrive) -> None:
        self._tier, self._drive = tier, drive
        self._busy, self._lock = Busy(), threading.Lock()
        self._turns: list[_Turns] = [queue.SimpleQueue(), queue.SimpleQueue()]  # by direction, in the order of ends
        for write in (False, True):
            threading.Thread(target=self._end_in_time, args=(write,), name="memascend-bucket", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def drive_name(self) -> str:
        return self._drive.name

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        return self._paced(self._tier.write(key, tensor, offset=offset, priority=priority), tensor.nbytes, write=True)

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        return self._paced(self._tier.read(key, tensor, offset=offset, priority=priority), tensor.nbytes, write=False)

    @property
    def transferred(self) -> Transferred:
        """By the drive's clock, not by the faster one below it."""
        with self._lock:
            return self._busy.transferred()

    def _paced(self, transfer: Completion, nbytes: int, *, write: bool) -> Completion:
        turn = Promise("a turn on a paced drive")
        with self._lock:
            self._turns[write].put((self._drive.book(nbytes, write=write), nbytes, turn))
            self._busy.begin(write)
        return transfer.then(lambda _: turn)

    def _end_in_time(self, write: bool) -> None:
        """A transfer that fails has had its turn all the same."""
        while (turn := self._turns[write].get()) is not None:
            end, nbytes, promise = turn
            time.sleep(max(0.0, end - time.monotonic()))
            with self._lock:
                self._busy.end(write, nbytes)
            promise.set_result()

    def close(self) -> None:
        for turns in self._turns:
            turns.put(None)
        self._tier.close()


class PacedHandle:
    """DeepNVMe's handle, whose `wait` returns no sooner than the drive's clock says for what it waits for."""

    def __init__(self, handle: Any, drive: PacedDrive) -> None:
        self._handle, self._drive = handle, drive
        self._end = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self._end = self._drive.book(buffer.nbytes, write=False)
        return self._handle.async_pread(buffer, *file, **options)

    def async_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self._end = self._drive.book(buffer.nbytes, write=True)
        return self._handle.async_pwrite(buffer, *file, **options)

    def sync_pread(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self.async_pread(buffer, *file, **options)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self.async_pwrite(buffer, *file, **options)
        return self.wait()

    def wait(self) -> int:
        count = self._handle.wait()
        time.sleep(max(0.0, self._end - time.monotonic()))
        return count


def clock_of(folder: str | os.PathLike[str]) -> Path:
    """Where the clock of a folder's drive lies."""
    return Path(folder) / "paced.clock"

"""Emulated drives of known speed: a request completes no sooner than it would on a drive with the given rates.

The transfers are real, on a path that must be faster than the emulated drive; `late_share` is the fraction of the bytes
for which it was not. The kernel's I/O controller is unsuitable: it admits a tenth of a second's worth of bytes at once,
separately for each direction, so a chain of small reads and writes takes only as long as the longer direction; and it
needs root.

`RateLimiter`        emulates a drive of one process, which serves one request at a time, reads and writes alike, by
                     descending priority. It is the device of the simulator and of Eqs. 2, 4 and 5 of LoHan.
`SharedRateLimiter`  emulates a drive shared by all processes that use the same clock file. It serves requests in order
                     of arrival, one at a time (*simplex*, as MLP-Offload's models assume) or one per direction
                     (*duplex*).
"""

from __future__ import annotations

import fcntl
import functools
import heapq
import itertools
import mmap
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memascend.storage.completion import Completion, Promise, all_of
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.storage_path import Busy
from memascend.storage.tier import Tier, Transferred

_CLOCK = struct.Struct("d")  # one for reads or, if not duplex, for both directions; another for writes


class Limiter:
    """Interface of the drive of a `RateLimitedTier`. Thread-safe."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._bytes = self._late_bytes = 0

    def serve(self, nbytes: int, ended: Callable[[], None], *, write: bool, priority: int) -> Promise:
        """Queue a request of `nbytes`; the promise completes when the drive has served it, just after `ended()`."""
        raise NotImplementedError

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """Return the counters that a tier reports.

        `moved` are those of the underlying, faster path; `busy` are the tier's bytes and busy seconds in the drive's
        time.
        """
        raise NotImplementedError

    def joined(self) -> None:
        """Note that a tier has begun to use the drive."""

    def left(self) -> None:
        """Note that a tier that used the drive has been closed."""

    def moved(self, nbytes: int, *, late: bool) -> None:
        """Count a finished transfer on the underlying path, `late` if it ended after its turn on the drive."""
        with self._counting:
            self._bytes += nbytes
            self._late_bytes += nbytes * late

    @property
    def late_share(self) -> float:
        """Fraction of all bytes that the underlying path moved later than the emulated drive would have."""
        return self._late_bytes / self._bytes if self._bytes else 0.0


class RateLimiter(Limiter):
    """A drive of `rate` bytes per second, used by one process. Its thread ends with `close`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._asked: list[tuple[int, int, float, int, Callable[[], None], Promise]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="memascend-rate-limit", daemon=True)
        self._thread.start()

    def serve(
        self, nbytes: int, ended: Callable[[], None] = lambda: None, *, write: bool = False, priority: int = 0
    ) -> Promise:
        """Queue a request; of those that wait, one with the highest priority is served next."""
        promise = Promise(f"{nbytes} bytes at {self.rate:.3g} a second")
        with self._changed:
            asked = (-priority, next(self._count), time.perf_counter(), nbytes, ended, promise)
            heapq.heappush(self._asked, asked)
            self._changed.notify()
        return promise

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """Return the bytes moved, with the seconds that they take at this drive's rate."""
        read, written = moved.bytes_read, moved.bytes_written
        return Transferred(read, written, read / self.rate, written / self.rate)

    def close(self) -> None:
        """Serve queued requests without delay, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        """Serve the requests one at a time; the drive is busy with each for its bytes over the rate."""
        free = 0.0
        while True:
            with self._changed:
                while not self._asked and not self._closed:
                    self._changed.wait()
                if not self._asked:
                    return
                _, _, asked, nbytes, ended, promise = heapq.heappop(self._asked)
            free = max(free, asked) + nbytes / self.rate
            if (left := free - time.perf_counter()) > 0 and not self._closed:
                time.sleep(left)
            ended()
            promise.set_result()


_Turns = queue.SimpleQueue[tuple[float, Callable[[], None], Promise] | None]


class SharedRateLimiter(Limiter):
    """A drive shared by processes through the file `clock`, which is created; rates are in bytes per second.

    Its threads, one for each direction, end when the last tier that uses it is closed.
    """

    def __init__(
        self, clock: str | os.PathLike[str], read_bytes_per_s: float, write_bytes_per_s: float, duplex: bool = False
    ) -> None:
        super().__init__()
        self._rates, self._duplex = (read_bytes_per_s, write_bytes_per_s), duplex
        self._lock, self._ordering = threading.Lock(), threading.Lock()
        self._file = os.open(clock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 2 * _CLOCK.size)
        self._free_at = mmap.mmap(self._file, 2 * _CLOCK.size)
        self._tiers = 0
        self._turns: list[_Turns] = []  # by direction, in the order of ends

    @property
    def name(self) -> str:
        """Name of the drive, the same in all processes that share the clock."""
        status = os.fstat(self._file)
        return f"rate-limited-{os.major(status.st_dev)}-{os.minor(status.st_dev)}-{status.st_ino}"

    def book(self, nbytes: int, *, write: bool) -> float:
        """Reserve the drive for a transfer requested now, and return its end on the monotonic clock in seconds."""
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

    def limit(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """Change the rates for this process's future requests."""
        self._rates = (read_bytes_per_s, write_bytes_per_s)

    def serve(self, nbytes: int, ended: Callable[[], None], *, write: bool, priority: int) -> Promise:
        """Queue a request; `priority` is ignored, since other processes do not know it."""
        turn = Promise("a turn on a rate-limited drive")
        with self._ordering:
            self._turns[write].put((self.book(nbytes, write=write), ended, turn))
        return turn

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """Return `busy`, the times by the clock, since other processes use the drive in between."""
        return busy

    def joined(self) -> None:
        """Start the threads if this is the first tier that uses the drive in this process."""
        with self._ordering:
            self._tiers += 1
            if self._tiers == 1:
                self._turns = [queue.SimpleQueue(), queue.SimpleQueue()]
                for turns in self._turns:
                    threading.Thread(target=_end_in_time, args=(turns,), name="memascend-bucket", daemon=True).start()

    def left(self) -> None:
        """End the threads if no tier uses the drive any more."""
        with self._ordering:
            self._tiers -= 1
            for turns in self._turns if not self._tiers else ():
                turns.put(None)


def _end_in_time(turns: _Turns) -> None:
    """End each request at its time on the shared clock, in order, until None arrives."""
    while (turn := turns.get()) is not None:
        end, ended, promise = turn
        time.sleep(max(0.0, end - time.monotonic()))
        ended()
        promise.set_result()


class RateLimitedTier:
    """Wrapper around `tier` whose transfers end when both the path and the emulated drive have completed them.

    Everything else is passed to the tier. A transfer that fails has used its turn on the drive all the same.
    """

    def __init__(self, tier: Tier, drive: Limiter) -> None:
        self._tier, self._drive = tier, drive
        self._busy, self._lock = Busy(), threading.Lock()
        drive.joined()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def drive_name(self) -> str:
        """Name of a shared drive, or the tier's own drive name if it has one."""
        return self._drive.name

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Write as the tier does; the completion ends no sooner than the drive allows."""
        moving = self._tier.write(key, tensor, offset=offset, priority=priority)
        return self._limited(moving, tensor.nbytes, True, priority)

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Read as the tier does; the completion ends no sooner than the drive allows."""
        moving = self._tier.read(key, tensor, offset=offset, priority=priority)
        return self._limited(moving, tensor.nbytes, False, priority)

    @property
    def transferred(self) -> Transferred:
        """Bytes moved and busy seconds by the drive's time, not by that of the faster path."""
        with self._lock:
            busy = self._busy.transferred()
        return self._drive.transferred(self._tier.transferred, busy)

    def _limited(self, moving: Completion, nbytes: int, write: bool, priority: int) -> Completion:
        """Return the completion of a transfer that both the path and the drive have finished."""

        def ended() -> None:
            with self._lock:
                self._busy.end(write, nbytes)

        with self._lock:
            self._busy.begin(write)
        served = self._drive.serve(nbytes, ended, write=write, priority=priority)
        # Callbacks run in the order in which the completions ended. `served.done()` would instead give the state at
        # the time when the callback runs.
        turn_over: list[bool] = []
        served.add_done_callback(lambda _: turn_over.append(True))
        moving.add_done_callback(lambda _: self._drive.moved(nbytes, late=bool(turn_over)))
        return all_of([moving, served]).then(lambda values: values[0])

    def close(self) -> None:
        """Close the tier, and release the drive."""
        self._tier.close()
        self._drive.left()


class RateLimitedHandle:
    """Wrapper around DeepNVMe's handle whose `wait` returns no sooner than the drive's clock allows."""

    def __init__(self, handle: Any, drive: SharedRateLimiter) -> None:
        self._handle, self._drive = handle, drive
        self._end = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        """Start the read, and book the drive for it."""
        self._end = self._booked(buffer.nbytes, write=False)
        return self._handle.async_pread(buffer, *file, **options)

    def async_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        """Start the write, and book the drive for it."""
        self._end = self._booked(buffer.nbytes, write=True)
        return self._handle.async_pwrite(buffer, *file, **options)

    def _booked(self, nbytes: int, *, write: bool) -> float:
        """Book a transfer and return the end of all pending ones, in either direction."""
        return max(self._end, self._drive.book(nbytes, write=write))

    def sync_pread(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self.async_pread(buffer, *file, **options)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self.async_pwrite(buffer, *file, **options)
        return self.wait()

    def wait(self) -> int:
        """Wait for the handle, then until the drive's clock reaches the end of the last booked transfer."""
        count = self._handle.wait()
        time.sleep(max(0.0, self._end - time.monotonic()))
        return count


def clock_of(folder: str | os.PathLike[str]) -> Path:
    """Return the path of the clock file for a folder's drive."""
    return Path(folder) / "rate.clock"


class RateLimitedTiers:
    """Replacement for DirectTier whose constructors wrap each tier in the emulated drive of its path."""

    def __init__(self, drive_of: Callable[[str | os.PathLike[str]], Limiter]) -> None:
        self._drive_of = drive_of

    def in_file(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> RateLimitedTier:
        """Open the tier as DirectTier does, on the drive of its folder."""
        return RateLimitedTier(DirectTier.in_file(path, *args, **options), self._drive_of(path))

    def on_devices(self, paths: Sequence[str | os.PathLike[str]], *args: Any, **options: Any) -> RateLimitedTier:
        """Open the tier as DirectTier does, on the drive of the first device."""
        return RateLimitedTier(DirectTier.on_devices(paths, *args, **options), self._drive_of(paths[0]))


@contextmanager
def rate_limited(rate: float) -> Iterator[RateLimiter]:
    """Make the streaming engines created inside the context share one emulated drive of `rate` bytes per second.

    Contexts must not overlap, since the modules of the engine are patched.
    """
    from memascend.engine import scratch_storage, state_store

    server = RateLimiter(rate)
    modules = (state_store, scratch_storage)
    for module in modules:
        module.DirectTier = RateLimitedTiers(lambda _: server)
    try:
        yield server
    finally:
        for module in modules:
            module.DirectTier = DirectTier
        server.close()


def limit_process(rates: Mapping[str, Sequence[Any]], name: str) -> None:
    """Emulate a separate drive for each of these folders, for all storage below them, for the rest of this process.

    This covers our tiers, and DeepNVMe's handle, which knows no paths and gets the first drive. `rates` maps a folder
    to its read and write rates in bytes per second, and whether the drive is duplex. Processes that pass the same
    `name` share the drives.
    """
    from memascend.activation import offload
    from memascend.engine import scratch_storage, state_store
    from memascend.integrations import memory_options
    from memascend.integrations.deepspeed import aio, swap_store

    drives = {
        os.path.realpath(folder): SharedRateLimiter(f"{folder}.clock{name}", *each) for folder, each in rates.items()
    }

    def drive_of(path: str | os.PathLike[str]) -> SharedRateLimiter:
        return next(drive for folder, drive in drives.items() if Path(os.path.realpath(path)).is_relative_to(folder))

    for module in (offload, scratch_storage, state_store, memory_options, swap_store):
        module.DirectTier = RateLimitedTiers(drive_of)
    several, files = swap_store.open_paths, swap_store.FileTier
    swap_store.FileTier = lambda folder, *args, **how: RateLimitedTier(files(folder, *args, **how), drive_of(folder))
    swap_store.open_paths = functools.partial(several, around=lambda path, tier: RateLimitedTier(tier, drive_of(path)))
    first = next(iter(drives.values()))

    def limited_handle(module: Any, *args: Any, **how: Any) -> Any:
        handle = RateLimitedHandle(module._stock.aio_handle(*args, **how), first)
        return aio.MeteredAioHandle(handle, module._ledger, module._counters)

    aio.MeteredAioModule.aio_handle = limited_handle

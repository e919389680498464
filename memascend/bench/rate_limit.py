"""Drives of known speed: what one is asked for is done no sooner than it could be.

The transfers are real ones, to a path that has to be faster; `late_share` says of how much of the bytes it was not.
The kernel's own controller cannot stand in for this: it lets what a tenth of a second may move pass at once, in each
direction by itself, so that a chain of small reads and writes takes as long as the longer of them; and it is for root.

`RateLimiter`        one process's drive: one request after the other, reads and writes alike, those with the larger
                     priority first. The device that the simulator runs and that Eqs. 2, 4 and 5 of LoHan describe.
`SharedRateLimiter`  for all processes that name its clock, a file: in the order in which they asked, one after the
                     other (*simplex*, as MLP-Offload's models assume) or each direction by itself (*duplex*).
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

_CLOCK = struct.Struct("d")  # one for reads, and where they are apart one for writes


class Limiter:
    """What a `RateLimitedTier` asks of its drive. Thread-safe."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._bytes = self._late_bytes = 0

    def serve(self, nbytes: int, ended: Callable[[], None], *, write: bool, priority: int) -> Promise:
        """Ends when the drive is done with it; `ended` is called just before."""
        raise NotImplementedError

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """What a tier says that its path has `moved` faster, and that was `busy` so long with the drive's time."""
        raise NotImplementedError

    def joined(self) -> None:
        """A tier uses it."""

    def left(self) -> None:
        """It is closed."""

    def moved(self, nbytes: int, *, late: bool) -> None:
        """The transfer itself has ended, `late` if after its turn."""
        with self._counting:
            self._bytes += nbytes
            self._late_bytes += nbytes * late

    @property
    def late_share(self) -> float:
        """Of all bytes, those that the path moved later than this drive had them."""
        return self._late_bytes / self._bytes if self._bytes else 0.0


class RateLimiter(Limiter):
    """Of `rate` bytes per second. Its thread ends with `close`."""

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
        promise = Promise(f"{nbytes} bytes at {self.rate:.3g} a second")
        with self._changed:
            asked = (-priority, next(self._count), time.perf_counter(), nbytes, ended, promise)
            heapq.heappush(self._asked, asked)
            self._changed.notify()
        return promise

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """With the seconds that the bytes take here."""
        read, written = moved.bytes_read, moved.bytes_written
        return Transferred(read, written, read / self.rate, written / self.rate)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
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
    """The clock of one drive, in the file `clock`, which is made; rates in bytes per second. Its threads, one for each
    direction, end with the last tier that uses it."""

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
        """The same in all processes that share the clock."""
        status = os.fstat(self._file)
        return f"rate-limited-{os.major(status.st_dev)}-{os.minor(status.st_dev)}-{status.st_ino}"

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

    def limit(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """For what this process asks from now on."""
        self._rates = (read_bytes_per_s, write_bytes_per_s)

    def serve(self, nbytes: int, ended: Callable[[], None], *, write: bool, priority: int) -> Promise:
        """`priority` is not looked at: other processes know nothing of it."""
        turn = Promise("a turn on a rate-limited drive")
        with self._ordering:
            self._turns[write].put((self.book(nbytes, write=write), ended, turn))
        return turn

    def transferred(self, moved: Transferred, busy: Transferred) -> Transferred:
        """By the clock: others have the drive in between."""
        return busy

    def joined(self) -> None:
        with self._ordering:
            self._tiers += 1
            if self._tiers == 1:
                self._turns = [queue.SimpleQueue(), queue.SimpleQueue()]
                for turns in self._turns:
                    threading.Thread(target=_end_in_time, args=(turns,), name="memascend-bucket", daemon=True).start()

    def left(self) -> None:
        with self._ordering:
            self._tiers -= 1
            for turns in self._turns if not self._tiers else ():
                turns.put(None)


def _end_in_time(turns: _Turns) -> None:
    while (turn := turns.get()) is not None:
        end, ended, promise = turn
        time.sleep(max(0.0, end - time.monotonic()))
        ended()
        promise.set_result()


class RateLimitedTier:
    """`tier`, whose transfers end when the path and the drive have done them; all else is the tier's own. A transfer
    that fails has had its turn all the same."""

    def __init__(self, tier: Tier, drive: Limiter) -> None:
        self._tier, self._drive = tier, drive
        self._busy, self._lock = Busy(), threading.Lock()
        drive.joined()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def drive_name(self) -> str:
        """Of a shared drive; else the tier's own, if it has one."""
        return self._drive.name

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        moving = self._tier.write(key, tensor, offset=offset, priority=priority)
        return self._limited(moving, tensor.nbytes, True, priority)

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        moving = self._tier.read(key, tensor, offset=offset, priority=priority)
        return self._limited(moving, tensor.nbytes, False, priority)

    @property
    def transferred(self) -> Transferred:
        """By the drive's time, not by the faster path below it."""
        with self._lock:
            busy = self._busy.transferred()
        return self._drive.transferred(self._tier.transferred, busy)

    def _limited(self, moving: Completion, nbytes: int, write: bool, priority: int) -> Completion:
        def ended() -> None:
            with self._lock:
                self._busy.end(write, nbytes)

        with self._lock:
            self._busy.begin(write)
        served = self._drive.serve(nbytes, ended, write=write, priority=priority)
        # Callbacks run in the order in which completions ended; `served.done()` would say what holds when one runs.
        turn_over: list[bool] = []
        served.add_done_callback(lambda _: turn_over.append(True))
        moving.add_done_callback(lambda _: self._drive.moved(nbytes, late=bool(turn_over)))
        return all_of([moving, served]).then(lambda values: values[0])

    def close(self) -> None:
        self._tier.close()
        self._drive.left()


class RateLimitedHandle:
    """DeepNVMe's handle, whose `wait` returns no sooner than the drive's clock says for what it waits for."""

    def __init__(self, handle: Any, drive: SharedRateLimiter) -> None:
        self._handle, self._drive = handle, drive
        self._end = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self._end = self._booked(buffer.nbytes, write=False)
        return self._handle.async_pread(buffer, *file, **options)

    def async_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        self._end = self._booked(buffer.nbytes, write=True)
        return self._handle.async_pwrite(buffer, *file, **options)

    def _booked(self, nbytes: int, *, write: bool) -> float:
        """The end of all that is waited for; of the two directions the later one."""
        return max(self._end, self._drive.book(nbytes, write=write))

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
    return Path(folder) / "rate.clock"


class RateLimitedTiers:
    """In DirectTier's place: its makers, with the drive that a path has around what they make."""

    def __init__(self, drive_of: Callable[[str | os.PathLike[str]], Limiter]) -> None:
        self._drive_of = drive_of

    def in_file(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> RateLimitedTier:
        return RateLimitedTier(DirectTier.in_file(path, *args, **options), self._drive_of(path))

    def on_devices(self, paths: Sequence[str | os.PathLike[str]], *args: Any, **options: Any) -> RateLimitedTier:
        return RateLimitedTier(DirectTier.on_devices(paths, *args, **options), self._drive_of(paths[0]))


@contextmanager
def rate_limited(rate: float) -> Iterator[RateLimiter]:
    """Streaming engines that are made in the block share one server. Not for two blocks at a time."""
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
    """From now on each of these folders is on a drive of its own in this process, for whatever stores below it: our
    tiers, and DeepNVMe's handle, which knows no paths and has the first. `rates`: bytes per second read and written,
    and whether the directions are apart. Processes that say the same `name` share the drives."""
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

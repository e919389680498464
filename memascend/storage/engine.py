"""Common parts of the direct and the file engine: outcomes of requests, and statistics.

A submission returns the request's number. Its outcome is reported once, by whichever of these comes first:

- ``wait(request)`` or ``wait()`` block a thread;
- ``take_ended()`` does not block: an event loop polls ``completion_fd`` and takes what has ended, so that the next step
  can follow a transfer without a thread that waits for it.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memascend.storage.errors import Failure, StorageError, raise_first
from memascend.storage.leaving import end_engine, moved_by

if TYPE_CHECKING:
    from memascend import _C

__all__ = ["EngineStatistics", "Outcome", "RequestCancelled", "StorageEngine", "quantile_us"]

log = logging.getLogger("memascend")

_warned_about: set[int] = set()  # file systems whose use of the page cache was logged, by device number


@dataclass(frozen=True)
class EngineStatistics:
    """Counters since the engine was created. Latencies are histograms of commands: (lower bound in us, count).

    `requests` have ended, including failed and cancelled ones. `commands` went to the kernel; `repeated` of them were
    interrupted or temporarily refused. `bounced_bytes` were copied through a bounce buffer, `buffered_bytes` through
    the page cache; `direct` is False if a file system refuses O_DIRECT. `reading_s` and `writing_s` are the seconds in
    which at least one read or write was in flight, from submission to end. `reread` counts reads that were restarted
    because the tensor was written meanwhile.
    """

    bytes_read: int
    bytes_written: int
    requests: int
    failed: int
    cancelled: int
    commands: int
    short_transfers: int
    repeated: int
    reread: int
    bounced_bytes: int
    buffered_bytes: int
    max_queue_depth: int
    mean_queue_depth: float
    reading_s: float
    writing_s: float
    read_latency_us: tuple[tuple[int, int], ...]
    write_latency_us: tuple[tuple[int, int], ...]
    direct: bool


class Outcome(NamedTuple):
    """The end of a request; it succeeded if it was not cancelled and `failure` is None."""

    request: int
    cancelled: bool
    failure: StorageError | None

    def check(self) -> None:
        """Raise the StorageError of a failed request, or RequestCancelled for a cancelled one."""
        if self.failure is not None:
            raise self.failure
        if self.cancelled:
            raise RequestCancelled(f"request {self.request} was cancelled")


class RequestCancelled(RuntimeError):
    """The request that was waited for had been cancelled."""


class StorageEngine:
    """Base class of the engines. Thread-safe; not usable in a forked child."""

    _native: _C._Engine
    _finalizer: weakref.finalize[..., Any]
    _pid: int
    _warned = False

    def wait(self, request: int | None = None, timeout_s: float | None = None) -> int:
        """Block until `request`, or everything submitted, has ended; return how many requests this call reports.

        Other threads run meanwhile. Raises StorageError for the (first) failed request; RequestCancelled if `request`
        was cancelled; ValueError for a number that is unknown or was already reported (by `take_ended`, or by
        another wait); TimeoutError after `timeout_s` seconds, in which case nothing was reported, and the wait may be
        repeated.
        """
        seconds = -1.0 if timeout_s is None else max(0.0, timeout_s)
        if request is None:
            outcomes = self._native.wait(seconds)
        else:
            one = self._native.wait_for(request, seconds)
            outcomes = None if one is None else [(request, *one)]
        self._tell_if_buffered()
        if outcomes is None:
            raise TimeoutError(f"{self.pending} requests have not completed after {timeout_s} s{self._where()}")
        raise_first([failure for _, _, failure in outcomes if failure is not None])
        if request is not None and outcomes[0][1]:
            raise RequestCancelled(f"request {request} was cancelled")
        return len(outcomes)

    def take_ended(self) -> list[Outcome]:
        """Return the outcomes of ended requests that were not reported yet. Does not block or raise StorageError.

        Requests that another thread waits for by number are left to it. What was taken is not reported again: `wait()`
        skips it, and `wait(request)` raises ValueError for it.
        """
        self._tell_if_buffered()
        return [Outcome(number, gone, _error_of(failure)) for number, gone, failure in self._native.take_ended()]

    @property
    def completion_fd(self) -> int:
        """An eventfd (nonblocking) that is readable while outcomes wait to be reported.

        Use it with select, epoll or ``loop.add_reader(engine.completion_fd, on_ready)``, where `on_ready` calls
        `take_ended`. Reading it is not necessary. The engine owns and closes it: remove it from the loop first.

        Between a poll and `take_ended`, a wait of another thread may report what had ended; the list is then empty.
        """
        return self._native.completion_fd

    def cancel(self, request: int) -> bool:
        """Drop the parts of the request that have not gone to the kernel; return False if it has ended.

        Its outcome must still be waited for or taken.
        """
        return self._native.cancel(request)

    def end(self) -> None:
        """End all requests, then the threads; submissions raise RuntimeError. Outcomes can still be taken.

        Idempotent; `close` does this too. After Ctrl-C, requests that hang are left, as in `close`.
        """
        if not end_engine(self._native, self._place, self._pid):
            self._finalizer.detach()

    def close(self) -> None:
        """Call `end`, and release the engine's resources. Idempotent."""
        raise NotImplementedError

    def leave(self) -> None:
        """Abandon the engine: hanging requests, threads and their memory stay until the process ends.

        The exit of the process does not wait for them. Nothing may be submitted or waited for afterwards.
        """
        self._finalizer.detach()
        self._native.leave()

    def progress(self) -> object:
        """Return counters that stay equal while nothing moves."""
        return moved_by(self._native)

    @property
    def pending(self) -> int:
        """Number of requests that have not ended."""
        return self._native.pending

    @property
    def statistics(self) -> EngineStatistics:
        """The counters of this engine since it was created."""
        return EngineStatistics(**self._native.statistics(), direct=self.direct)

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache; False if a file system refuses O_DIRECT.

        The direct engine knows that from its start, the file engine from the first request on such a file. The logger
        "memascend" reports it once.
        """
        return not self._native.buffered_path

    def _tell_if_buffered(self) -> None:
        """Log a warning, once per file system, if transfers go through the page cache."""
        if self._warned or not (path := self._native.buffered_path):
            return
        self._warned = True
        try:
            device = os.stat(path).st_dev
        except OSError:  # removed meanwhile
            return
        if device not in _warned_about:
            _warned_about.add(device)
            log.warning(
                "%s: its file system refuses O_DIRECT: transfers go through the page cache, which costs memory and "
                "time: use a folder on ext4 or XFS on the SSD itself (require_direct makes this an error)",
                path,
            )

    def _where(self) -> str:
        """Return the engine's devices for the end of a message; empty by default."""
        return ""

    def _place(self) -> str:
        """Return the devices, or a file with requests in flight, for messages about an engine that hangs."""
        raise NotImplementedError


def _error_of(failure: Failure | None) -> StorageError | None:
    """Return the exception for a native failure, or None."""
    return None if failure is None else StorageError.of(failure)


def quantile_us(histogram: Sequence[tuple[int, int]], share: float) -> float:
    """Return the latency quantile `share` as the lower bound of its bucket (an eighth wide), in us; NaN if empty."""
    total = sum(count for _, count in histogram)
    seen = 0
    for floor, count in histogram:
        seen += count
        if seen >= share * total:
            return float(floor)
    return math.nan

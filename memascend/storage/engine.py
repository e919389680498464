"""What the direct and the file engine have in common: how requests end, and what is counted.

A submission returns the request's number. Its outcome is reported once, by whichever of these asks first:

- ``wait(request)`` or ``wait()`` block a thread;
- ``take_ended()`` does not block: an event loop polls ``completion_fd`` and takes what has ended, so that a transfer
  can be followed by the next step without a thread that waits for it.
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

_told_about: set[int] = set()  # file systems whose page cache is used, by device number


@dataclass(frozen=True)
class EngineStatistics:
    """Since the engine was made. Latencies are of commands: (least microseconds of the bucket, count).

    `requests` have ended, failed and cancelled ones included. `commands` went to the kernel; `repeated` of them were
    interrupted or refused for the moment. Of the bytes, `bounced_bytes` were copied through a bounce buffer and
    `buffered_bytes` through the page cache; `direct` is False where a file system refuses O_DIRECT. `reading_s` and
    `writing_s`: while at least one read, one write was in flight, from submission to end. `reread`: reads begun again
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
    """How a request ended: well if it was not cancelled and `failure` is None."""

    request: int
    cancelled: bool
    failure: StorageError | None

    def check(self) -> None:
        """Raises the StorageError of a failed request, RequestCancelled for a cancelled one."""
        if self.failure is not None:
            raise self.failure
        if self.cancelled:
            raise RequestCancelled(f"request {self.request} was cancelled")


class RequestCancelled(RuntimeError):
    """The request that was waited for had been cancelled."""


class StorageEngine:
    """Base of the engines. Thread-safe; not usable in a forked child."""

    _native: _C._Engine
    _finalizer: weakref.finalize[..., Any]
    _pid: int
    _told = False

    def wait(self, request: int | None = None, timeout_s: float | None = None) -> int:
        """Block until `request`, or everything submitted, has ended; returns how many are reported by this call.

        Other threads run meanwhile. Raises StorageError for the (first) failed request, RequestCancelled for a
        cancelled one that was named, ValueError for a number that is unknown or reported already (by `take_ended`, or
        by another wait), TimeoutError when `timeout_s` is up: then nothing has been reported, and waiting again is
        right.
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
        """The outcomes of requests that have ended and were not reported yet; does not block, raises no StorageError.

        Those that another thread waits for by number are left to it; `wait()` without a number does not report again
        what was taken, and `wait(request)` raises ValueError for it.
        """
        self._tell_if_buffered()
        return [Outcome(number, gone, _error_of(failure)) for number, gone, failure in self._native.take_ended()]

    @property
    def completion_fd(self) -> int:
        """A descriptor (eventfd, nonblocking) that is readable while outcomes wait to be reported: for select, epoll or
        ``loop.add_reader(engine.completion_fd, on_ready)`` with an `on_ready` that calls `take_ended`. Reading it is
        not necessary. It belongs to the engine, and is closed with it: remove it from the loop first.

        Between a poll and `take_ended`, a wait of another thread may have reported what had ended: the list is then
        empty.
        """
        return self._native.completion_fd

    def cancel(self, request: int) -> bool:
        """Drop what of the request has not gone to the kernel. False: it has ended. It still has to be waited for, or
        taken."""
        return self._native.cancel(request)

    def end(self) -> None:
        """End all requests, then the threads; submissions raise RuntimeError. What has ended can still be taken.

        Idempotent; `close` does it too. After Ctrl-C it leaves what hangs, as `close`.
        """
        if not end_engine(self._native, self._place, self._pid):
            self._finalizer.detach()

    def close(self) -> None:
        """`end`, and give back what the engine holds. Idempotent."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let it be: requests that hang, threads, and the memory of both stay until the process has ended, which does
        not wait for them. Nothing may be submitted or waited for any more."""
        self._finalizer.detach()
        self._native.leave()

    def progress(self) -> object:
        """Equal as long as nothing moves."""
        return moved_by(self._native)

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return self._native.pending

    @property
    def statistics(self) -> EngineStatistics:
        return EngineStatistics(**self._native.statistics(), direct=self.direct)

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache. False where a file system refuses O_DIRECT: of the direct engine
        from its start, of the file engine from the first request on such a file; the logger "memascend" tells once."""
        return not self._native.buffered_path

    def _tell_if_buffered(self) -> None:
        if self._told or not (path := self._native.buffered_path):
            return
        self._told = True
        try:
            device = os.stat(path).st_dev
        except OSError:  # removed by now
            return
        if device not in _told_about:
            _told_about.add(device)
            log.warning(
                "%s: its file system refuses O_DIRECT: transfers go through the page cache, which costs memory and "
                "time: use a folder on ext4 or XFS on the SSD itself (require_direct makes this an error)",
                path,
            )

    def _where(self) -> str:
        return ""

    def _place(self) -> str:
        raise NotImplementedError


def _error_of(failure: Failure | None) -> StorageError | None:
    return None if failure is None else StorageError.of(failure)


def quantile_us(histogram: Sequence[tuple[int, int]], share: float) -> float:
    """The latency below which `share` of the commands lie, by bucket (an eighth wide); NaN of none."""
    total = sum(count for _, count in histogram)
    seen = 0
    for floor, count in histogram:
        seen += count
        if seen >= share * total:
            return float(floor)
    return math.nan

"""Completions for the requests of one engine."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import ClassVar

from memascend.storage import completion as completions
from memascend.storage import interrupts, leaving
from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.engine import StorageEngine
from memascend.storage.errors import StorageError
from memascend.storage.interrupts import whole

_SLICE_S = interrupts.SLICE_S  # slice of a wait, after which it checks for Ctrl-C and for an abandoned engine
_LOST_S = 0.5  # time after which an outcome that nobody reports is searched for


class Transfer(Completion):
    """The completion of an engine request. It has no number until its turn on its key comes."""

    def __init__(self, what: str, requests: Requests, at_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(what)
        self._requests = requests
        self._at_end: Callable[[BaseException | None], None] | None = at_end
        self._number: int | None = None
        self._cancelled = False

    @whole
    def begin(self, submit: Callable[[], int]) -> None:
        """Submit the request in its turn; an error of `submit` becomes the transfer's error."""
        try:
            if self._cancelled:
                raise RequestCancelled(f"{self._what} was cancelled")
            self._requests.submit(self, submit)
        except (OSError, RuntimeError, ValueError) as error:
            self.end(error)

    @whole
    def end(self, error: BaseException | None) -> None:
        """Call the tier's `at_end`, unless that was done, then settle with `error` or, if it is None, successfully."""
        at_end, self._at_end = self._at_end, None  # breaks the reference to this transfer and its tier
        if at_end is not None:  # else it was already ending, and was interrupted
            at_end(error)  # before settling, so that waiters see its effects
        self._settle(error=error)

    def done(self) -> bool:
        if not self._done and self._number is not None and self._pid == os.getpid():
            self._requests.collect()
        return self._done

    def cancel(self) -> bool:
        self._cancelled = True
        return not self._done and (self._number is None or self._requests.cancel(self._number))

    def _watched(self) -> None:
        self._requests.watch()

    @whole
    def _block(self, timeout_s: float | None) -> None:
        """Wait in the engine, without the dispatcher while nobody needs it, so no other thread has to run for this."""
        number = self._number
        if number is None or self._pid != os.getpid() or completions.in_dispatcher():
            super()._block(timeout_s)
        elif not self._requests.wait_for(number, timeout_s, self._what):
            self._await_report(number, timeout_s)

    @whole
    def _await_report(self, number: int, timeout_s: float | None) -> None:
        """Wait for the thread that took the outcome to report it. Ctrl-C may have come between taking and reporting."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOST_S if deadline is None else min(_LOST_S, max(0.0, deadline - time.monotonic()))
            try:
                super()._block(left)
                return
            except TimeoutError:
                if self._requests.lost(number):
                    self.end(RequestCancelled(f"{self._what}: an interrupt came when it had ended: do it again"))
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._what} has not ended after {timeout_s} s") from None


class Requests:
    """The transfers of one engine by number. Waiting threads or the dispatcher report their outcomes.

    The dispatcher keeps this object alive only while transfers are in flight: an engine that is dropped without `close`
    ends.
    """

    _MANY = 1024  # unclaimed outcomes are collected every so many submissions
    _at_work: ClassVar[set[Requests]] = set()  # instances with transfers in flight that the dispatcher serves

    def __init__(self, engine: StorageEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._live: dict[int, Transfer] = {}
        self._fd = -1
        self._submitted = 0
        self._closed = self._left = False
        self._reporting: set[int] = set()  # threads that may have taken an outcome and not yet reported it

    @whole
    def submit(self, transfer: Transfer, submit: Callable[[], int]) -> None:
        """Call `submit`, and keep the transfer by the number that it returns. Raises RuntimeError after `close`."""
        with self._lock:  # so that no outcome is taken before its transfer is known
            if self._closed:
                raise RuntimeError(f"{transfer._what}: the tier is closed")
            transfer._number = number = submit()
            self._live[number] = transfer
            self._submitted += 1
            if self._fd >= 0:
                self._at_work.add(self)
            collect = self._fd < 0 and self._submitted % self._MANY == 0
        if collect:
            self.take()

    @whole
    def watch(self) -> None:
        """Let the dispatcher report outcomes from now on."""
        with self._lock:
            if self._fd < 0 and not self._closed:
                self._fd, self._take = self.engine.completion_fd, _taking(self)
                if self._live:
                    self._at_work.add(self)
                completions.watch(self._fd, self._take)
                self._finalizer = weakref.finalize(self, completions.unwatch_soon, self._fd, self._take)
                self._finalizer.atexit = False

    @whole
    def cancel(self, number: int) -> bool:
        """Cancel a request in the engine; return False if it has ended or cannot be stopped any more."""
        with self._lock:
            return number in self._live and not self._closed and self.engine.cancel(number)

    @whole
    def wait_for(self, number: int, timeout_s: float | None, what: str) -> bool:
        """Block until the request has ended, and report it; return False if another thread is about to do that."""
        error: BaseException | None = None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        leaving.begin_if_asked()
        this_thread = threading.get_ident()
        self._reporting.add(this_thread)
        try:
            while not self._left:
                left_s = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
                try:
                    interrupts.check()  # only here, so that an ended request is always reported
                    self.engine.wait(number, left_s)
                except TimeoutError:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"{what} has not ended after {timeout_s} s") from None
                    continue
                except (StorageError, RequestCancelled) as caught:
                    error = caught
                except (ValueError, AttributeError):  # its outcome was taken, or the engine was closed meanwhile
                    return False
                except BaseException:  # raised by a signal handler, such as Ctrl-C's
                    leaving.begin()
                    raise
                self._ended(number, error)
                return True
            return False
        finally:
            self._reporting.discard(this_thread)

    @whole
    def lost(self, number: int) -> bool:
        """Return whether nobody will report a request whose outcome was taken, and forget the request if so."""
        if self._left:  # whoever abandoned the engine ends its transfers
            return False
        with self._lock:
            if self._reporting - {threading.get_ident()}:
                return False
            self._live.pop(number, None)
            if not self._live:
                self._at_work.discard(self)
            return True

    @whole
    def collect(self) -> None:
        """Report what has ended, unless the dispatcher does that. Does not block."""
        with self._lock:
            needed = self._fd < 0 and not self._closed
        if needed:
            self.take()

    @whole
    def take(self) -> None:
        """Take the outcomes that the engine has, and end their transfers. Does not block."""
        this_thread = threading.get_ident()
        self._reporting.add(this_thread)
        try:
            for outcome in self.engine.take_ended():
                error: BaseException | None = outcome.failure
                if error is None and outcome.cancelled:
                    error = RequestCancelled(f"request {outcome.request} was cancelled")
                self._ended(outcome.request, error)
        finally:
            self._reporting.discard(this_thread)

    def _ended(self, number: int, error: BaseException | None) -> None:
        """End the transfer of a request, unless the engine was abandoned."""
        with self._lock:
            transfer = self._live.pop(number, None)
            if not self._live:
                self._at_work.discard(self)
        # None: Ctrl-C came right after the submission, and the caller never got the transfer.
        if transfer is not None and not self._left:
            transfer.end(error)

    def progress(self) -> object:
        """Return counters that stay equal while nothing moves."""
        engine = self.engine
        return None if engine is None else engine.progress()

    def leave(self) -> None:
        """Abandon the engine as it is until the process ends; nothing that ends there is reported any more."""
        self._left = self._closed = True  # without the lock, since a call that holds it may hang
        self._unwatch()
        if self.engine is not None:
            self.engine.leave()

    @whole
    def close(self) -> None:
        """End the requests, then the engine, unless it was abandoned."""
        if self._left:
            return
        with self._lock:
            self._closed = True
        self._unwatch()
        self.engine.end()
        self.take()
        self.engine.close()
        self.engine = None  # type: ignore[assignment]  # releases its descriptor; later calls are AttributeErrors

    def _unwatch(self) -> None:
        """Let the dispatcher report no more outcomes."""
        fd, self._fd = self._fd, -1
        self._at_work.discard(self)
        if fd >= 0:
            self._finalizer.detach()
            completions.unwatch(fd, self._take)


def _taking(requests: Requests) -> Callable[[], None]:
    """Return a callback for the dispatcher that calls `take` without keeping `requests` alive."""
    there = weakref.ref(requests)

    def take() -> None:
        if (requests := there()) is not None:
            requests.take()

    return take


os.register_at_fork(after_in_child=Requests._at_work.clear)  # they are the parent's

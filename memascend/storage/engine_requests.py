"""The transfers of one engine as completions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from memascend.storage import completion as completions
from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.engine import StorageEngine
from memascend.storage.errors import StorageError


class Transfer(Completion):
    """A request of an engine; before its turn on its key it has no number."""

    def __init__(self, what: str, requests: Requests, at_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(what)
        self._requests = requests
        self._at_end: Callable[[BaseException | None], None] | None = at_end
        self._number: int | None = None
        self._cancelled = False

    def begin(self, submit: Callable[[], int]) -> None:
        """In its turn, later than the call that made it: what `submit` raises is its end."""
        try:
            if self._cancelled:
                raise RequestCancelled(f"{self._what} was cancelled")
            self._requests.submit(self, submit)
        except (OSError, RuntimeError, ValueError) as error:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        at_end, self._at_end = self._at_end, None  # which holds this transfer and its tier
        at_end(error)  # first: whoever waits sees what it has changed
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

    def _block(self, timeout_s: float | None) -> None:
        """Without the dispatcher, as long as nobody needs it: then no other thread has to run for this one's end."""
        own = self._number is not None and self._pid == os.getpid() and not completions.in_dispatcher()
        if not own or not self._requests.wait_for(self._number, timeout_s, self._what):
            super()._block(timeout_s)


class Requests:
    """The transfers of one engine by number. Their outcomes come from whoever waits, or from the dispatcher."""

    _MANY = 1024  # outcomes that nobody has asked for are collected every so many submissions

    def __init__(self, engine: StorageEngine) -> None:
        self.engine: StorageEngine | None = engine
        self._lock = threading.Lock()
        self._live: dict[int, Transfer] = {}
        self._fd = -1
        self._submitted = 0
        self._closed = False

    def submit(self, transfer: Transfer, submit: Callable[[], int]) -> None:
        with self._lock:  # so that nobody takes the outcome before its transfer is known
            if self._closed:
                raise RuntimeError(f"{transfer._what}: the tier is closed")
            transfer._number = number = submit()
            self._live[number] = transfer
            self._submitted += 1
            collect = self._fd < 0 and self._submitted % self._MANY == 0
        if collect:
            self.take()

    def watch(self) -> None:
        """From now on the dispatcher takes what ends."""
        with self._lock:
            if self._fd < 0 and not self._closed:
                self._fd = self.engine.completion_fd
                completions.watch(self._fd, self.take)

    def cancel(self, number: int) -> bool:
        with self._lock:
            return number in self._live and not self._closed and self.engine.cancel(number)

    def wait_for(self, number: int, timeout_s: float | None, what: str) -> bool:
        """Block until the request has ended, and report it. False: somebody else is about to."""
        error: BaseException | None = None
        try:
            self.engine.wait(number, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{what} has not ended after {timeout_s} s") from None
        except (StorageError, RequestCancelled) as caught:
            error = caught
        except (ValueError, AttributeError):  # its outcome was taken; or the engine has been closed meanwhile
            return False
        self._ended(number, error)
        return True

    def collect(self) -> None:
        """Report what has ended, where the dispatcher does not. Does not block."""
        with self._lock:
            needed = self._fd < 0 and not self._closed
        if needed:
            self.take()

    def take(self) -> None:
        for outcome in self.engine.take_ended():
            error: BaseException | None = outcome.failure
            if error is None and outcome.cancelled:
                error = RequestCancelled(f"request {outcome.request} was cancelled")
            self._ended(outcome.request, error)

    def _ended(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            transfer = self._live.pop(number)
        transfer.end(error)

    def close(self) -> None:
        """End the requests, then the engine."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, -1
        if fd >= 0:
            completions.unwatch(fd)
        self.engine.end()
        self.take()
        self.engine.close()
        self.engine = None  # with its descriptor

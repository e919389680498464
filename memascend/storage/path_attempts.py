"""Transfers of a multi-path tier, and their attempts: one transfer on one path, through the path's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.errors import StorageError
from memascend.storage.path_failures import PathFailures
from memascend.storage.storage_path import Attempt, Busy, StoragePath, nothing_ends

__all__ = ["PathAttempts", "PathTransfer"]


class PathTransfer(Completion):
    """One read or write of a key, over as many attempts as it needs."""

    def __init__(self, what: str, on_cancel: Callable[[PathTransfer], bool]) -> None:
        super().__init__(what)
        self._on_cancel = on_cancel
        self._cancelled = False
        self._attempt: Attempt | None = None

    @property
    def submitted(self) -> bool:
        """Whether the current attempt was submitted, and therefore ends by itself."""
        return self._attempt is not None and self._attempt.inner is not None

    def cancel(self) -> bool:
        if self._done:
            return False
        self._cancelled = True
        return self._on_cancel(self)


def _as_failure_of(path: StoragePath, error: BaseException, write: bool, nbytes: int) -> BaseException:
    """Return an OSError of a system call (such as for a folder that vanished) as a StorageError, others unchanged.

    A StorageError is what the tier takes for a failure of the path.
    """
    if not isinstance(error, OSError) or isinstance(error, StorageError):
        return error
    place, reason = error.filename or path.name, error.strerror or str(error)
    found = StorageError("write" if write else "read", str(place), 0, nbytes, 0, error.errno, reason)
    found.__cause__ = error
    return found


class PathAttempts:
    """Begins attempts for a tier, and tracks them under the tier's `lock`."""

    def __init__(self, failures: PathFailures, busy: Busy, lock: threading.RLock) -> None:
        self._failures, self._busy, self._lock = failures, busy, lock

    def begin(
        self,
        transfer: PathTransfer,
        path: StoragePath,
        write: bool,
        nbytes: int,
        submit: Callable[[], Completion],
        ended: Callable[[BaseException | None], None],
        *,
        now: bool,
    ) -> None:
        """Begin one transfer on one path, through its lock, and call `ended` with its error or None.

        An OSError of `submit` becomes a StorageError. `now`: if `submit` fails during this call, raise its error
        instead of passing it to `ended`.
        """
        attempt = Attempt(path, write, ended)
        here = threading.get_ident()
        raised: list[BaseException] = []

        def start() -> None:
            if (stopped := self._note_start(attempt, transfer)) is not None:
                path.lock.leave()
                ended(stopped)
                return
            try:
                attempt.inner = submit()
            except BaseException as caught:
                error = _as_failure_of(path, caught, write, nbytes)
                if not self._over(attempt, 0):  # it was given up, and `ended` was called
                    return
                if now and threading.get_ident() == here and not transfer._done and begun_here:
                    raised.append(error)
                else:
                    ended(error)
                return
            attempt.inner.add_done_callback(over)
            if transfer._cancelled:
                attempt.inner.cancel()

        def over(inner: Completion) -> None:
            error = inner.error()
            if self._over(attempt, nbytes if error is None else 0):
                ended(error)

        transfer._attempt = attempt
        begun_here = True
        path.lock.enter(start)
        begun_here = False
        if raised:
            raise raised[0]

    def _note_start(self, attempt: Attempt, transfer: PathTransfer) -> BaseException | None:
        """Note that an attempt starts now, or return why it must not start."""
        path = attempt.path
        with self._lock:
            if transfer._cancelled:
                return RequestCancelled(f"{transfer._what} was cancelled")
            if path.hanging:
                return nothing_ends(path, self._failures.hang_s)
            path.in_flight[attempt] = time.monotonic()
            self._busy.begin(attempt.write)
            self._failures.watch()
        return None

    def _over(self, attempt: Attempt, nbytes: int) -> bool:
        """Record the end of an attempt. Returns False if it was given up before, so that nobody waits for its end."""
        with self._lock:
            path = attempt.path
            path.in_flight.pop(attempt, None)
            path.last_end = time.monotonic()
            if attempt.over:  # late: it hung for a while; data on the path is readable again
                path.hanging = any(each.over for each in path.in_flight)
                return False
            attempt.over = True
            self._busy.end(attempt.write, nbytes)
        path.lock.leave()
        return True

"""Transfers of a tier over several paths, and their attempts: one transfer on one path, through its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.path_failures import PathFailures
from memascend.storage.storage_path import Attempt, Busy, StoragePath, nothing_ends

__all__ = ["PathAttempts", "PathTransfer"]


class PathTransfer(Completion):
    """One read or write of a key, over as many attempts as it takes."""

    def __init__(self, what: str, on_cancel: Callable[[PathTransfer], bool]) -> None:
        super().__init__(what)
        self._on_cancel = on_cancel
        self._cancelled = False
        self._attempt: Attempt | None = None

    def cancel(self) -> bool:
        if self._done:
            return False
        self._cancelled = True
        return self._on_cancel(self)


class PathAttempts:
    """Of a tier, under its `lock`."""

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
        """One transfer on one path, through its lock. With `now`, raises what `submit` raises if it is called here."""
        attempt = Attempt(path, write, ended)
        here = threading.get_ident()
        raised: list[BaseException] = []

        def start() -> None:
            stopped: BaseException | None = None
            with self._lock:
                if transfer._cancelled:
                    stopped = RequestCancelled(f"{transfer._what} was cancelled")
                elif path.hanging:
                    stopped = nothing_ends(path, self._failures.hang_s)
                else:
                    path.under_way[attempt] = time.monotonic()
                    self._busy.begin(write)
                    self._failures.watch()
            if stopped is not None:
                path.lock.leave()
                ended(stopped)
                return
            try:
                attempt.inner = submit()
            except BaseException as error:
                self._over(attempt, 0)
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

    def _over(self, attempt: Attempt, nbytes: int) -> bool:
        """False: it was given up before, and its end is nobody's."""
        with self._lock:
            path = attempt.path
            path.under_way.pop(attempt, None)
            path.last_end = time.monotonic()
            if attempt.over:  # late: it hung for a time, and what is read there can be read again
                path.hanging = any(each.over for each in path.under_way)
                return False
            attempt.over = True
            self._busy.end(attempt.write, nbytes)
        path.lock.leave()
        return True

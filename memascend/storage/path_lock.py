"""One process on a path at a time, with as many transfers of its own as it likes (MLP-Offload 3.2).

Processes that read and write one drive at once slow each other down by more than their number. A `PathLock` stands
before a path in each process: transfers enter when the process holds the drive's `FairLock`, and the process gives that
up when it has nothing more to do there, or has had its time and another process waits. All paths of a process that are
on one drive share a `PathLock` (`path_lock_of`): with one each they would take turns with themselves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from memascend.storage.fair_lock import FairLock

__all__ = ["PathLock", "path_lock_of"]

log = logging.getLogger("memascend")

_path_locks: dict[str, PathLock] = {}  # of this process, by the name of the lock
_registry_lock = threading.Lock()


def path_lock_of(name: str) -> PathLock:
    """This process's path lock on the fair lock called `name`, which is opened where nobody here has it yet; without a
    fair lock, and with a warning, where that cannot be opened. Every caller closes it; the last one gives it up."""
    with _registry_lock:
        path_lock = _path_locks.get(name)
        if path_lock is None or not path_lock._join():
            path_lock = _path_locks[name] = PathLock(_lock_of(name))
        return path_lock


def _lock_of(name: str) -> FairLock | None:
    try:
        return FairLock(name)
    except OSError as error:
        log.warning("memascend: drive %s: transfers continue without the inter-process lock: %s", name, error)
        return None


def _forget_in_child() -> None:
    """A child has its own turns; its parent's locks are closed in it."""
    global _registry_lock
    _registry_lock = threading.Lock()
    _path_locks.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class PathLock:
    """Thread-safe. Without a lock every transfer enters at once."""

    def __init__(self, lock: FairLock | None, turn_s: float = 0.25) -> None:
        """`turn_s`: seconds after which a process lets nothing more in where another one waits: what a sub-group of
        100 million parameters takes on a drive of 5 GB/s. Takes the lock over, and closes it."""
        self._lock, self._turn_s = lock, turn_s
        self._state = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._inside = 0
        self._has_turn = False  # the lock itself is had a moment before this says so, in the thread that waited for it
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._users = 1
        self.turns = 0  # that this process has had

    def enter(self, begin: Callable[[], None]) -> None:
        """Call `begin` when the path is this process's: in this thread if it is now, else in its own."""
        with self._state:
            self._waiting.append(begin)
            new_turn = False
            if self._lock is not None and not self._has_turn and self._thread is None:
                try:
                    new_turn = self._lock.try_acquire()
                except (OSError, RuntimeError) as error:
                    self._go_on_without(self._lock, error)
                else:
                    self._took(new_turn)
            ready = self._admit(new_turn)
        _run(ready)

    def leave(self) -> None:
        """A transfer that had entered has ended."""
        with self._state:
            self._inside -= 1
            if self._lock is None:
                return
            ready = self._admit()
            if self._inside == 0 and not ready and self._has_turn:
                self._give_up_turn(self._lock)
        _run(ready)

    def _join(self) -> bool:
        """One more user; False: it is closed."""
        with self._state:
            self._users += not self._closed
            return not self._closed

    def close(self) -> None:
        """The last user gives the lock up; what waits begins all the same, since it has to end. Idempotent then."""
        with self._state:
            self._users -= 1
            if self._users > 0:
                return
            self._closed = True
            lock, self._lock = self._lock, None
            if lock is not None and self._thread is None:  # else that thread closes it when it has it
                lock.close()
            ready = self._admit()
        _run(ready)

    def _took(self, taken: bool) -> None:
        """With the state held. What could not be had now is waited for by a thread."""
        if taken:
            self._has_turn, self._since = True, time.monotonic()
            self.turns += 1
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, args=(self._lock,), name="memascend-path-lock", daemon=True
            )
            self._thread.start()

    def _wait(self, lock: FairLock) -> None:
        try:
            lock.acquire()
        except (OSError, RuntimeError) as error:
            with self._state:
                self._thread = None
                self._go_on_without(lock, error)
                ready = self._admit()
            _run(ready)
            return
        with self._state:
            self._thread = None
            if self._closed:
                lock.close()
                return
            self._took(True)
            ready = self._admit(new_turn=True)
            if not ready and self._inside == 0:
                self._give_up_turn(lock)
        _run(ready)

    def _go_on_without(self, lock: FairLock, error: Exception) -> None:
        """With the state held. Without a lock the transfers are right, only slower."""
        log.warning("memascend: %s: transfers continue without the inter-process lock: %s", lock.path, error)
        self._lock = None
        lock.close()

    def _give_up_turn(self, lock: FairLock) -> None:
        """With the state held. What waits is for the next one."""
        self._has_turn = False
        lock.release()
        if self._waiting:
            self._took(False)

    def _admit(self, new_turn: bool = False) -> list[Callable[[], None]]:
        """With the state held: who may begin now; in a new turn, however long it took to get here, what has waited."""
        if self._lock is not None:
            over = not new_turn and time.monotonic() - self._since > self._turn_s
            if not self._has_turn or (self._waiting and over and self._lock.contended()):
                return []
        ready, self._waiting = list(self._waiting), deque()
        self._inside += len(ready)
        return ready


def _run(ready: list[Callable[[], None]]) -> None:
    for begin in ready:
        begin()

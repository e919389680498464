"""Exclusive access to a path for one process at a time, with any number of concurrent transfers (MLP-Offload 3.2).

Processes that read and write one drive at the same time slow each other down more than proportionally. A `PathLock`
therefore guards a path in each process: transfers enter while the process holds the drive's `FairLock`. The process
releases that lock when it has no more transfers there, or when its time slice is over and another process waits. All
paths of a process that are on one drive share a `PathLock` (`path_lock_of`); with separate ones they would take turns
with each other.
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

_path_locks: dict[str, PathLock] = {}  # the path locks of this process, by lock name
_registry_lock = threading.Lock()


def path_lock_of(name: str) -> PathLock:
    """Return this process's path lock for the fair lock called `name`, and open the fair lock on first use.

    If the fair lock cannot be opened, the path lock works without one, and a warning is logged. Every caller must
    close what it gets; the last `close` releases the lock.
    """
    with _registry_lock:
        path_lock = _path_locks.get(name)
        if path_lock is None or not path_lock._join():
            path_lock = _path_locks[name] = PathLock(_lock_of(name))
        return path_lock


def _lock_of(name: str) -> FairLock | None:
    """Return the fair lock called `name`, or None, with a warning, if its file cannot be opened."""
    try:
        return FairLock(name)
    except OSError as error:
        log.warning("memascend: drive %s: transfers continue without the inter-process lock: %s", name, error)
        return None


def _forget_in_child() -> None:
    """Reset the registry: a forked child takes its own turns, and the parent's locks are closed in it."""
    global _registry_lock
    _registry_lock = threading.Lock()
    _path_locks.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class PathLock:
    """Admits transfers while this process has the fair lock; without one, at once. Thread-safe."""

    def __init__(self, lock: FairLock | None, turn_s: float = 0.25) -> None:
        """Take ownership of `lock`, which `close` closes.

        `turn_s` is the time in seconds after which a process admits nothing more if another one waits. The default is
        about what a sub-group of 100 million parameters takes on a drive of 5 GB/s.
        """
        self._lock, self._turn_s = lock, turn_s
        self._state = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._inside = 0
        self._has_turn = False  # set shortly after the waiting thread has acquired the lock
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._users = 1
        self.turns = 0  # turns that this process has had

    def enter(self, begin: Callable[[], None]) -> None:
        """Call `begin` once this process has the path: in this thread if it has it now, else later in another one."""
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
        """Report the end of a transfer that had entered."""
        with self._state:
            self._inside -= 1
            if self._lock is None:
                return
            ready = self._admit()
            if self._inside == 0 and not ready and self._has_turn:
                self._give_up_turn(self._lock)
        _run(ready)

    def _join(self) -> bool:
        """Add a user, and return whether that succeeded; a closed path lock takes none."""
        with self._state:
            self._users += not self._closed
            return not self._closed

    def close(self) -> None:
        """Drop one user. The last one releases the lock and starts what still waits, since it has to end. Idempotent
        from then on."""
        with self._state:
            self._users -= 1
            if self._users > 0:
                return
            self._closed = True
            lock, self._lock = self._lock, None
            if lock is not None and self._thread is None:  # else that thread closes it once it has acquired it
                lock.close()
            ready = self._admit()
        _run(ready)

    def _took(self, taken: bool) -> None:
        """Record whether the lock was `taken`; if not, start a thread that waits for it. Requires `_state`."""
        if taken:
            self._has_turn, self._since = True, time.monotonic()
            self.turns += 1
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, args=(self._lock,), name="memascend-path-lock", daemon=True
            )
            self._thread.start()

    def _wait(self, lock: FairLock) -> None:
        """The thread's target: acquire the fair lock, then begin the transfers that wait for it."""
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
        """Continue without the lock: transfers stay correct and are only slower. Requires `_state`."""
        log.warning("memascend: %s: transfers continue without the inter-process lock: %s", lock.path, error)
        self._lock = None
        lock.close()

    def _give_up_turn(self, lock: FairLock) -> None:
        """Release the lock, and queue for the next turn if transfers wait. Requires `_state`."""
        self._has_turn = False
        lock.release()
        if self._waiting:
            self._took(False)

    def _admit(self, new_turn: bool = False) -> list[Callable[[], None]]:
        """Return the callbacks that may begin now. Requires `_state`.

        A new turn admits everything that has waited, however long the lock took to acquire.
        """
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

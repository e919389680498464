"""Process exit while a drive hangs.

Waiting for a transfer takes as long as the transfer, and so does closing a tier. Ctrl-C requests an exit (so does
SIGTERM, if a handler raises an exception or calls `begin`). From then on, a tier whose transfers in flight make no
progress for `PATIENCE_S` is given up: they end with an error, and so does whatever waits for them, in any thread. One
log line names the path. The kernel may still write to their memory, so the engine, its threads and all its memory stay
as they are until the process ends. A drive that makes progress, however slowly, is still waited for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from memascend.storage import interrupts
from memascend.storage.errors import StorageError, hang_error

__all__ = ["PATIENCE_S", "begin", "begin_if_asked", "end_engine", "moved_by", "register"]

log = logging.getLogger("memascend")

PATIENCE_S = 3.0  # time without progress after which a drive counts as hanging
_WATCH_S = 30.0  # watch time after the last exit request; the process may continue, as in a notebook
_TICK_S = 0.1


class Leavable(Protocol):
    """Something with transfers in flight that can be given up."""

    @property
    def place(self) -> str: ...
    def in_flight(self) -> int: ...
    def progress(self) -> object:
        """Return a value that changes when any transfer makes progress."""

    def give_up(self, error: StorageError) -> None: ...


def nothing_moves(place: str, in_flight: int, waited_s: float) -> StorageError:
    """Return the error for a tier whose transfers in flight made no progress for `waited_s` seconds."""
    what = f"{in_flight} {'transfer is' if in_flight == 1 else 'transfers are'} in flight"
    return hang_error(place, f"{what}, without progress for {waited_s:g} s")


class _Watch:
    """A thread that gives up what hangs; it runs after `begin`, while anything is in flight."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since a signal handler may interrupt its holder
        self._there: list[weakref.ref[Any]] = []
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._patience_s = PATIENCE_S

    def register(self, leavable: Leavable) -> None:
        """Watch `leavable`, referenced weakly."""
        self._there.append(weakref.ref(leavable, self._there.remove))

    @interrupts.whole
    def begin(self, patience_s: float, for_s: float) -> None:
        """Watch for at least `for_s` seconds from now; what makes no progress for `patience_s` seconds is given up."""
        with self._lock:
            self._until, self._patience_s = max(self._until, time.monotonic() + for_s), patience_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memascend-leaving", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """The thread's target: look at everything in flight until the time is over or nothing is left."""
        moved: dict[Leavable, tuple[object, float]] = {}  # last progress, and when it was first seen
        while True:
            now = time.monotonic()
            moved = self._look(moved, now)
            with self._lock:
                if now > self._until or (not moved and self._until < float("inf")):
                    self._thread = None
                    return
            time.sleep(_TICK_S)

    def _look(self, before: dict[Leavable, tuple[object, float]], now: float) -> dict[Leavable, tuple[object, float]]:
        """Give up what has not moved for long enough; return the progress of everything with transfers in flight."""
        moved = {}
        for leavable in [each for reference in list(self._there) if (each := reference()) is not None]:
            if leavable.in_flight():
                progress = leavable.progress()
                known = before.get(leavable)
                moved[leavable] = known if known is not None and known[0] == progress else (progress, now)
        self._give_up([leavable for leavable, (_, since) in moved.items() if now - since >= self._patience_s])
        return moved

    def _give_up(self, hang: Iterable[Leavable]) -> None:
        """Log one line about what hangs, and end its transfers with an error."""
        counts: dict[str, int] = {}
        for leavable in hang:
            counts[leavable.place] = counts.get(leavable.place, 0) + leavable.in_flight()
        if counts:
            tell(counts, self._patience_s)
        for leavable in hang:
            leavable.give_up(nothing_moves(leavable.place, leavable.in_flight(), self._patience_s))


def tell(in_flight: dict[str, int], waited_s: float) -> None:
    """Log one line about the transfers that are left behind, with their number on each path."""
    what = " and ".join(f"{number} on {place}" for place, number in in_flight.items())
    log.warning(
        "memascend: exiting with unfinished transfers in flight (%s; no progress for %g s): the drive or the mount "
        "hangs: check it (dmesg); their memory is only freed when the process ends",
        what,
        waited_s,
    )


_watch = _Watch()


def _begin_anew_in_child() -> None:
    """Drop the watch in a forked child: the parent's transfers are not the child's to give up."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew_in_child)


def register(leavable: Leavable) -> None:
    """Watch `leavable` after an exit request, as long as it exists."""
    _watch.register(leavable)


def begin(patience_s: float = PATIENCE_S, for_s: float = _WATCH_S) -> None:
    """Request an exit: give up what hangs. May be called from any thread and from a signal handler."""
    _watch.begin(patience_s, for_s)


def begin_if_asked() -> None:
    """Call `begin` if an exit is requested (`asked`); used before a wait that may hang."""
    if asked():
        begin()


def asked() -> bool:
    """Return whether a program-ending exception (KeyboardInterrupt, SystemExit with a nonzero code) is in progress.

    That is either the exception being handled, or the one that ends the interpreter.
    """
    error = sys.exception()
    if error is None and not threading.main_thread().is_alive():  # the interpreter is shutting down
        error = getattr(sys, "last_value", None)
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code not in (None, 0))


@interrupts.whole
def end_engine(native: Any, place: Callable[[], str], pid: int) -> bool:
    """Wait for a native engine's requests, then end its threads; without an exit request there is no time limit.

    Returns False if the engine was given up; it then stays as it is until the process ends. KeyboardInterrupt and
    similar exceptions are raised again at the end, when the engine is ended or given up.
    """
    if pid != os.getpid():
        native.shutdown()  # detaches from the parent's threads
        return True
    native.refuse()
    raised: BaseException | None = None
    wanted, moved, since, pause_s, ended = asked(), None, 0.0, 0.0005, True
    while native.pending and ended:
        try:
            interrupts.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            if not wanted:
                continue
            if (progress := moved_by(native)) != moved:
                moved, since = progress, time.monotonic()
            ended = time.monotonic() - since < PATIENCE_S
        except BaseException as error:
            ended = raised is None  # a second exception gives up at once
            raised, wanted = raised or error, True
    if ended:
        native.shutdown()
    else:
        tell({place(): native.pending}, PATIENCE_S)
        native.leave()
    if raised is not None:
        raise raised
    return ended


def moved_by(native: Any) -> object:
    """Return an engine's progress counters, which stay equal while nothing moves."""
    counted = native.statistics()
    return tuple(counted[name] for name in ("bytes_read", "bytes_written", "requests", "commands"))

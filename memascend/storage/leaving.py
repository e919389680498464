"""The end of a process that was asked to stop while a drive hangs.

A wait for a transfer is as long as the transfer, and so is closing a tier: what was begun is waited for. Ctrl-C says
that somebody wants out (or SIGTERM, where a handler turns it into an exception, or calls `begin`). From then on a tier
with transfers in flight of which nothing moves for `PATIENCE_S` is given up: they end with an error, and so does
whatever waits for them, in any thread; one line tells which path it is. The kernel may still write to their memory:
the engine, its threads and all that it holds stay as they are until the process ends. A drive that works, however
slowly, is waited for all the same.
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

PATIENCE_S = 3.0  # without a byte, after which a drive hangs
_WATCH_S = 30.0  # after the last sign that the process is to end; it may go on, as in a notebook
_TICK_S = 0.1


class Leavable(Protocol):
    """What has transfers in flight."""

    @property
    def place(self) -> str: ...
    def under_way(self) -> int: ...
    def progress(self) -> object:
        """Equal as long as nothing moves."""

    def give_up(self, error: StorageError) -> None: ...


def nothing_moves(place: str, under_way: int, waited_s: float) -> StorageError:
    """Of a tier with transfers in flight, of which not a byte has moved for so long."""
    what = f"{under_way} {'transfer is' if under_way == 1 else 'transfers are'} in flight"
    return hang_error(place, f"{what}, without progress for {waited_s:g} s")


class _Watch:
    """A thread that gives up what hangs, from `begin` on as long as anything is in flight."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._there: list[weakref.ref[Any]] = []
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._patience_s = PATIENCE_S

    def register(self, leavable: Leavable) -> None:
        self._there.append(weakref.ref(leavable, self._there.remove))

    @interrupts.whole
    def begin(self, patience_s: float, for_s: float) -> None:
        with self._lock:
            self._until, self._patience_s = max(self._until, time.monotonic() + for_s), patience_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memascend-leaving", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        moved: dict[Leavable, tuple[object, float]] = {}  # what it had moved, and when that was first seen
        while True:
            now = time.monotonic()
            moved = self._look(moved, now)
            with self._lock:
                if now > self._until or (not moved and self._until < float("inf")):
                    self._thread = None
                    return
            time.sleep(_TICK_S)

    def _look(self, before: dict[Leavable, tuple[object, float]], now: float) -> dict[Leavable, tuple[object, float]]:
        """Give up what has not moved for long enough; of all that has transfers in flight what they had moved."""
        moved = {}
        for leavable in [each for reference in list(self._there) if (each := reference()) is not None]:
            if leavable.under_way():
                progress = leavable.progress()
                known = before.get(leavable)
                moved[leavable] = known if known is not None and known[0] == progress else (progress, now)
        self._give_up([leavable for leavable, (_, since) in moved.items() if now - since >= self._patience_s])
        return moved

    def _give_up(self, hang: Iterable[Leavable]) -> None:
        told: dict[str, int] = {}
        for leavable in hang:
            told[leavable.place] = told.get(leavable.place, 0) + leavable.under_way()
        if told:
            tell(told, self._patience_s)
        for leavable in hang:
            leavable.give_up(nothing_moves(leavable.place, leavable.under_way(), self._patience_s))


def tell(under_way: dict[str, int], waited_s: float) -> None:
    """The one line about what is left behind, with its places."""
    what = " and ".join(f"{number} on {place}" for place, number in under_way.items())
    log.warning(
        "memascend: exiting with unfinished transfers in flight (%s; no progress for %g s): the drive or the mount "
        "hangs: check it (dmesg); their memory is only freed when the process ends",
        what,
        waited_s,
    )


_watch = _Watch()


def _begin_anew_in_child() -> None:
    """What the parent has in flight is the parent's to leave."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew_in_child)


def register(leavable: Leavable) -> None:
    """Have it watched when somebody wants out, as long as it is there."""
    _watch.register(leavable)


def begin(patience_s: float = PATIENCE_S, for_s: float = _WATCH_S) -> None:
    """Somebody wants out: give up what hangs. Any thread, also in a signal's handler."""
    _watch.begin(patience_s, for_s)


def begin_if_asked() -> None:
    """Before a wait that a transfer may keep: `begin` where somebody wants out (`asked`)."""
    if asked():
        begin()


def asked() -> bool:
    """Whether an exception that ends programs (KeyboardInterrupt, SystemExit of a handler) is on its way: the one that
    is being handled, or the one that the interpreter ends with."""
    error = sys.exception()
    if error is None and not threading.main_thread().is_alive():  # the interpreter ends
        error = getattr(sys, "last_value", None)
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code not in (None, 0))


@interrupts.whole
def end_engine(native: Any, place: Callable[[], str], pid: int) -> bool:
    """End a native engine's requests, then its threads: as long as that takes, where nobody wants out.

    False: it was given up, and stays as it is until the process ends. KeyboardInterrupt and the like are raised
    again at the end, after which the engine takes part in nothing more.
    """
    if pid != os.getpid():
        native.shutdown()  # lets go of the parent's threads
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
            ended = raised is None  # a second time: at once
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
    """Of an engine: equal as long as nothing moves."""
    counted = native.statistics()
    return tuple(counted[name] for name in ("bytes_read", "bytes_written", "requests", "commands"))

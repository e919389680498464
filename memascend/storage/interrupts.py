"""Delivery of Ctrl-C between related changes rather than in the middle of them.

A signal handler runs in the main thread, between any two bytecodes. Code that moves an outcome from one structure to
another must not be interrupted in between, or the outcome is lost. Also, `Condition` and `Event` of the standard
library never release their lock if KeyboardInterrupt is raised inside their `__enter__`. Such code is
`uninterrupted`: SIGINT is recorded, and its handler is called at the end of the outermost block. Waits in such a block
are sliced, with `check` before and between the slices, so that Ctrl-C ends them. A second SIGINT that comes
`PATIENCE_S` or more after the first is delivered at once.
"""

from __future__ import annotations

import _signal  # not `signal`, whose functions take 50 times as long, since they convert numbers to enums
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["PATIENCE_S", "SLICE_S", "check", "patient", "record_waits", "uninterrupted", "wait", "whole"]

PATIENCE_S = 0.5  # how long a block that should complete may defer Ctrl-C
SLICE_S = 0.1  # length of one slice of a wait, after which Ctrl-C is checked

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Uninterrupted:
    """Nested blocks of the main thread that defer SIGINT; a no-op in other threads, where no handler runs."""

    def __init__(self) -> None:
        self._depth = 0  # number of blocks entered
        self._before: Any = None  # the replaced handler; None if there was no Python handler to replace
        self._noted: list[float] = []  # times at which SIGINT came
        self._patient = 0  # number of blocks that let waits end

    def is_on(self) -> bool:
        """Return whether the caller is inside a block already, or in a thread where no handler runs."""
        return self._depth > 0 or threading.get_ident() != threading.main_thread().ident

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            handler = _signal.getsignal(_signal.SIGINT)
            if handler != self._note:
                self._noted.clear()
                self._before = handler if callable(handler) else None
            if self._before is not None:
                _signal.signal(_signal.SIGINT, self._note)  # a pending signal raises here, before any state has changed
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident or not self._depth:
            return
        self._depth -= 1
        if self._depth or self._before is None:
            return
        if _signal.getsignal(_signal.SIGINT) == self._note:  # else another handler was installed meanwhile
            _signal.signal(_signal.SIGINT, self._before)
        self._deliver()

    def _note(self, _number: int, _frame: Any) -> None:
        """Record a SIGINT. Its handler is called now if the first one came `PATIENCE_S` ago or earlier."""
        now = time.monotonic()
        self._noted.append(now)
        if now - self._noted[0] >= PATIENCE_S:  # the current wait does not check
            self._deliver()

    def _deliver(self) -> None:
        """Call the replaced handler, once for all signals that were recorded."""
        if self._noted:
            self._noted.clear()
            self._before(_signal.SIGINT, sys._getframe())

    def check(self) -> None:
        """Deliver a recorded SIGINT, except in a patient block before `PATIENCE_S` have passed. Main thread only."""
        if not self._noted or not self._depth or threading.get_ident() != threading.main_thread().ident:
            return
        if not self._patient or time.monotonic() - self._noted[0] >= PATIENCE_S:
            self._deliver()

    def be_patient(self, more: int) -> None:
        """Enter (1) or leave (-1) a block whose waits may end before a SIGINT is delivered."""
        if threading.get_ident() == threading.main_thread().ident:
            self._patient += more


uninterrupted = _Uninterrupted()


class _Patient:
    """Like `uninterrupted`, but waits react to Ctrl-C only after `PATIENCE_S`, so that short operations complete."""

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        uninterrupted.be_patient(1)

    def __exit__(self, *_: object) -> None:
        uninterrupted.be_patient(-1)
        uninterrupted.__exit__()


patient = _Patient()
_during_wait: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def wait(wait_for: Callable[[float | None], bool], timeout_s: float | None = None) -> bool:
    """Return `wait_for(timeout_s)`, an event's or condition's wait; in the main thread sliced, so Ctrl-C ends it."""
    if threading.get_ident() != threading.main_thread().ident:
        return wait_for(timeout_s)
    with _during_wait():
        return _wait_in_slices(wait_for, timeout_s)


def _wait_in_slices(wait_for: Callable[[float | None], bool], timeout_s: float | None) -> bool:
    """Wait in slices of `SLICE_S`, with `check` before and between them. Return False after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    check()
    while True:
        left = SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
        if wait_for(left):
            return True
        check()
        if deadline is not None and time.monotonic() >= deadline:
            return False


def record_waits(during: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run every later wait of the main thread inside a context manager made by `during`."""
    global _during_wait
    _during_wait = during


def check() -> None:
    """Call the handler of a recorded Ctrl-C; called before and during a wait."""
    uninterrupted.check()


def whole(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate `function` so that it runs `uninterrupted`."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if uninterrupted.is_on():  # the common case within a step: no handler to replace
            return function(*args, **kwargs)
        with uninterrupted:
            return function(*args, **kwargs)

    return run


def _begin_anew_in_child() -> None:
    uninterrupted._noted.clear()


os.register_at_fork(after_in_child=_begin_anew_in_child)

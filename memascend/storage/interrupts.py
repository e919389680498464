"""Ctrl-C between changes that belong together, and not within them.

The handler of a signal runs in the main thread, between any two bytecodes. Code that takes an outcome out of one
structure and puts it into another must not be interrupted in between, or the outcome is lost; and `Condition` and
`Event` of the standard library never release their lock where KeyboardInterrupt falls into their `__enter__`. Such
code is `uninterrupted`: SIGINT is noted, and its handler is called at the end of the outermost block. Waits in there
are made in slices, with `check` before and between them, so they end with Ctrl-C. A second SIGINT that comes
`PATIENCE_S` or more after the first is delivered at once.
"""

from __future__ import annotations

import _signal  # as `signal`, whose functions take 50 times as long to make enums of numbers
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["PATIENCE_S", "SLICE_S", "check", "patient", "record_waits", "uninterrupted", "wait", "whole"]

PATIENCE_S = 0.5  # for which what is asked to be done to its end puts Ctrl-C off
SLICE_S = 0.1  # of a wait, between two looks whether Ctrl-C has come

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Uninterrupted:
    """The blocks of the main thread; in other threads, which no handler runs in, nothing."""

    def __init__(self) -> None:
        self._depth = 0  # of blocks in progress
        self._before: Any = None  # the handler that was put aside; None: there was none to put aside
        self._noted: list[float] = []  # when SIGINT came
        self._patient = 0  # blocks that let waits end

    def is_on(self) -> bool:
        """Whether the caller is in a block already, or in a thread that no handler runs in."""
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
                _signal.signal(_signal.SIGINT, self._note)  # raises what came before, and nothing has changed then
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident or not self._depth:
            return
        self._depth -= 1
        if self._depth or self._before is None:
            return
        if _signal.getsignal(_signal.SIGINT) == self._note:  # else somebody has set another one meanwhile
            _signal.signal(_signal.SIGINT, self._before)
        self._deliver()

    def _note(self, _number: int, _frame: Any) -> None:
        now = time.monotonic()
        self._noted.append(now)
        if now - self._noted[0] >= PATIENCE_S:  # what is waited for does not look
            self._deliver()

    def _deliver(self) -> None:
        if self._noted:
            self._noted.clear()
            self._before(_signal.SIGINT, sys._getframe())

    def check(self) -> None:
        if not self._noted or not self._depth or threading.get_ident() != threading.main_thread().ident:
            return
        if not self._patient or time.monotonic() - self._noted[0] >= PATIENCE_S:
            self._deliver()

    def be_patient(self, more: int) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._patient += more


uninterrupted = _Uninterrupted()


class _Patient:
    """`uninterrupted`, and its waits hear Ctrl-C only after `PATIENCE_S`: what is short ends whole."""

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        uninterrupted.be_patient(1)

    def __exit__(self, *_: object) -> None:
        uninterrupted.be_patient(-1)
        uninterrupted.__exit__()


patient = _Patient()
_during_wait: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def wait(wait_for: Callable[[float | None], bool], timeout_s: float | None = None) -> bool:
    """`wait_for(timeout_s)`, of an event or a condition; in the main thread in slices, and Ctrl-C is heard."""
    if threading.get_ident() != threading.main_thread().ident:
        return wait_for(timeout_s)
    with _during_wait():
        return _wait_in_slices(wait_for, timeout_s)


def _wait_in_slices(wait_for: Callable[[float | None], bool], timeout_s: float | None) -> bool:
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
    """From now on each wait of the main thread runs within a context that `during` makes."""
    global _during_wait
    _during_wait = during


def check() -> None:
    """Before and in a wait: call the handler of a Ctrl-C that was noted."""
    uninterrupted.check()


def whole(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that is `uninterrupted`."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if uninterrupted.is_on():  # most of a step's calls: there is nothing to put aside
            return function(*args, **kwargs)
        with uninterrupted:
            return function(*args, **kwargs)

    return run


def _begin_anew_in_child() -> None:
    uninterrupted._noted.clear()


os.register_at_fork(after_in_child=_begin_anew_in_child)

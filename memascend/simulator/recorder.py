"""Events of a real step, recorded while it runs, in the same format as those of a simulated one.

    recorder = Recorder()
    with recorder.phase("forward"):
        ...
    events = recorder.take()

Resources have the names of a simulated step where they correspond: `gpu0` is the device (on a CUDA device its events
say when the host issued the work), `cpu` the optimizer and the overflow check, `ssd.read` and `ssd.write` a transfer
from its submission to its end, so that several may overlap. Two exist only in a real step: `main`, the phase that the
training thread is in, and `wait`, the time that this thread waits. Waits are subtracted from the training thread's own
events of `gpu0` and `cpu`, but not from those that other threads add.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from memascend.simulator.trace import Event

DEVICE, CPU, MAIN, WAIT = "gpu0", "cpu", "main", "wait"
READ, WRITE = "ssd.read", "ssd.write"
_LONGEST_TRANSFER_S = 120


class Recorder:
    """Recorder of one rank's events.

    `span`, `phase`, `wait`, `begin_block` and `end_block` are for the training thread only, the one that creates the
    recorder; any thread may call `add` and `transfer`.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Condition()
        self._in_flight = 0  # transfers in flight
        self._events: list[tuple[Event, bool]] = []  # with whether the training thread recorded it
        self._thread = threading.get_ident()
        self._phases: list[str] = []
        self._phase_began = 0.0
        self._block: tuple[str, float] | None = None

    @staticmethod
    def now() -> float:
        """Return the time in seconds on the clock of the events, which all processes of a machine share."""
        return time.monotonic()

    @property
    def current_phase(self) -> str:
        """Name of the innermost phase; empty outside of all phases."""
        return self._phases[-1] if self._phases else ""

    def add(self, name: str, resource: str, begin_s: float, amount: float = 0.0, phase: str | None = None) -> None:
        """Record an event that began at `begin_s` and ends now. Outside of every phase nothing is recorded."""
        self._keep(name, resource, begin_s, amount, phase, threading.get_ident() == self._thread)

    def _keep(
        self, name: str, resource: str, begin_s: float, amount: float = 0.0, phase: str | None = None, own: bool = True
    ) -> None:
        """Record an event that ends now. `own`: the training thread did the work, so `take` subtracts its waits."""
        phase, end_s = self.current_phase if phase is None else phase, self.now()
        if phase:
            event = Event(
                name=name,
                phase=phase,
                resource=resource,
                begin_s=begin_s,
                end_s=end_s,
                rank=self._rank,
                amount=amount,
            )
            with self._lock:
                self._events.append((event, own))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase of the step. A nested phase interrupts the outer one."""
        self._turn(name)
        try:
            yield
        finally:
            self.end_block()
            self._turn(None)

    def _turn(self, entered: str | None) -> None:
        """Record the phase so far, then enter another one, or with None return to the outer one."""
        if self._phases:
            self._keep(self.current_phase, MAIN, self._phase_began)
        if entered is None:
            self._phases.pop()
        else:
            self._phases.append(entered)
        self._phase_began = self.now()

    @contextlib.contextmanager
    def span(self, name: str, resource: str, amount: float = 0.0) -> Iterator[None]:
        """Record the work of the training thread in the block, on `resource`."""
        begin = self.now()
        try:
            yield
        finally:
            self._keep(name, resource, begin, amount)

    def transfer(self, name: str, resource: str, begin_s: float, nbytes: int, phase: str) -> Callable[[object], None]:
        """Count a transfer submitted at `begin_s`; return the callback that any thread calls once it has ended."""
        with self._lock:
            self._in_flight += 1

        def ended(_: object) -> None:
            self.add(name, resource, begin_s, nbytes, phase)
            with self._lock:
                self._in_flight -= 1
                self._lock.notify_all()

        return ended

    def wait(self) -> contextlib.AbstractContextManager[None]:
        """Record a wait of the training thread, for storage or for another thread."""
        return self.span("wait", WAIT)

    def begin_block(self, name: str) -> None:
        """Record that the device begins a block of the model or continues it; any other open block ends now."""
        if self._block is None or self._block[0] != name:
            self.end_block()
            self._block = (name, self.now())

    def end_block(self) -> None:
        """Record the end of the open block, if any."""
        if self._block is not None:
            name, begin = self._block
            self._block = None
            self._keep(name, DEVICE, begin)

    def take(self) -> list[Event]:
        """Return all events so far, sorted by begin time, and forget them.

        Waits for transfers in flight; raises TimeoutError if they take longer than `_LONGEST_TRANSFER_S`.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._in_flight == 0, _LONGEST_TRANSFER_S):
                raise TimeoutError(
                    f"{self._in_flight} traced transfers did not complete within {_LONGEST_TRANSFER_S} s"
                )
            events, self._events = self._events, []
        waits = sorted((event.begin_s, event.end_s) for event, _ in events if event.resource == WAIT)
        out: list[Event] = []
        for event, own in events:
            out += _without(event, waits) if own and event.resource in (DEVICE, CPU) else [event]
        return sorted(out, key=lambda event: (event.begin_s, event.end_s))


def phase(recorder: Recorder | None, name: str) -> contextlib.AbstractContextManager[None]:
    """Return `recorder.phase(name)`, or a context that does nothing if `recorder` is None."""
    return contextlib.nullcontext() if recorder is None else recorder.phase(name)


def record_transfers(storage: Any, recorder: Recorder) -> None:
    """Record every later `read` and `write` of `storage`, a tier or the like, from submission to completion."""
    for method, resource in (("read", READ), ("write", WRITE)):
        setattr(storage, method, _recorded(getattr(storage, method), resource, recorder))


def _recorded(transfer: Callable[..., Any], resource: str, recorder: Recorder) -> Callable[..., Any]:
    """Wrap a method that starts a transfer, so that its completion is recorded."""

    def begin(key: Any, tensor: Any, **options: Any) -> Any:
        began, phase_name = recorder.now(), recorder.current_phase
        completion = transfer(key, tensor, **options)
        nbytes = tensor.nbytes
        completion.add_done_callback(recorder.transfer(str(key), resource, began, nbytes, phase_name))
        return completion

    return begin


def _without(event: Event, waits: list[tuple[float, float]]) -> list[Event]:
    """Return the parts of an event outside the sorted `waits`; the first part keeps its amount."""
    parts, at = [], event.begin_s
    for begin, end in waits:
        if end > at and begin < event.end_s:
            if begin > at:
                parts.append((at, begin))
            at = max(at, end)
    if at < event.end_s:
        parts.append((at, event.end_s))
    return [
        dataclasses.replace(event, begin_s=begin, end_s=end, amount=0.0 if number else event.amount)
        for number, (begin, end) in enumerate(parts)
    ]


def from_zero(events: list[Event]) -> list[Event]:
    """Return the events shifted so that the first begins at 0 s."""
    begin = min((event.begin_s for event in events), default=0.0)
    return [dataclasses.replace(event, begin_s=event.begin_s - begin, end_s=event.end_s - begin) for event in events]

"""The bound on the speed of a step on this machine: for each phase, the slowest resource that it cannot do without.

Compute is the modules' own time, measured while their weights are in memory; I/O is the bytes that a phase moved over
the path's rate; AdamW is the elements over the kernel's rate. All of it is measured in the run that it judges. Phases
follow one another, and within a phase everything else could overlap: a step is never faster than the sum over the
phases of their slowest resource.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memascend.ops.adamw import adamw_
from memascend.ops.adamw8 import adamw8_, scales_shape

_ADAMW_ELEMENTS = 1 << 22  # more would take memory that no plan accounts for
_PASSES, _PASSES_S = 20, 0.5  # at most so many passes, and fewer once they exceed so many seconds


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of the path and of the AdamW kernel, in bytes and elements per second."""

    read: float
    write: float
    adamw: float

    def at_least(self, *, read: float | None = None, write: float | None = None, adamw: float | None = None) -> Rates:
        """Return rates that are raised where a step was faster than the measurement, as happens on a shared machine."""
        return Rates(
            read=max(self.read, read or 0.0),
            write=max(self.write, write or 0.0),
            adamw=max(self.adamw, adamw or 0.0),
        )


@dataclass(kw_only=True)
class Phase:
    """A phase: seconds that it took, seconds that its compute takes alone, bytes moved and elements updated."""

    name: str
    seconds: float = 0.0
    compute_s: float = 0.0
    read: int = 0
    written: int = 0
    updated: int = 0

    def needs(self, rates: Rates) -> dict[str, float]:
        """Return the seconds that each resource needs, by name. Reads and writes share a path."""
        return {"compute": self.compute_s, "AdamW": self.updated / rates.adamw, "SSD": self.ssd_s(rates)}

    def ssd_s(self, rates: Rates) -> float:
        """Return the seconds that reads and writes take on the path, one after the other."""
        return self.read / rates.read + self.written / rates.write


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The bound of one step. `share` is 1 at the bound."""

    seconds: float
    bound_s: float
    bottleneck: str

    @property
    def share(self) -> float:
        return self.bound_s / self.seconds

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % of the bound; bottleneck: {self.bottleneck}"


def limit_of(phases: list[Phase], rates: Rates) -> Limit:
    """Return the bound of a step with these phases. The bottleneck is the resource that takes most of the bound."""
    bound, shares = 0.0, dict.fromkeys(("compute", "AdamW", "SSD read", "SSD write"), 0.0)
    for phase in phases:
        needs = phase.needs(rates)
        what = max(needs, key=lambda name: needs[name])
        bound += needs[what]
        if what == "SSD":
            what = "SSD read" if phase.read / rates.read >= phase.written / rates.write else "SSD write"
        shares[what] += max(needs.values())
    seconds = sum(phase.seconds for phase in phases)
    return Limit(seconds=seconds, bound_s=bound, bottleneck=max(shares, key=lambda name: shares[name]))


@dataclass
class StepClock:
    """Measures the phases of the current step. `moved()`: bytes read and written so far."""

    moved: Callable[[], tuple[int, int]]
    phases: list[Phase] = field(default_factory=list)
    _since: tuple[float, int, int] | None = None

    def begin(self) -> None:
        """Start measuring; the next `end` covers the time from here."""
        self._since = (time.perf_counter(), *self.moved())

    def end(self, name: str, *, compute_s: float, updated: int = 0) -> None:
        """Add the time and bytes since the last call to the phase `name`."""
        if self._since is None:
            return
        before, read, written = self._since
        self.begin()
        now, read_now, written_now = self._since
        phase = next((each for each in self.phases if each.name == name), None)
        if phase is None:
            phase = Phase(name=name)
            self.phases.append(phase)
        phase.seconds += now - before
        phase.compute_s += compute_s
        phase.read += read_now - read
        phase.written += written_now - written
        phase.updated += updated

    def take(self) -> list[Phase]:
        """Return the phases measured so far, and forget them."""
        phases, self.phases, self._since = self.phases, [], None
        return phases


def adamw_rate(numel: int, states: torch.dtype) -> float:
    """Return the rate of the kernel with its current threads, in elements per second: the best of a few passes."""
    numel = min(numel, _ADAMW_ELEMENTS)
    update = _update_of(numel, states)
    best = float("inf")
    begin = time.perf_counter()
    for step in range(1, _PASSES + 1):
        before = time.perf_counter()
        if step > 2 and before - begin > _PASSES_S:
            break
        update(step=step)
        best = min(best, time.perf_counter() - before)
    return numel / best


def _update_of(numel: int, states: torch.dtype) -> Callable[..., None]:
    """Return a function that makes a step over zeros."""
    if states == torch.int8:
        weights, gradient = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
        codes = (torch.zeros(shape, dtype=torch.uint8) for shape in (numel, numel, scales_shape(numel)))
        return functools.partial(adamw8_, weights, gradient, *codes)
    return functools.partial(adamw_, *(torch.zeros(numel, dtype=states) for _ in range(4)))

"""Profile of a model's steps: the time of each block and phase, and the rates of storage and AdamW, from which
`memascend.engine.limit` derives how fast a step could be."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from memascend.engine.device import synchronize
from memascend.engine.layout import Kind, Layout, Unit
from memascend.engine.limit import Limit, Rates, StepClock, adamw_rate, limit_of
from memascend.engine.state_store import StateStore
from memascend.engine.weights import WeightStream
from memascend.storage.tier import Transferred

log = logging.getLogger("memascend")

_TRIES = 3  # measurements of a rate, of which the best counts


class StepProfile:
    """Measures one model's steps. Not thread-safe. Nothing is measured unless it is `on`.

    `moved()`: returns the bytes read and written so far. `again(unit)`: returns the share of a block's forward that
    backward recomputes. `device`: the device that computes.
    """

    def __init__(
        self,
        layout: Layout,
        on: bool,
        moved: Callable[[], tuple[int, int]],
        again: Callable[[Unit], float],
        device: torch.device,
    ) -> None:
        self._layout, self._on, self._again, self._device = layout, on, again, device
        self._clock = StepClock(moved)
        self._block_seconds: dict[tuple[int, int], tuple[float, float]] = {}  # forward, backward
        self._entered_s: dict[str, float] = {}
        self.outside_s = 0.0  # seconds in modules outside of the blocks, in this forward pass
        self.rates: Rates | None = None
        self.limit: Limit | None = None  # the last step's limit

    # -- blocks and other modules --------------------------------------------------------------------------------------

    def took(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        """Record the seconds of a pass through a block in one direction, with inf for the other one; the minimum over
        equal blocks counts."""
        if self._on:
            known = self._block_seconds.get(_alike(unit), (math.inf, math.inf))
            self._block_seconds[_alike(unit)] = min(known[0], forward_s), min(known[1], backward_s)

    def blocks_s(self, *, backward: bool = False) -> float:
        """Return the measured seconds of one pass through all blocks; with `backward`, including recomputation."""
        total = 0.0
        for unit in self._layout.units:
            if unit.kind is Kind.BLOCK:
                forward_s, backward_s = self._block_seconds.get(_alike(unit), (0.0, 0.0))
                total += backward_s + self._again(unit) * forward_s if backward else forward_s
        return total

    def enters(self, unit: Unit) -> None:
        """Record that forward enters a module outside of the blocks."""
        self._entered_s[unit.key] = self.now()

    def leaves(self, unit: Unit) -> None:
        """Record that forward leaves a module that it has entered, and add the seconds to `outside_s`."""
        self.outside_s += self.now() - self._entered_s[unit.key]

    def now(self) -> float:
        """Return the time in seconds; if anything is measured, after synchronizing with the device."""
        if self._on:
            synchronize(self._device)
        return time.perf_counter()

    # -- phases --------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward phase, and reset `outside_s`."""
        self.outside_s = 0.0
        if self._on:
            self._clock.begin()

    def end_forward(self, *, passes: int = 1) -> None:
        """End the forward phase of `passes` micro-batches; `outside_s` includes all of them."""
        self.now()
        self._clock.end("forward", compute_s=self.outside_s + passes * self.blocks_s())

    def end_backward(self, *, passes: int = 1) -> None:
        """End the backward phase of `passes` micro-batches."""
        self.now()
        # Outside of the blocks, backward is taken as twice the forward time, as it is for matrix products.
        compute = 2 * self.outside_s + passes * self.blocks_s(backward=True)
        self._clock.end("backward", compute_s=compute)

    def end_step(self, step: int, updated_in: str, moved: Transferred, fastest: float) -> None:
        """Compute the step's limit. `updated_in`: the phase in which AdamW ran. `moved`: bytes and rates of the store.
        `fastest`: the highest rate of AdamW so far, in elements per second."""
        updated = sum(piece.numel for piece in self._layout.pieces)
        self._clock.end(updated_in, compute_s=0.0, updated=updated)
        phases = self._clock.take()
        if phases and self.rates is not None:
            self.rates = self.rates.at_least(read=moved.read_bytes_per_s, write=moved.write_bytes_per_s, adamw=fastest)
            self.limit = limit_of(phases, self.rates)
            log.info("memascend: step %d: %s", step, self.limit)

    # -- rates ---------------------------------------------------------------------------------------------------------

    def measure_rates(self, states: WeightStream, store: StateStore, slots: int) -> None:
        """Measure the rates of reading and writing states, with as many pieces in flight as there are `slots`, and of
        AdamW. Call it between steps: its writes are rolled back."""
        pieces = sorted(self._layout.pieces, key=self._layout.states_numel)[-slots:]
        keys = [piece.key for piece in pieces]
        nbytes = sum(self._layout.states_numel(piece) for piece in pieces) * self._layout.stored_states.itemsize
        best = [float("inf")] * 2
        for _ in range(_TRIES):
            times = [time.perf_counter()]
            states.fetch(keys)
            times.append(time.perf_counter())
            for completion in [states.write(key) for key in keys]:
                completion.wait()
            times.append(time.perf_counter())
            for key in keys:
                states.release(key)
            states.flush()
            store.roll_back()
            best = [min(b, after - before) for b, before, after in zip(best, times[:-1], times[1:], strict=True)]
        adamw = adamw_rate(max(piece.numel for piece in pieces), self._layout.states)
        self.rates = Rates(read=nbytes / best[0], write=nbytes / best[1], adamw=adamw)


def _alike(unit: Unit) -> tuple[int, int]:
    """Return a key that is equal for blocks which take the same time."""
    return unit.numel, len(unit.parts)

"""How fast steps are and how fast they could be (`memascend.engine.limit`): what a step takes, block by block and phase
by phase, and what the path and AdamW reach."""

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

_TRIES = 3  # the best counts


class StepProfile:
    """Of one model's steps. Not thread-safe. Nothing is measured unless it is `on`.

    `moved()`: bytes read and written so far. `again(unit)`: the share of a block that backward computes again.
    `device`: what computes.
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
        self.outside_s = 0.0  # of the modules outside of the blocks, in this forward pass
        self.rates: Rates | None = None
        self.limit: Limit | None = None  # of the last step

    # -- blocks and other modules --------------------------------------------------------------------------------------

    def took(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        """A pass through a block, in one direction (inf: the other one); the least of blocks that are alike counts."""
        if self._on:
            known = self._block_seconds.get(_alike(unit), (math.inf, math.inf))
            self._block_seconds[_alike(unit)] = min(known[0], forward_s), min(known[1], backward_s)

    def blocks_s(self, *, backward: bool = False) -> float:
        """Seconds of one pass through all blocks, as measured; `backward` with what is computed again."""
        total = 0.0
        for unit in self._layout.units:
            if unit.kind is Kind.BLOCK:
                forward_s, backward_s = self._block_seconds.get(_alike(unit), (0.0, 0.0))
                total += backward_s + self._again(unit) * forward_s if backward else forward_s
        return total

    def enters(self, unit: Unit) -> None:
        """A module outside of the blocks, in forward."""
        self._entered_s[unit.key] = self.now()

    def leaves(self, unit: Unit) -> None:
        self.outside_s += self.now() - self._entered_s[unit.key]

    def now(self) -> float:
        """Seconds; where something is measured, when the device has computed all that it was given."""
        if self._on:
            synchronize(self._device)
        return time.perf_counter()

    # -- phases --------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.outside_s = 0.0
        if self._on:
            self._clock.begin()

    def end_forward(self, *, passes: int = 1) -> None:
        """Of so many micro-batches, all of which `outside_s` counts."""
        self.now()
        self._clock.end("forward", compute_s=self.outside_s + passes * self.blocks_s())

    def end_backward(self, *, passes: int = 1) -> None:
        self.now()
        compute = 2 * self.outside_s + passes * self.blocks_s(backward=True)  # twice forward, as products are
        self._clock.end("backward", compute_s=compute)

    def end_step(self, step: int, updated_in: str, moved: Transferred, fastest: float) -> None:
        """The step's limit. `updated_in`: the phase that AdamW ran in; `moved`: of the store, with the seconds;
        `fastest`: elements per second that AdamW has reached."""
        updated = sum(piece.numel for piece in self._layout.pieces)
        self._clock.end(updated_in, compute_s=0.0, updated=updated)
        phases = self._clock.take()
        if phases and self.rates is not None:
            self.rates = self.rates.at_least(read=moved.read_bytes_per_s, write=moved.write_bytes_per_s, adamw=fastest)
            self.limit = limit_of(phases, self.rates)
            log.info("memascend: step %d: %s", step, self.limit)

    # -- rates ---------------------------------------------------------------------------------------------------------

    def measure_rates(self, states: WeightStream, store: StateStore, slots: int) -> None:
        """Of the states' path with as much in flight as the slots hold. Between steps: what is written is forgotten."""
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
    """The same for blocks that take the same time."""
    return unit.numel, len(unit.parts)

"""Learning rate and data order as functions of the step alone, so that a resumed run only needs the step number."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

WARMUP_SHARE = 0.03


def learning_rate(step: int, *, peak: float, steps: int, warmup: int | None, schedule: str) -> float:
    """Return the learning rate of step number `step`, counted from 0.

    It rises linearly to `peak` over `warmup` steps (None: 3 % of all), then stays there (`constant`) or falls to zero
    at `steps` (`linear`, `cosine`).
    """
    rise = min(steps, max(1, round(WARMUP_SHARE * steps)) if warmup is None else warmup)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def change_note(
    step: int, steps: int, before: int | None, *, peak: float, warmup: int | None, schedule: str
) -> str | None:
    """Return a note if a run that continues after `step` has other learning rates than with `before` steps in all.

    None if `before` is None, if no step is left or was made, or if the rates are the same.
    """
    if before is None or before == steps or not 0 < step < steps:
        return None
    now = learning_rate(step, peak=peak, steps=steps, warmup=warmup, schedule=schedule)
    was = learning_rate(min(step, before), peak=peak, steps=before, warmup=warmup, schedule=schedule)
    if schedule == "constant" and now == was:
        return None
    then = f"not {was:.2e}" if step < before else f"the schedule of {before} steps had ended"
    return f"note: {steps} steps in all, {before} before: the learning rate of step {step + 1} is {now:.2e}, {then}"


@lru_cache(maxsize=2)
def _permutation(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the sequences in one epoch: the same for the same seed on every machine."""
    import numpy as np  # the parent of a run's processes needs the learning rate alone

    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(sequences)


def sequence_numbers(first: int, count: int, *, sequences: int, seed: int) -> list[int]:
    """Return the sequences at positions first ... first + count - 1 of an endless order, reshuffled in each epoch."""
    return [
        int(_permutation(sequences, seed, place // sequences)[place % sequences])
        for place in range(first, first + count)
    ]

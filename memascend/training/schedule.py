"""Learning rate and order of data as functions of the step alone: what a resumed run needs is then the step."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

WARMUP_SHARE = 0.03


def learning_rate(step: int, *, peak: float, steps: int, warmup: int | None, schedule: str) -> float:
    """Rate of step number `step` (from 0): a straight rise over `warmup` steps, then down to zero at `steps`."""
    rise = min(steps, max(1, round(WARMUP_SHARE * steps)) if warmup is None else warmup)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


@lru_cache(maxsize=2)
def _permutation(sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(sequences)


def sequence_numbers(first: int, count: int, *, sequences: int, seed: int) -> list[int]:
    """Which sequences stand at places first ... first + count - 1 of an endless order, shuffled anew in each epoch."""
    return [
        int(_permutation(sequences, seed, place // sequences)[place % sequences])
        for place in range(first, first + count)
    ]

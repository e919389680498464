"""Learning rate and data order as functions of the step alone, so that a resumed run only needs the step number."""

from __future__ import annotations

import math
from functools import lru_cache

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


@lru_cache(maxsize=2)
def _permutation(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the sequences in one epoch: the same for the same seed on every machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(sequences)


def sequence_numbers(first: int, count: int, *, sequences: int, seed: int) -> list[int]:
    """Return the sequences at positions first ... first + count - 1 of an endless order, reshuffled in each epoch."""
    return [
        int(_permutation(sequences, seed, place // sequences)[place % sequences])
        for place in range(first, first + count)
    ]

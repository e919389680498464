"""Timing in alternating rounds: every way runs once in each round, so that drift and neighbours hit all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median with quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median=statistics.median(values), low=low, high=high)


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each of `repeats` rounds.

    The order is shuffled from round to round, and each timed call follows one of the same way that is not timed: so all
    start alike, with the caches and threads as that way itself leaves them and not as its neighbour does.
    """
    if repeats < 1:
        raise ValueError(f"{repeats} repeats: use at least one")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    order = random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            ways[name]()
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratios(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """How many times faster: round by round, which cancels what slowed a whole round."""
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


def conditions() -> dict[str, Any]:
    """What the numbers depend on beside the machine."""
    from memascend import _C

    return {"threads": torch.get_num_threads(), "simd": _C.simd_level(), "torch": torch.__version__}


def filled(numel: int, dtype: torch.dtype, size: float = 1.0, *, positive: bool = False) -> torch.Tensor:
    """Finite values without structure, made quickly: a million random ones, repeated."""
    block = torch.rand(min(numel, 1 << 20), generator=torch.Generator().manual_seed(numel))
    block = (block * size if positive else (block * 2 - 1) * size).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    for begin in range(0, numel, len(block)):
        part = out[begin : begin + len(block)]
        part.copy_(block[: len(part)])
    return out

"""Timing in alternating rounds: every way runs once in each round, so that drift and neighbours hit all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Group = TypeVar("Group")


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
    return alternate_groups({"": ways}, repeats)[""]


def alternate_groups(
    groups: Mapping[Group, Mapping[str, Callable[[], Any]]], repeats: int
) -> dict[Group, dict[str, list[float]]]:
    """As `alternate`, for several groups of ways (such as sizes): a round takes every group, one after the other.

    So the ways of a group stand close together in time, and a machine that is slow for a while is so for all groups.
    """
    if repeats < 1:
        raise ValueError(f"{repeats} repeats: use at least one")
    seconds: dict[Group, dict[str, list[float]]] = {g: {name: [] for name in ways} for g, ways in groups.items()}
    names = {group: list(ways) for group, ways in groups.items()}
    turn = list(groups)
    order = random.Random(0)
    for _ in range(repeats):
        order.shuffle(turn)
        for group in turn:
            order.shuffle(names[group])
            for name in names[group]:
                way = groups[group][name]
                way()
                begin = time.perf_counter()
                way()
                seconds[group][name].append(time.perf_counter() - begin)
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

"""Timing in alternating rounds: every way runs once per round, so that drift and other load affect all ways alike."""

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
    """Median with lower and upper quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of at least one value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median=statistics.median(values), low=low, high=high)


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each of `repeats` rounds.

    The order is shuffled from round to round, and each timed call follows an untimed call of the same way. So every way
    starts with the caches and threads in the state that it leaves itself, not in that left by another way.
    """
    return alternate_groups({"": ways}, repeats)[""]


def alternate_groups(
    groups: Mapping[Group, Mapping[str, Callable[[], Any]]], repeats: int
) -> dict[Group, dict[str, list[float]]]:
    """Time several groups of ways (such as sizes) as `alternate` does; each round runs all groups, one after the other.

    So the ways of a group run close together in time, and a temporary slowdown of the machine affects all groups.
    Raises ValueError if `repeats` is below one.
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
    """Return the spread of slow / fast, computed round by round, which cancels slowdowns of whole rounds."""
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


def conditions() -> dict[str, Any]:
    """Return the settings that affect the numbers in addition to the machine: threads, SIMD level, torch version."""
    from memascend import _C

    return {"threads": torch.get_num_threads(), "simd": _C.simd_level(), "torch": torch.__version__}


def filled(numel: int, dtype: torch.dtype, size: float = 1.0, *, positive: bool = False) -> torch.Tensor:
    """Return a tensor of shape (numel,) with random values between -size and size, or 0 and size if `positive`.

    It repeats a block of at most 2^20 random values, which is fast.
    """
    block = torch.rand(min(numel, 1 << 20), generator=torch.Generator().manual_seed(numel))
    block = (block * size if positive else (block * 2 - 1) * size).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    for begin in range(0, numel, len(block)):
        part = out[begin : begin + len(block)]
        part.copy_(block[: len(part)])
    return out

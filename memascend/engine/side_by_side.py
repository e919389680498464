"""Micro-batches of one step: whether they can run side by side, and the state that they share (see `vertical`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Unit
from memascend.engine.vertical import ForwardFootprint, Lanes, SummedGradients


class IndependenceCheck:
    """Determines, while micro-batches run one after the other, whether they could run side by side. `why`: a reason
    against it, if one was found."""

    def __init__(self, footprint: ForwardFootprint) -> None:
        self.footprint = footprint
        self.why: str | None = None
        self.routes: list[list[str]] = []  # by pass: the keys of the units that it reaches, in order
        self._number = 0

    def at(self, key: str, number: int, *, forward: bool) -> None:
        """Note that the pass at work reaches a unit, or slice `number` of one; in forward, look for side effects."""
        route = self.routes[-1]
        again = bool(route) and route[-1] == key and number >= self._number
        self._number = number
        if not again:
            route.append(key)
            if forward and self.why is None:
                self.why = self.footprint.found_midway()


class SideBySide:
    """State of the micro-batches that are running side by side."""

    def __init__(self, lanes: Lanes, footprint: ForwardFootprint, count: int, dtype: torch.dtype) -> None:
        self.lanes, self.count, self.sums = lanes, count, SummedGradients(count, dtype)
        self.in_use: Unit | None = None  # its weights stay in memory until the last micro-batch has left it
        self.forwards_ended = self._backwards_begun = 0
        self.footprint = footprint
        self._in_blocks: set[int] = set()
        self._visitors: dict[str, set[int]] = {}

    def enters_a_block(self, number: int) -> None:
        """Note that a micro-batch enters its first block. Raises NotStreamable if the forward passes up to there were
        not independent."""
        if number in self._in_blocks:
            return
        self._in_blocks.add(number)
        if len(self._in_blocks) == self.count:
            self._require_independence(self.footprint.found_midway())

    def backward_begins(self) -> bool:
        """Note that the backward pass of one more micro-batch begins, and return whether it is the first. Raises
        NotStreamable if the forward passes were not independent."""
        self._backwards_begun += 1
        if self._backwards_begun == self.count:
            self._require_independence(self.footprint.found())
        return self._backwards_begun == 1

    def _require_independence(self, why: str | None) -> None:
        """Raise NotStreamable unless `why`, the reason why micro-batches are not independent, is None."""
        if why is not None:
            raise NotStreamable(
                f"micro-batches cannot run side by side here, as those of the first step could: {why}: run them one "
                "after the other (order='horizontal')"
            )

    def all_visited(self, unit: Unit, number: int) -> bool:
        """Note that backward has passed a unit in micro-batch `number`, and return whether it now has in all of
        them."""
        visitors = self._visitors.setdefault(unit.key, set())
        visitors.add(number)
        return len(visitors) == self.count


def kind_of_call(function: Callable[..., Any], model: nn.Module) -> Any:
    """Return a key for the calls of a function: calls with equal keys are expected to use the model in the same way."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", getattr(getattr(function, "__func__", None), "__code__", type(function)))
    return code, tuple(module.training for module in model.modules())

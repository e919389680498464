"""Clipping by speculation: gradients are used as they arrive, and a step whose norm exceeds the limit is done again.

If the norm is within the limit, nothing is clipped, and the step equals one without clipping. Otherwise its writes are
rolled back, since the previous version is on the tier until the step is completed, and forward and backward are done
again, with gradients that wait for their norm. Either way results equal those of waiting, to the bit. Source:
SuperOffload (arXiv 2509.21271), speculation and validation, here on the SSD.

A speculative step moves S bytes, and S + W if it is clipped, where a step that waits moves W. With a share p of clipped
steps that is S + p W on average, which is less than W if p < 1 - S / W.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memascend.engine.device import Generators
from memascend.engine.layout import Layout
from memascend.engine.module_state import ModuleState
from memascend.engine.options import EngineOptions
from memascend.engine.traffic import MatrixUse, step_traffic

log = logging.getLogger("memascend")
_SPECULATED = "are used before their norm is known, and a step that is to be clipped is done again"
_WAITING = "wait for their norm"
_REMEMBERED = 16  # time constant of the average, in steps: norms of a hundred steps ago say little about the next one


def as_they_come(options: EngineOptions, weights: torch.dtype) -> EngineOptions | None:
    """Return the options of a speculative step, or None if speculation is impossible: there is no clipping, or no
    version to roll back to, or gradients also wait for another reason than their norm, or the dtype in which they wait
    rounds gradients of weights of this dtype."""
    unclipped = replace(options, clip=0.0)
    rounds = torch.promote_types(weights, options.gradients) != options.gradients
    if not options.clip or options.versions == 1 or unclipped.waits or rounds:
        return None
    return unclipped


def break_even(
    layout: Layout, options: EngineOptions, *, input_numel: int = 0, uses: Mapping[str, MatrixUse] | None = None
) -> float:
    """Return the share of clipped steps below which speculation moves fewer bytes than waiting; 0 if speculation is
    impossible."""
    unclipped = as_they_come(options, layout.weights)
    if unclipped is None:
        return 0.0
    speculated, waiting = (step_traffic(layout, o, input_numel=input_numel, uses=uses) for o in (unclipped, options))
    return 1 - speculated.total / waiting.total


class Speculation:
    """Decides whether a step's gradients are used before their norm is known. The decision affects the bytes moved, but
    not the results."""

    def __init__(self, layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse]) -> None:
        self._layout, self._options, self._uses = layout, options, uses
        self.is_possible = as_they_come(options, layout.weights) is not None
        self._clipped = self._steps = 0.0  # exponentially weighted counts of clipped steps and of all steps
        self.speculated = self.done_again = 0  # speculative steps, and how many of them were clipped
        self.news: list[str] = []
        self._break_even: dict[int, float] = {}  # by number of passes
        self.decision: str | None = None  # the last decision in words; None before the first one

    @property
    def expected(self) -> float:
        """Expected share of clipped steps, estimated from recent ones; one half before any step."""
        return (self._clipped + 0.5) / (self._steps + 1)

    def pays(self, passes: int) -> bool:
        """Return whether the next step should speculate. `passes`: its backward passes, where those that run side by
        side count as one."""
        if not self.is_possible:
            return False
        if passes not in self._break_even:
            options = replace(self._options, accumulate=passes)
            self._break_even[passes] = break_even(self._layout, options, uses=self._uses)
        even, expected = self._break_even[passes], self.expected
        pays = expected < even
        before, self.decision = self.decision, _SPECULATED if pays else _WAITING
        if self.decision != before:
            self.news.append(
                f"gradients {self.decision}: {expected:.0%} of the steps are expected to be clipped, and speculation "
                f"moves fewer bytes below {even:.0%}"
            )
            log.info("memascend: %s", self.news[-1])
        return pays

    def take_news(self) -> list[str]:
        """Return and clear the decisions that have not been reported yet, each with its reason."""
        news, self.news = self.news, []
        return news

    def saw(self, *, clipped: bool) -> None:
        """Record whether a step was clipped, speculative or not."""
        kept = 1 - 1 / _REMEMBERED
        self._clipped, self._steps = kept * self._clipped + clipped, kept * self._steps + 1

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON, for `take_over` in another process."""
        return {"steps": self._steps, "clipped": self._clipped}

    def take_over(self, facts: Mapping[str, Any]) -> None:
        """Continue with the counts that `facts` has returned in an earlier process."""
        self._steps, self._clipped = facts["steps"], facts["clipped"]


class Beginning:
    """State at the beginning of a step that may have to be done again: what its passes change in addition to gradients,
    such as attributes, buffers and random number generators."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._state, self._numbers = ModuleState(list(model.modules())), Generators(device)
        self.can_be_restored = not self._state.iterators  # the position of an iterator is unknown

    def restore(self) -> None:
        """Restore the state at the beginning of the step."""
        self._numbers.restore()
        self._state.restore()

"""Clipping without waiting: gradients are used as they come, and a step whose norm turns out too large is done again.

Where the norm is within the limit nothing is to be clipped, and the step is one without clipping. Where it is not, what
was written is taken back, since the last version is on the tier until a step is completed, and forward and backward
are done once more, with gradients that wait for their norm. The bits are those of waiting in any case. Source:
SuperOffload (arXiv 2509.21271), speculation and validation, here on the SSD.

A speculated step moves S bytes, and S + W if it is clipped, where waiting moves W. With a share p of clipped steps that
is S + p W: less than W as long as p < 1 - S / W.
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
_REMEMBERED = 16  # steps, about: a norm says little of those of a hundred steps later


def as_they_come(options: EngineOptions, weights: torch.dtype) -> EngineOptions | None:
    """What a speculated step is made by; None where gradients have to wait: there is nothing to clip, or no version to
    go back to, or they wait for more than their norm, or the tier rounds those of weights of this dtype."""
    unclipped = replace(options, clip=0.0)
    rounds = torch.promote_types(weights, options.gradients) != options.gradients
    if not options.clip or options.versions == 1 or unclipped.waits or rounds:
        return None
    return unclipped


def break_even(
    layout: Layout, options: EngineOptions, *, input_numel: int = 0, uses: Mapping[str, MatrixUse] | None = None
) -> float:
    """The share of clipped steps below which speculation moves fewer bytes than waiting does; 0: it cannot be."""
    unclipped = as_they_come(options, layout.weights)
    if unclipped is None:
        return 0.0
    speculated, waiting = (step_traffic(layout, o, input_numel=input_numel, uses=uses) for o in (unclipped, options))
    return 1 - speculated.total / waiting.total


class Speculation:
    """Whether a step's gradients are used before their norm is known. It moves bytes, and changes no bit."""

    def __init__(self, layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse]) -> None:
        self._layout, self._options, self._uses = layout, options, uses
        self.is_possible = as_they_come(options, layout.weights) is not None
        self._clipped = self._steps = 0.0  # of those that are remembered
        self.speculated = self.done_again = 0  # steps, and those of them that were clipped
        self.news: list[str] = []
        self._break_even: dict[int, float] = {}  # by passes
        self.decision: str | None = None  # the last one in words, while it is possible

    @property
    def expected(self) -> float:
        """The share of clipped steps, as the recent ones have it; half where nothing is known."""
        return (self._clipped + 0.5) / (self._steps + 1)

    def pays(self, passes: int) -> bool:
        """In the next step. `passes`: backward passes one after the other; those side by side are one."""
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
        """Decisions that have not been reported yet, each with its reason."""
        news, self.news = self.news, []
        return news

    def saw(self, *, clipped: bool) -> None:
        """A step, whichever way it was made."""
        kept = 1 - 1 / _REMEMBERED
        self._clipped, self._steps = kept * self._clipped + clipped, kept * self._steps + 1

    def facts(self) -> dict[str, Any]:
        """For `take_over`, in another process (JSON)."""
        return {"steps": self._steps, "clipped": self._clipped}

    def take_over(self, facts: Mapping[str, Any]) -> None:
        self._steps, self._clipped = facts["steps"], facts["clipped"]


class Beginning:
    """Of a step that may have to be done again: what its passes change and draw besides gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._state, self._numbers = ModuleState(list(model.modules())), Generators(device)
        self.can_be_restored = not self._state.iterators  # of which nobody knows how far they were

    def restore(self) -> None:
        self._numbers.restore()
        self._state.restore()

"""Schedule of a step with everything on the device, which consists of the matrix products only.

The optimizer is left out: no testbed states the bandwidth of its GPU's memory, and a step of a model that fits spends
little time on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol.schedules import backward, forward

if TYPE_CHECKING:
    from memascend.planner.step import Step


def schedule(step: Step) -> None:
    """Add the forward and backward passes."""
    backward(step, after=forward(step))

"""A step with everything on the device: products alone. Its optimizer is left out: no testbed says how fast its GPU's
memory is, and a step of a model that fits spends little on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol.schedules import backward, forward

if TYPE_CHECKING:
    from memascend.planner.step import Step


def schedule(step: Step) -> None:
    backward(step, after=forward(step))

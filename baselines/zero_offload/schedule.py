"""Schedule of a step of ZeRO-Offload in its ZeRO-3 form: weights and states in host memory, nothing on an SSD.

Weights cross PCIe in forward and in backward, gradients cross it in the other direction, and the CPU checks them and
updates everything while the GPU waits (the one-step delayed update of its paper is not part of ZeRO-3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol.schedules import backward, forward, host_optimizer, overflow_check

if TYPE_CHECKING:
    from memascend.planner.step import Step


def schedule(step: Step) -> None:
    """Add the passes, the overflow check and AdamW in host memory."""
    done = forward(step)
    done = backward(step, after=done)
    done = overflow_check(step, after=done, chain=step.work.arrangement.overflow == "chain")
    host_optimizer(step, after=done)

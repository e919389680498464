"""Schedule of a step of ZeRO-Infinity: DeepSpeed ZeRO-3 with parameters, gradients and optimizer states on NVMe.

    SSD    | read weights ------------ | read weights, write gradients | . | read | .. | write | read | .. | write ...
    PCIe   |   copy weights, ckpts up  |   copy weights, ckpts down    | . |
    GPU    |     products              |     recompute, backward       | . |
    CPU    |                           |                               |chk|      |Adam|       |      |Adam|

Forward and backward are "overlap-centric" (section 5 of its paper): while the GPU works on one piece, the next ones are
read, as far as the parameter pool has buffers. Then everything stops for the overflow check, a chain of whole-buffer
operations, and the optimizer processes its sub-groups one by one, reading, updating and writing in turn. If the device
is a CPU, the thread that waits is also the one that computes: `memascend.baselines.protocol.on_cpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol import on_cpu
from memascend.baselines.protocol.schedules import (
    backward,
    forward,
    gradients_to_ssd,
    overflow_check,
    swapping_optimizer,
)

if TYPE_CHECKING:
    from memascend.planner.step import Step


def schedule(step: Step) -> None:
    """Add the passes, the overflow check and the optimizer over the SSD."""
    parts = step.work.arrangement
    if on_cpu.hooks_wait(step):
        done = on_cpu.passes(step)
    else:
        done = forward(step)
        done = backward(step, after=done, arrived=gradients_to_ssd(step) if parts.swaps_gradients else None)
    done = overflow_check(step, after=done, chain=parts.overflow == "chain")
    swapping_optimizer(step, after=done)

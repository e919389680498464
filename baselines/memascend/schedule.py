"""A step of MemAscend: ZeRO-Infinity's order of work, with less work in it.

What is gone from the step: the chain of the overflow check (one pass over the gradients stands in its place); with bf16
states half of what the optimizer reads, computes on and writes; with gradients kept, their way over NVMe. What changes
nothing here: the adaptive pool and exact pinned memory, which save bytes and leave the buffers' number as it was, and
the direct engine, whose drive is taken at the same rate as the file engine's. On a CPU the adaptive pool changes what
runs beside what, and fewer swap buffers make the thread wait for gradients: `memascend.baselines.protocol.on_cpu`.
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
    parts = step.work.arrangement
    if on_cpu.hooks_wait(step):
        done = on_cpu.passes(step)
    else:
        done = forward(step)
        done = backward(step, after=done, arrived=gradients_to_ssd(step) if parts.swaps_gradients else None)
    done = overflow_check(step, after=done, chain=parts.overflow == "chain")
    swapping_optimizer(step, after=done)

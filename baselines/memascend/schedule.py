"""Schedule of a step of MemAscend: ZeRO-Infinity's order of work, with less work.

The step lacks the chain of the overflow check, which one pass over the gradients replaces; with bf16 states, half of
the data that the optimizer reads, processes and writes; and with gradients kept, their transfers over NVMe. The
adaptive pool and exact pinned memory do not change the schedule, since they save bytes but keep the number of buffers;
neither does the direct engine, whose drive is assumed to have the same rate as with the file engine. On a CPU the
adaptive pool changes what overlaps, and fewer swap buffers make the thread wait for gradients:
`memascend.baselines.protocol.on_cpu`.
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

"""Arms of LoHan, and the streaming engine's options for a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.engine.options import EngineOptions
    from memascend.planner.workload import Workload

SWAPPING_ARMS = {"as_published": "algorithm 1", "released": "released"}
VERSIONS = 2  # of weights and states on the SSD, so that a kill loses only the current step
_WAYS = {"auto": None, "two": VERSIONS, "one": 1, "checkpoint": 1}


def options_of(work: Workload) -> EngineOptions:
    """Return the engine options that the backend of `memascend train` uses for this workload."""
    from memascend.engine.options import CHECKPOINTS, EngineOptions
    from memascend.planner.footprint import TORCH_DTYPES

    redo = work.state_versions != "checkpoint"
    return EngineOptions(
        arm="optimized" if work.arm_name in SWAPPING_ARMS else work.arm_name,
        accumulate=work.accumulation,
        clip=work.clip,
        checkpoints=CHECKPOINTS.get(work.stack.checkpointing, "device"),
        states=TORCH_DTYPES[work.kept_states],
        gradients=TORCH_DTYPES[work.gradients],
        zero_missing=True,
        versions=_WAYS[work.state_versions],
        redo=redo,
        wait=not redo and work.dtype == "fp16",
    )


def step_options(work: Workload) -> EngineOptions:
    """Return the engine options of a step that is not clipped."""
    from memascend.engine.speculation import as_they_come
    from memascend.planner.footprint import TORCH_DTYPES

    options = options_of(work)
    return as_they_come(options, TORCH_DTYPES[work.dtype]) or options


def runs_side_by_side(work: Workload) -> bool:
    """Return whether the micro-batches of a step run side by side, if they turn out to be independent."""
    possible = work.on_cpu and work.stack.checkpointing != "ssd" and work.arm_name not in SWAPPING_ARMS
    return possible and work.accumulation > 1 and work.accumulation_order != "horizontal"

"""Host buffers of the streaming engine, created by its own class with the plan's counting allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.lohan.options import SWAPPING_ARMS

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def footprint(build: RankFootprint) -> None:
    """Book the engine's buffers: a few slots each for weights, states, block inputs and waiting gradients; one buffer
    for saves."""
    from memascend.baselines.lohan.run import run_of
    from memascend.engine.buffers import EngineBuffers
    from memascend.storage.direct_engine import DirectEngineConfig

    work, run = build.work, run_of(build.work)
    buffers = EngineBuffers(
        run.layout, build.swapped, state_slots=run.options.state_slots, gradients=build.gradient_dtype
    )
    if run.gradients_wait:
        buffers.need_gradients()
    if work.device == "cuda":
        buffers.need_arrivals()
    if work.saves_meanwhile:
        buffers.need_saved()
    if run.inputs_wait:
        buffers.need_checkpoints(run.input_numel, build.dtype)
    swaps = work.stack.checkpointing == "ssd" or work.arm_name in SWAPPING_ARMS
    engines = 1 + run.has_auxiliary_file + swaps  # for states, waiting tensors, and swapped activations
    for _ in range(engines if work.sizes.bounce_buffers else 0):
        config = DirectEngineConfig()
        for _ in range(config.workers):
            build.ledger.record(
                build.named("bounce buffers"), "nvme_engine_buffers", config.bounce_bytes, allocator="direct engine"
            )

"""Buffers of MLP-Offload: sub-groups and half-precision gradients in host memory, weights on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def update_over_paths(build: RankFootprint) -> None:
    """Book the buffers: gradients in host memory, swap buffers for states on the paths, and the weights.

    Weights are on the device if the arm keeps them there, otherwise in the parameter pool.
    """
    work = build.work
    if work.arrangement.weights_on_gpu:
        build.pageable("weights", "in_memory_optimizer", sum(work.partitions()) * build.dtype.itemsize, role="device")
    else:
        build.parameter_pool()
        build.resident(work.streamed().resident)
    build.optimizer_swap()
    build.gradients()
    build.unswapped_groups()
    build.bounce_buffers()
    build.checkpoints()

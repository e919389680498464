"""Host and device buffers that several systems have in common, booked by the classes that a run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def ssd_offload(build: RankFootprint) -> None:
    """Parameters and optimizer states on the SSD, gradients in host memory (ZeRO-Infinity's schedule)."""
    build.parameter_pool()
    build.optimizer_swap()
    build.gradients()
    build.resident(build.work.streamed().resident)
    build.unswapped_groups()
    build.bounce_buffers()
    build.checkpoints()


def device_only(build: RankFootprint) -> None:
    """The device holds 16 bytes a parameter, the host only the weights while they load."""
    numel = sum(build.work.partitions())
    for name, element_bytes in (
        ("parameters", build.dtype.itemsize),
        ("gradients", build.dtype.itemsize),
        ("master", build.states.itemsize),
        ("moments", 2 * build.states.itemsize),
    ):
        build.pageable(name, "in_memory_optimizer", element_bytes * numel, role="device")
    build.pageable("weights on their way to the GPU", "model_load", numel * build.dtype.itemsize)

"""Host and device buffers common to several systems, booked by the classes that a run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.memory.classes import GRADIENTS, MASTERS, MOMENTUM, VARIANCE

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def ssd_offload(build: RankFootprint) -> None:
    """Book the buffers of ZeRO-Infinity's schedule: parameters and states on the SSD, gradients in host memory."""
    build.parameter_pool()
    build.optimizer_swap()
    build.gradients()
    build.resident(build.work.streamed().resident)
    build.unswapped_groups()
    build.bounce_buffers()
    build.checkpoints()


def host_offload(build: RankFootprint) -> None:
    """Book the buffers of DeepSpeed ZeRO-3 with parameters and optimizer in host memory.

    They take 24 bytes per parameter (fp32), and 29 during the overflow chain:
    2 (parameters, one pinned flat buffer, stage3 _create_param_groups_fp16_flat_cpu_memory) + 4 (fp32 master, pageable)
    + 8 (two moments, pageable) + 4 (gradient of each sub-group, pinned one by one, initialize_optimizer_states)
    + 4 (gradient flat buffer, pinned as a whole; 2 with 16-bit gradients, which gives the 20 bytes of Table I of
    CXL-aware allocation) + 5 (overflow chain over it), and 2 for the partitions that zero.Init pins one by one before
    they move to the flat buffer, and that torch's caching allocator never releases.
    """
    partitions = build.work.partitions()
    build.pinned.allocate(sum(partitions), build.dtype, name="parameters", owner="parameter_flat_buffer")
    build.resident(build.work.spec.tensors())
    for index, group in enumerate(build.work.sub_groups()):
        what, numel = f"of sub-group {index}", sum(group)
        for name, owner in (("master", MASTERS), ("first moment", MOMENTUM), ("second moment", VARIANCE)):
            build.pageable(f"{name} {what}", owner, numel * build.states.itemsize)
        build.pinned.allocate(numel, build.states, name=f"gradient {what}", owner=GRADIENTS)
    build.gradients()
    build.checkpoints()


def device_only(build: RankFootprint) -> None:
    """Book 16 bytes per parameter on the device, and on the host only the weights during loading."""
    numel = sum(build.work.partitions())
    for name, element_bytes in (
        ("parameters", build.dtype.itemsize),
        ("gradients", build.dtype.itemsize),
        ("master", build.states.itemsize),
        ("moments", 2 * build.states.itemsize),
    ):
        build.pageable(name, "in_memory_optimizer", element_bytes * numel, role="device")
    build.pageable("weights on their way to the GPU", "model_load", numel * build.dtype.itemsize)

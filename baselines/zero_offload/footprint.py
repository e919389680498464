"""Host buffers of DeepSpeed ZeRO-3 with parameters and optimizer in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def footprint(build: RankFootprint) -> None:
    """24 bytes a parameter (fp32), 29 in the overflow chain.

    2 (parameters, one pinned flat buffer, stage3 _create_param_groups_fp16_flat_cpu_memory) + 4 (fp32 master, pageable)
    + 8 (two moments, pageable) + 4 (gradient of each sub-group, pinned one by one, initialize_optimizer_states)
    + 4 (gradient flat buffer, pinned as a whole) + 5 (overflow chain over it), and 2 for the partitions that zero.Init
    pins one by one before they move to the flat buffer: torch's caching allocator never gives those back.
    """
    partitions = build.work.partitions()
    build.pinned.allocate(sum(partitions), build.dtype, name="parameters", owner="parameter_flat_buffer")
    build.resident(build.work.spec.tensors())
    for index, group in enumerate(build.work.sub_groups()):
        what, numel = f"of sub-group {index}", sum(group)
        size = numel * build.states.itemsize
        build.pageable(f"master {what}", "in_memory_optimizer", size)
        build.pageable(f"moments {what}", "adam_states", 2 * size)
        build.pinned.allocate(numel, build.states, name=f"gradient {what}", owner="in_memory_optimizer")
    build.gradients()
    build.checkpoints()

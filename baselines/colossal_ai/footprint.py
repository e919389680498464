"""Host buffers of Colossal-AI: 6 bytes per parameter, and the moments of two tensors on their way.

Gemini keeps parameters in chunks: those in 16 bits, which gradients are written over, and fp32 masters. Its NVMe
offload is of the two moments alone (colossalai.org, "NVMe offload": 8N), which the optimizer takes tensor by
tensor, the next one read while one is updated. A chunk's padding depends on a search whose result is not printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.memory.classes import MASTERS

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint

_ON_THEIR_WAY = 2  # tensors: one that is updated, one that is read ahead
_MOMENTS = 2


def chunks(build: RankFootprint) -> None:
    partitions = build.work.partitions()
    build.pinned.allocate(sum(partitions), build.dtype, name="weights and gradients", owner="parameter_flat_buffer")
    build.pinned.allocate(sum(partitions), build.states, name="masters", owner=MASTERS)
    moments = _ON_THEIR_WAY * _MOMENTS * max(partitions) * build.states.itemsize
    build.pageable("moments on their way", "optimizer_buffers", moments)
    build.checkpoints()

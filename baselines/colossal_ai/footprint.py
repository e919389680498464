"""Host buffers of Colossal-AI: 6 bytes per parameter, and the moments of two tensors in flight.

Gemini keeps parameters in chunks: 16-bit ones, which gradients overwrite, and fp32 masters. Its NVMe offload covers
only the two moments (colossalai.org, "NVMe offload": 8N). The optimizer processes them tensor by tensor and reads the
next one during an update. The padding of chunks depends on a search whose result is not published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.memory.classes import MASTERS

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint

_ON_THEIR_WAY = 2  # tensors in flight: one being updated, one being read ahead
_MOMENTS = 2


def chunks(build: RankFootprint) -> None:
    """Build the chunks, the moments of the tensors in flight and the activation checkpoints of one rank."""
    partitions = build.work.partitions()
    build.pinned.allocate(sum(partitions), build.dtype, name="weights and gradients", owner="parameter_flat_buffer")
    build.pinned.allocate(sum(partitions), build.states, name="masters", owner=MASTERS)
    moments = _ON_THEIR_WAY * _MOMENTS * max(partitions) * build.states.itemsize
    build.pageable("moments on their way", "optimizer_buffers", moments)
    build.checkpoints()

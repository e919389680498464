"""The tensors of a model that stream through the parameter buffer pool, and the pool sizes of both designs.

A run takes the element counts from its modules, a plan from its specification; both pass them to the same pool classes
in `memascend.memory.pools`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memascend.planner.tensors import TensorSpec

# DeepSpeed keeps partitions under 1 MiB permanently in host memory (max(MIN_AIO_BYTES, block_size) in its swappers).
# For a twin the threshold is divided by k^2, like every threshold in bytes.
SWAP_THRESHOLD_BYTES = 1 << 20
# "2 embedding" of MemAscend IV-B: buffers of the baseline in addition to those of its blocks, tied or not.
OUTSIDE_BUFFERS = 2


@dataclass(frozen=True)
class Streamed:
    """The tensors on the SSD, as elements of each rank's partition: by block, and those outside the blocks."""

    blocks: tuple[tuple[int, ...], ...]
    outside: tuple[int, ...]
    resident: tuple[TensorSpec, ...]  # too small to be worth a transfer; they stay in host memory

    @property
    def largest(self) -> int:
        """Elements of the largest partition that streams."""
        return max(self.outside + tuple(numel for block in self.blocks for numel in block))

    def monolithic_count(self, blocks_in_flight: int = 1) -> int:
        """Return the number of the baseline's uniform buffers: 2 + N x (matrices of the largest block).

        For a dense model and N = 1 block in flight these are 9.
        """
        return OUTSIDE_BUFFERS + blocks_in_flight * max((len(block) for block in self.blocks), default=0)


def partition_numel(numel: int, ranks: int) -> int:
    """Return the elements of one rank's share of a tensor, rounded up (ZeRO-3 pads the last one)."""
    return -(-numel // ranks)


def streamed(
    tensors: Sequence[TensorSpec], *, element_bytes: int, ranks: int = 1, threshold_bytes: float = SWAP_THRESHOLD_BYTES
) -> Streamed:
    """Split a model's tensors into those that stream and those that stay in host memory.

    Raises ValueError if nothing is large enough to stream, since no pool is needed then.
    """
    blocks: dict[int, list[int]] = {}
    outside: list[int] = []
    resident: list[TensorSpec] = []
    for tensor in tensors:
        share = partition_numel(tensor.numel, ranks)
        if share * element_bytes < threshold_bytes:
            resident.append(tensor)
        elif tensor.block is None:
            outside.append(share)
        else:
            blocks.setdefault(tensor.block, []).append(share)
    if not blocks and not outside:
        raise ValueError(
            f"no tensor reaches the swap threshold of {threshold_bytes:.0f} bytes per rank: this model has nothing to "
            "stream; use fewer ranks or keep it in memory"
        )
    return Streamed(tuple(tuple(block) for block in blocks.values()), tuple(outside), tuple(resident))


def swap_buffers(
    tensors: Sequence[TensorSpec], *, ranks: int = 1, threshold_bytes: float = SWAP_THRESHOLD_BYTES
) -> dict[str, int]:
    """Return `largest_tensor` (elements of one rank) and `pool_buffers` (count) of DeepSpeed's pool for 16-bit weights.

    If nothing is large enough to stream, they are those of the largest tensor, and the least that DeepSpeed accepts.
    """
    try:
        flow = streamed(tensors, element_bytes=2, ranks=ranks, threshold_bytes=threshold_bytes)
    except ValueError:
        largest = max(partition_numel(tensor.numel, ranks) for tensor in tensors)
        return {"largest_tensor": largest, "pool_buffers": OUTSIDE_BUFFERS + 1}
    return {"largest_tensor": flow.largest, "pool_buffers": flow.monolithic_count()}


def sub_groups(tensors: Iterable[TensorSpec], size: int, ranks: int = 1) -> list[list[int]]:
    """Return the partition sizes in elements of each of one rank's optimizer sub-groups, in order.

    DeepSpeed closes a group once its partitions reach `size` elements (stage3, _create_fp16_sub_groups), so the largest
    group has up to `size` plus the largest tensor. With size 1 every tensor is a group of its own.
    """
    groups: list[list[int]] = []
    open_group: list[int] = []
    total = 0
    for tensor in tensors:
        open_group.append(partition_numel(tensor.numel, ranks))
        total += open_group[-1]
        if total >= size:
            groups.append(open_group)
            open_group, total = [], 0
    return [*groups, open_group] if open_group else groups

"""Allocation and booking of one rank's buffers that DeepSpeed's ZeRO-3 requests in addition to its parameter pool.

DeepSpeed requests them one by one, with sizes that it computes; our hooks answer with `owned`. A plan makes the same
requests with an allocator that counts, by the functions below: each has the sizes of the DeepSpeed function it names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memascend.memory.classes import GRADIENTS
from memascend.memory.pinned import Allocator

# DeepSpeed's swappers round transfers up to this many bytes per configured I/O thread (1).
OPTIMIZER_ALIGNMENT_BYTES = 1024
# Our parameter swapper only needs the alignment of direct I/O.
SWAP_OUT_ALIGNMENT_BYTES = 512


def owned(allocator: Allocator, numel: int, dtype: torch.dtype, owner: str, name: str | None = None) -> torch.Tensor:
    """Return a 1-D buffer booked under its owner, also its name unless `name` is given; at least one element."""
    return allocator.allocate(max(1, int(numel)), dtype, name=name or owner, owner=owner)


def gradient_buffer(allocator: Allocator, partitions: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the flat buffer of all gradients, with `partitions` elements each (stage3 `_setup_for_real_optimizer`)."""
    return owned(allocator, sum(partitions), dtype, "gradient_flat_buffer")


# A piece of the gradients in fp32, 2 MiB: it stays in a processor's cache from conversion to update.
CONVERSION_ELEMENTS = 1 << 19


def conversion_buffer(allocator: Allocator, largest: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the buffer for the piece of a sub-group's gradients that is being converted (MLP-Offload 3.2)."""
    return owned(allocator, min(largest, CONVERSION_ELEMENTS), dtype, GRADIENTS, "gradients being converted")


def optimizer_buffers(allocator: Allocator, largest: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return `count` swap buffers for the largest sub-group (`OptimizerSwapper`, `SwapBufferManager`)."""
    numel = aligned(largest, dtype, OPTIMIZER_ALIGNMENT_BYTES)
    return [owned(allocator, numel, dtype, "optimizer_buffers", f"optimizer buffer {i}") for i in range(count)]


def swap_out_buffer(allocator: Allocator, partitions: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the buffer for the new weights of the largest sub-group's tensors (`reserve_partitioned_swap_space`)."""
    numel = sum(aligned(partition, dtype, SWAP_OUT_ALIGNMENT_BYTES) for partition in partitions)
    return owned(allocator, numel, dtype, "swap_out_buffer")


def resident_parameter(allocator: Allocator, numel: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the buffer of a partition too small to be swapped (`zero.Init._partition_param` pins it)."""
    return owned(allocator, numel, dtype, "small_parameters", name)


def aligned(numel: int, dtype: torch.dtype, alignment_bytes: int) -> int:
    """Return `numel` rounded up to whole units of the alignment, as `_io_aligned_numel` of the swappers does."""
    step = alignment_bytes // dtype.itemsize
    return -(-numel // step) * step

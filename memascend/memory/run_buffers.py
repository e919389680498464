"""The buffers of one rank that DeepSpeed's ZeRO-3 asks for beside its parameter pool, made and booked in one place.

DeepSpeed asks for them one by one, with sizes of its own; our hooks answer with `owned`. A plan makes the same requests
over an allocator that counts, by the functions below: each gives the sizes of one DeepSpeed function, named in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memascend.memory.classes import GRADIENTS
from memascend.memory.pinned import Allocator

# DeepSpeed's swappers round what they move up to this many bytes for each I/O thread that it is told of (1).
OPTIMIZER_ALIGNMENT_BYTES = 1024
# Our parameter swapper needs no more than what direct I/O does.
SWAP_OUT_ALIGNMENT_BYTES = 512


def owned(allocator: Allocator, numel: int, dtype: torch.dtype, owner: str, name: str | None = None) -> torch.Tensor:
    """A 1-D buffer booked under its owner, which names it unless `name` does. An empty tensor gets one element."""
    return allocator.allocate(max(1, int(numel)), dtype, name=name or owner, owner=owner)


def gradient_buffer(allocator: Allocator, partitions: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """The flat buffer of all gradients, `partitions` elements each (stage3 `_setup_for_real_optimizer`)."""
    return owned(allocator, sum(partitions), dtype, "gradient_flat_buffer")


# A piece of the gradients in fp32, 2 MiB: it stays in a processor's cache between conversion and update.
CONVERSION_ELEMENTS = 1 << 19


def conversion_buffer(allocator: Allocator, largest: int, dtype: torch.dtype) -> torch.Tensor:
    """For the piece of a sub-group's gradients that is being converted (MLP-Offload 3.2)."""
    return owned(allocator, min(largest, CONVERSION_ELEMENTS), dtype, GRADIENTS, "gradients being converted")


def optimizer_buffers(allocator: Allocator, largest: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` swap buffers for the largest sub-group (`OptimizerSwapper`, `SwapBufferManager`)."""
    numel = aligned(largest, dtype, OPTIMIZER_ALIGNMENT_BYTES)
    return [owned(allocator, numel, dtype, "optimizer_buffers", f"optimizer buffer {i}") for i in range(count)]


def swap_out_buffer(allocator: Allocator, partitions: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """For new weights of the largest sub-group, tensor by tensor (`reserve_partitioned_swap_space`)."""
    numel = sum(aligned(partition, dtype, SWAP_OUT_ALIGNMENT_BYTES) for partition in partitions)
    return owned(allocator, numel, dtype, "swap_out_buffer")


def resident_parameter(allocator: Allocator, numel: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A partition too small to be swapped (`zero.Init._partition_param` pins it)."""
    return owned(allocator, numel, dtype, "small_parameters", name)


def aligned(numel: int, dtype: torch.dtype, alignment_bytes: int) -> int:
    """`numel` rounded up to whole units of the alignment, as the swappers' `_io_aligned_numel`."""
    step = alignment_bytes // dtype.itemsize
    return -(-numel // step) * step

"""The accelerator that DeepSpeed sees while memascend is enabled: it pins memory by our allocator.

Public hook: ``deepspeed.accelerator.set_accelerator``. The class is made from the live accelerator's class, so that
everything else (CUDA streams, dtype support, op builders) stays DeepSpeed's.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from memascend.memory.classes import GRADIENTS
from memascend.memory.pinned import is_pinned
from memascend.memory.run_buffers import owned


class PinnedAllocator(Protocol):
    """The interface that the hooks need of an allocator (memascend.memory.pinned)."""

    name: str

    def allocate(
        self, numel: int, dtype: torch.dtype, *, name: str, owner: str, role: str = "host"
    ) -> torch.Tensor: ...


# Ledger owner by the qualified name of the DeepSpeed function that requests a buffer; found by name, never by line.
_OWNER_BY_FUNCTION = {
    "AsyncPartitionedParameterSwapper._configure_aio": "parameter_pool",
    "AsyncPartitionedParameterSwapper.reserve_partitioned_swap_space": "swap_out_buffer",
    "SwapBufferManager.__init__": "optimizer_buffers",
    "GrowingBuffers.allocate": "optimizer_buffers",
    "CachedSubGroupSwapper._bring_gradient": GRADIENTS,
    "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer": "gradient_flat_buffer",
    "DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory": "parameter_flat_buffer",
    "DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states": GRADIENTS,
    "Init._partition_param": "small_parameters",
}

# The owners of buffers that every step reads into and writes from throughout the training run.
SWAP_BUFFERS = frozenset({"parameter_pool", "swap_out_buffer", "optimizer_buffers"})


def calling_owner(depth: int = 2, limit: int = 6) -> str:
    """Return the ledger owner of the DeepSpeed function that requests memory, searching up to ``limit`` frames.

    Returns the name of the first frame's function if none of them is known.
    """
    frame = sys._getframe(depth)
    first = frame.f_code.co_qualname
    for _ in range(limit):
        qualname = frame.f_code.co_qualname.split(".<locals>")[0]
        if qualname in _OWNER_BY_FUNCTION:
            return _OWNER_BY_FUNCTION[qualname]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return first


def pinning_accelerator(stock: Any, allocator: PinnedAllocator) -> Any:
    """Return an accelerator like ``stock`` whose ``pin_memory`` family uses ``allocator``."""
    stock_class = type(stock)

    def pin(tensor: torch.Tensor, shape: Any, owner: str) -> torch.Tensor:
        pinned = owned(allocator, tensor.numel(), tensor.dtype, owner)
        return pinned[: tensor.numel()].view(shape)

    class PinningAccelerator(stock_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.__dict__.update(stock.__dict__)

        def pin_memory(self, tensor, *args, make_copy: bool = True, match_shape: bool = True, **kwargs):
            if tensor.numel() == 0 or (is_pinned(tensor) and match_shape):
                return tensor
            out = pin(tensor, tensor.shape if match_shape else (tensor.numel(),), calling_owner())
            if make_copy:
                out.copy_(tensor.reshape(out.shape))
            return out

        def pin_empty(self, *size, dtype, device="cpu"):
            shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
            out = owned(allocator, shape.numel(), dtype, calling_owner())
            return out[: shape.numel()].view(shape)

        def pin_empty_like(self, tensor, device="cpu", dtype=None):
            return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype)

        def unpin_memory(self, tensor):
            return None  # the memory is freed with its last view

        def is_pinned(self, tensor):
            return is_pinned(tensor) or super().is_pinned(tensor)

    PinningAccelerator.__name__ = f"MemAscend{stock_class.__name__}"
    return PinningAccelerator()


def watching_accelerator(stock: Any, ledger: Any) -> Any:
    """Return an accelerator like ``stock`` that pins as DeepSpeed does and records each pinned request in ``ledger``.

    On the CPU DeepSpeed's default backend pins nothing: the tensor that was passed in is itself the buffer.
    """
    stock_class = type(stock)

    class WatchingAccelerator(stock_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.__dict__.update(stock.__dict__)

        def pin_memory(self, tensor, *args, **kwargs):
            out = super().pin_memory(tensor, *args, **kwargs)
            owner = calling_owner()
            allocator = "torch (pageable)" if out.data_ptr() == tensor.data_ptr() else "deepspeed pinned"
            ledger.record(
                name=owner,
                owner=owner,
                role="host",
                allocator=allocator,
                requested_bytes=out.nbytes,
                reserved_bytes=out.untyped_storage().nbytes(),
                address=out.data_ptr(),
                locked=False,
            )
            return out

    WatchingAccelerator.__name__ = f"Watching{stock_class.__name__}"
    return WatchingAccelerator()

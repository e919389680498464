"""Start-up and a first step that take no more memory than every later step.

DeepSpeed takes more in two places: the gradient buffer is allocated twice (once pageable, once pinned), and the two
moments of a sub-group are created in pageable memory, from which they are copied into the swap buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor import optimizer_utils
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from torch.overrides import TorchFunctionMode

from memascend.memory.run_buffers import gradient_buffer

from .accelerator import PinnedAllocator
from .stage3_settings import Stage3Settings

SWAPS_CONTEXTS = hasattr(optimizer_utils, "SwapTensorContext")  # DeepSpeed 0.17 and later


class _ZerosWhereTheyStay(TorchFunctionMode):
    """A mode in which ``torch.zeros`` of the gradient buffer's size returns pinned memory from ``allocator``.

    The kernel has already zeroed that memory, and ``pin_memory`` makes no copy of a tensor that is pinned.
    """

    def __init__(self, partitions: list[int], dtype: torch.dtype, allocator: PinnedAllocator) -> None:
        super().__init__()
        self._partitions, self._numel, self._dtype, self._allocator = partitions, sum(partitions), dtype, allocator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args[:1] == (self._numel,) and kwargs.get("dtype") == self._dtype:
            return gradient_buffer(self._allocator, self._partitions, self._dtype)
        return func(*args, **kwargs)


class FirstStepInPlace:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` whose start-up and first step take no more memory than later ones."""

    settings: Stage3Settings

    def _setup_for_real_optimizer(self) -> None:
        if not self.offload_optimizer_pin_memory:
            super()._setup_for_real_optimizer()
            return
        partitions = [p.partition_numel() for group in self.fp16_groups for p in group]
        with _ZerosWhereTheyStay(partitions, self.gradient_accumulation_dtype, self.settings.allocator):
            super()._setup_for_real_optimizer()

    def _prepare_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        super()._prepare_sub_group(sub_group_id, timer_names)
        if SWAPS_CONTEXTS and self._swappable_optimizer_subgroup(sub_group_id):
            parameter = self.fp32_partitioned_groups_flat[sub_group_id]
            if parameter.grad is not None or self.unconverted_gradient is not None:
                make_moments_in_swap_buffers(self.optimizer, self.optimizer_swapper, parameter)


def make_moments_in_swap_buffers(optimizer: Any, swapper: Any, parameter: torch.Tensor) -> None:
    """Create the Adam states of ``parameter``, swapped in with its gradient, as zeros in two of the free swap buffers.

    Does nothing if it has states already. Also leaves them to DeepSpeed if the optimizer is another one, the swapper is
    pipelined (its free buffers belong to the next sub-group), the states have another dtype than the buffers, or fewer
    than two buffers are free.
    """
    own = getattr(swapper, "moment_buffers", None)  # the swapper of several paths has buffers for them
    if type(optimizer) is not DeepSpeedCPUAdam or (own is None and type(swapper) is not PartitionedOptimizerSwapper):
        return
    if optimizer.state.get(parameter):
        return
    dtype = torch.float if getattr(optimizer, "fp32_optimizer_states", True) else parameter.dtype
    if dtype != swapper.dtype:
        return
    info = swapper.swap_params_info[swapper.parameter_id(parameter)]
    numel = swapper._io_aligned_numel(info.numel())
    if own is not None:
        buffers = own(info)
    else:
        buffers = swapper.swap_buffer_manager.allocate(num_elems=numel, count=2, dtype=dtype)
        if buffers is None:
            return
        info.swap_buffers += buffers
    moments = [torch.empty(0, dtype=dtype) for _ in buffers]
    for moment, buffer in zip(moments, buffers, strict=True):
        moment.data = buffer.zero_().narrow(0, 0, info.numel()).data
    optimizer.state[parameter] = {"step": 0, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    swapper._update_param_state_info(info, parameter)
    for context in info.tensors:
        for moment, buffer in zip(moments, buffers, strict=True):
            if context.compute_tensor is moment:
                context.set_buffers(compute_buffer=moment, swap_buffer=buffer)

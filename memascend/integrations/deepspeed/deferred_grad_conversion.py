"""Half-precision gradients that are converted as AdamW reads them (MLP-Offload 3.2, delayed in-place conversion).

DeepSpeed converts gradients as they arrive in the last micro-batch, and the update of a swapped sub-group reads them
from a buffer in the states' dtype, as large as the sub-group. Here they stay in the flat buffer. The fast AdamW reads
them from there. DeepSpeed's own AdamW, which requires one dtype for all tensors, gets them a piece at a time, converted
and scaled in a buffer that fits into the processor's cache. This is the same arithmetic for each element, so the result
is bit-identical.

If a parameter of a sub-group has no gradient of this step, or one that was set from outside, the gradient is completed
as before, in a buffer of the sub-group's size that the swapper allocates. The same applies to all sub-groups if another
optimizer updates them. One line then announces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.integrations.conventions import announce
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.run_buffers import conversion_buffer

from .stage3_settings import Stage3Settings
from .unused_parameters import Factor


class DeferredGradConversion:
    """Mixin that must precede :class:`.host_gradients.HostGradients`."""

    settings: Stage3Settings
    unconverted_gradient: torch.Tensor | None  # during a sub-group's update: its part of the flat buffer, if usable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._deferred_factor: Factor = 1.0
        self._piece: torch.Tensor | None = None
        self._announced = False
        super().__init__(*args, **kwargs)

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, gradients: dict[int, list[Any]], offsets: dict[int, list[int]]
    ) -> None:
        """Do as DeepSpeed, without the fp32 copy: of gradients that stay in the flat buffer only the length is used."""
        sub_group, offset, _ = self.grad_position[self.get_param_id(param)]
        if not self._swappable_optimizer_subgroup(sub_group):
            super()._offload_grad_partition_at_boundary(param, grad_buffer, gradients, offsets)
            return
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)
        gradients.setdefault(sub_group, []).append(grad_buffer)
        offsets.setdefault(sub_group, []).append(offset)

    def _prepare_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        self.unconverted_gradient = self._unconverted(sub_group_id)
        with self._gradients_hidden(sub_group_id):
            super()._prepare_sub_group(sub_group_id, timer_names)

    @contextlib.contextmanager
    def _gradients_hidden(self, sub_group_id: int) -> Iterator[None]:
        """Hide the usable flat gradients of this sub-group and of the one read ahead from the swapper, in a context."""
        indices = [sub_group_id] if sub_group_id in self._pieces else []
        following = self.next_swappable_fp32_partitioned_groups[sub_group_id] if indices else None
        if following is not None:
            indices.append(self._sub_group_of[self.optimizer_swapper.parameter_id(following)])
        hidden = [self._pieces[index] for index in indices if self._unconverted(index) is not None]
        with contextlib.ExitStack() as stack:
            for pieces in hidden:
                stack.enter_context(pieces.hidden())
            yield

    def _unconverted(self, sub_group_id: int) -> torch.Tensor | None:
        """Return the sub-group's part of the flat buffer if that is its gradient, else None."""
        if sub_group_id not in self._pieces:
            return None
        other = self._updated_otherwise(sub_group_id)
        if other is None:
            numel = self.fp16_partitioned_groups_flat_numel[sub_group_id]
            flat = self.grad_partitions_flat_buffer.narrow(0, self._flat_begin[sub_group_id], numel)
            if self._pieces[sub_group_id].lie_in(flat):
                return flat
            other = "a parameter has no gradient of this step, or one that was set from outside"
        if not self._announced:
            self._announced = True
            announce(f"memascend: gradients get a buffer in the states' type before they are updated: {other}")
        return None

    def _updated_otherwise(self, sub_group_id: int) -> str | None:
        """Return, as text, why this sub-group's update needs gradients in the states' dtype; None if it does not."""
        if type(self.optimizer) is not DeepSpeedCPUAdam:
            return f"the optimizer is {type(self.optimizer).__name__}"
        if not self.grad_partitions_flat_buffer.is_cpu or self.subgroup_to_device[sub_group_id] != "cpu":
            return "they are updated on the device"
        others = {"use_muon": "Muon", "torch_autocast_gradscaler": "torch autocast", "zenflow": "ZenFlow"}
        return next((f"{named} is in use" for name, named in others.items() if getattr(self, name, None)), None)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Note the step's factor, which `_optimizer_step` applies to each converted piece."""
        if self.unconverted_gradient is None:
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        self._deferred_factor = self._factor_of_step(total_norm)
        self._note_scaling(sub_group_id, self._deferred_factor)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update the sub-group by DeepSpeed's AdamW, a converted and scaled piece of the gradient at a time."""
        gradient, self.unconverted_gradient = self.unconverted_gradient, None
        if gradient is None:
            super()._optimizer_step(sub_group_id)
            return
        adam, parameter = self.optimizer, self.fp32_partitioned_groups_flat[sub_group_id]
        group = adam.param_groups[self.sub_group_to_group_id[sub_group_id]]
        state = adam_state(adam, parameter)
        state["step"] += 1
        options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        for begin, converted in self._converted(gradient, parameter.dtype):
            tensors = (parameter.data, state["exp_avg"], state["exp_avg_sq"])
            master, *moments = (tensor.narrow(0, begin, converted.numel()) for tensor in tensors)
            converted.mul_(self._deferred_factor)
            adam.ds_opt_adam.adam_update(adam.opt_id, state["step"], *options, master, converted, *moments)

    def _converted(self, gradient: torch.Tensor, dtype: torch.dtype) -> Any:
        """Yield (offset, piece) of ``gradient`` in ``dtype``; a piece is valid until the next one is requested."""
        if self._piece is None:
            largest = max(self.fp16_partitioned_groups_flat_numel)
            allocator = self.settings.allocator or PageAlignedPinnedAllocator()
            self._piece = conversion_buffer(allocator, largest, dtype)
        for begin in range(0, gradient.numel(), self._piece.numel()):
            part = gradient[begin : begin + self._piece.numel()]
            yield begin, self._piece[: part.numel()].copy_(part)


def adam_state(optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the Adam state of ``parameter``, created as zeros if it has none yet."""
    state = optimizer.state[parameter]
    if not state:
        state |= {
            "step": 0,
            "exp_avg": torch.zeros_like(parameter.data),
            "exp_avg_sq": torch.zeros_like(parameter.data),
        }
    return state

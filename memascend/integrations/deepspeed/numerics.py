"""``numerics: fast``: our norm and our AdamW in the ZeRO-3 step; ``exact`` (the default) leaves both to DeepSpeed.

Exact keeps DeepSpeed's order of sums and its AdamW, because ours is not bitwise equal to it: one fifth of the fp32
weights differ by one unit in the last place after one step (ours computes 1 - beta in double, DeepSpeed in float).

Fast reads each gradient once for both norm and overflow, unscales and clips as AdamW reads the gradient, and, with bf16
states, rounds stochastically, so that updates smaller than half a unit in the last place are not lost.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.ops.adamw import ROUNDING_SEED, adamw_
from memascend.ops.unscale import unscale_norm_overflow_

from .deferred_grad_conversion import adam_state


class FastNumerics:
    """Mixin over :class:`.unused_parameters.UnusedParameters` with the fused norm and AdamW."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._norm_saw_overflow = self._norm_elsewhere = False
        super().__init__(*args, **kwargs)
        _require_cpu_adamw(self.optimizer)
        self._normed_partitions = sum(_holds_elements(self, p) for group in self.fp16_groups for p in group)
        numels = self.fp16_partitioned_groups_flat_numel
        rank = dist.get_rank(group=self.dp_process_group)
        self._first_element = [sum(numels) * rank + sum(numels[:i]) for i in range(len(numels))]

    def _constant_buffered_norm2(self, input: torch.Tensor, buffer_size: int = 250_000_000) -> torch.Tensor:
        """Return the 2-norm of ``input`` in one pass that finds overflow too; off the CPU as DeepSpeed does."""
        if input.device.type != "cpu":
            self._norm_elsewhere = True
            return super()._constant_buffered_norm2(input, buffer_size)
        result = unscale_norm_overflow_(input.view(-1), 1.0)
        self._norm_saw_overflow |= bool(result.overflow)
        return result.sum_squares.sqrt()

    def _local_overflow(self) -> bool:
        """Return the overflow found by the norm's pass if it has seen every gradient, else check in a separate pass."""
        if self._norm_saw_overflow:
            return True
        seen_all = not self._norm_elsewhere and len(self.norm_for_param_grads) >= self._normed_partitions
        return False if seen_all else super()._local_overflow()

    def reset_cpu_buffers(self) -> None:
        """Reset DeepSpeed's buffers, and the overflow found by the norm, for the next step."""
        super().reset_cpu_buffers()
        self._norm_saw_overflow = self._norm_elsewhere = False

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Note the factor that AdamW applies as it reads a swapped gradient; scale any other gradient in place."""
        self._grad_scale = 1.0
        if not self._swappable_optimizer_subgroup(sub_group_id):
            super().unscale_and_clip_grads(sub_group_id, total_norm)  # in place, as this gradient buffer persists
            return
        scale = float(self.loss_scale)
        if self.clip_grad > 0.0:
            scale *= max(1.0, (float(total_norm) / scale + 1e-6) / self.clip_grad)
        self._grad_scale = 1.0 / scale
        self._note_scaling(sub_group_id, self._grad_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update the sub-group in place by our AdamW; a sub-group on another device is left to DeepSpeed."""
        if self.subgroup_to_device[sub_group_id] != "cpu":
            super()._optimizer_step(sub_group_id)
            return
        param = self.fp32_partitioned_groups_flat[sub_group_id]
        gradient, self.unconverted_gradient = self._readable(param), None
        if gradient is None:
            return
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        state = adam_state(self.optimizer, param)
        state["step"] += 1
        adamw_(
            param.data,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=state["step"],
            lr=group["lr"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=self._grad_scale,
            seed=ROUNDING_SEED,
            element_offset=self._first_element[sub_group_id],
        )

    def _readable(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient in the flat buffer, which the kernel converts as it reads, or DeepSpeed's, if any."""
        if self.unconverted_gradient is not None:
            return self.unconverted_gradient
        return None if param.grad is None else param.grad.data


def _holds_elements(optimizer: Any, param: Any) -> bool:
    """Return whether this rank's partition of ``param`` is more than padding, which DeepSpeed skips."""
    if hasattr(optimizer, "_get_param_partition_rank"):
        rank = optimizer._get_param_partition_rank(param)
    else:  # 0.16 has one group of ranks for all parameters
        rank = dist.get_rank(group=optimizer.dp_process_group)
    return param.partition_numel() * rank < param.ds_numel


def _require_cpu_adamw(optimizer: Any) -> None:
    """Raise ValueError unless the optimizer is DeepSpeed's AdamW on the CPU with bias correction."""
    adamw = type(optimizer) is DeepSpeedCPUAdam and optimizer.adam_w_mode
    if not adamw or not all(group["bias_correction"] for group in optimizer.param_groups):
        raise ValueError(
            f"memascend.numerics='fast' needs AdamW with bias correction on the CPU, got {type(optimizer).__name__}; "
            "set optimizer.type to 'AdamW' with zero_optimization.offload_optimizer, or memascend.numerics to 'exact'"
        )

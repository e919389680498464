"""Gradients that stay in the flat gradient buffer until the optimizer reads them, in place of a way over NVMe.

ZeRO-Infinity writes the gradients of swapped sub-groups to NVMe as they are made and reads them back in the step,
though the flat buffer, which accumulates them, holds them all the time. Kept, a step writes and reads 4 bytes a
parameter less (2 with bf16 states), and computes the same.
"""

from __future__ import annotations

from typing import Any

from .signatures import KEPT_GRADIENT_HOOKS, check_hooks


def kept_gradients_class(stock_class: type) -> type:
    """Subclass of the ZeRO-3 optimizer that swaps no gradients. Raises RuntimeError where a hook has changed."""
    check_hooks(KEPT_GRADIENT_HOOKS, otherwise="set memascend.gradients to 'swapped'")

    class KeptGradients(stock_class):  # type: ignore[misc, valid-type]
        def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
            super()._configure_tensor_swapping(*args, **kwargs)
            self.optimizer_swapper.swap_out_gradients = self._keep_gradients

        def _keep_gradients(self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Any]) -> None:
            """DeepSpeed's own way for gradients too small to swap: their tensors are read at swap-in. Here it is one
            tensor, the sub-group's part of the flat buffer, which has its order; as swap files would, it stays.
            """
            swapper, sizes = self.optimizer_swapper, self.fp16_partitioned_groups_flat_numel
            info = swapper.swap_params_info[swapper.parameter_id(parameter)]
            sub_group = next(i for i, flat in enumerate(self.fp32_partitioned_groups_flat) if flat is parameter)
            begin = sum(sizes[:sub_group])
            info.unswapped_gradients = {0: self.grad_partitions_flat_buffer.narrow(0, begin, sizes[sub_group])}
            info.release_unswapped_gradients = lambda: None

    return KeptGradients

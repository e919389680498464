"""Gradients that stay in the flat gradient buffer until the optimizer reads them, instead of going over NVMe.

ZeRO-Infinity writes the gradients of swapped sub-groups to NVMe as they are computed and reads them back in the step,
although the flat buffer that accumulates them has them all the time. If they stay in memory, a step writes and reads 4
bytes per parameter less (2 with bf16 states) and computes the same result.
"""

from __future__ import annotations

from typing import Any


class HostGradients:
    """Mixin over :class:`.unused_parameters.UnusedParameters` that does not swap gradients in the flat buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Parameters, in order, that got a gradient in this step's micro-batches before the last one.
        self._in_earlier_micro_batches: dict[Any, None] = {}
        super().__init__(*args, **kwargs)
        sizes = self.fp16_partitioned_groups_flat_numel
        self._flat_begin = [sum(sizes[:index]) for index in range(len(sizes))]

    def _store_gradients(self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Any]) -> None:
        """Store gradients as views of the flat buffer, in its order.

        This uses DeepSpeed's own mechanism for gradients that are too small to swap: their tensors are read at swap-in.
        """
        begin = self._flat_begin[self._sub_group_of[self.optimizer_swapper.parameter_id(parameter)]]
        flat = self.grad_partitions_flat_buffer
        views = [
            flat.narrow(0, begin + offset, tensor.numel())
            for offset, tensor in zip(gradient_offsets, gradient_tensors, strict=True)
        ]
        self._pieces_of(parameter).store_views(gradient_offsets, views)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Any]) -> Any:
        """Note which parameters got a gradient before the last micro-batch of a step."""
        boundary = self.is_gradient_accumulation_boundary
        if not (boundary() if callable(boundary) else boundary):  # an attribute in 0.16
            self._in_earlier_micro_batches |= dict.fromkeys(params_to_release)
        return super().partition_grads(params_to_release, grad_partitions)

    def step(self, closure: Any = None) -> None:
        """Take DeepSpeed's step. Raises RuntimeError as `_refuse_overwritten_gradients` does."""
        self._refuse_overwritten_gradients()
        super().step(closure)

    def _refuse_overwritten_gradients(self) -> None:
        """Raise RuntimeError for a parameter that got a gradient in an earlier micro-batch but not in the last one.

        CPU offload takes new gradients only for the parameters of the last micro-batch and steps all others with their
        previous gradient. For such a parameter the flat buffer no longer has that previous gradient.
        """
        touched, self._in_earlier_micro_batches = self._in_earlier_micro_batches, {}
        for parameter in touched:
            sub_group, offset, _ = self.grad_position[self.get_param_id(parameter)]
            pieces = self._pieces.get(sub_group)
            if pieces is not None and pieces.is_old_view(offset):
                raise RuntimeError(
                    f"memascend.gradients='host': a parameter of shape {tuple(parameter.ds_shape)} got a gradient in "
                    "an earlier micro-batch of this step but not in the last one, and its previous gradient, which "
                    "DeepSpeed would use, is overwritten; set memascend.gradients to 'nvme'"
                )

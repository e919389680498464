"""Gradients of swapped sub-groups for parameters that got none in a step, as DeepSpeed has them with CPU offload.

With CPU offload each sub-group has a gradient buffer for the whole training run. It begins as zeros, a parameter's
range is overwritten in the last micro-batch of a step if the parameter got a gradient, and the step scales the whole
buffer in place. A parameter without a gradient (unused, or an expert without a token) is therefore updated with zeros,
or with its last gradient, scaled once more. Padding at the end of a partition stays zero.

DeepSpeed's swapper fills a buffer with the gradients that were swapped out and leaves the rest of it as the last
sub-group left it; a sub-group without any gradient has no buffer, which ends in an AttributeError. Here the buffer is
completed to the contents that CPU offload would have: zeros where no gradient ever was, and elsewhere the last gradient
with the scale factors of the steps since then. The factors are replayed one by one, because their product would round
differently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.utils import swap_out_tensors
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .swapped_states import require_transfers

# DeepSpeed 0.16 requires an argument that some of its own callers leave out.
_SWAP_IN = inspect.signature(DeepSpeedZeroOptimizer_Stage3._optimizer_states_and_gradient_swap_in)
_TIMERS_REQUIRED = _SWAP_IN.parameters["timer_names"].default is inspect.Parameter.empty

Factor = float | torch.Tensor  # scale factor of one step: 1 / (loss scale and clipping)

# After this many replays a gradient is stored again with its factors applied. At a loss scale of 2^16 it becomes zero
# before that.
_MOST_REPLAYS = 16


class GradientPieces:
    """The gradient of one swapped sub-group, as pieces of its flat buffer by their offset (in elements).

    DeepSpeed's own bookkeeping, ``info``, tracks where a piece is stored between steps: in a swap file, or in a tensor
    in memory if it is too small to swap. Not thread-safe.
    """

    def __init__(self, swapper: Any, info: Any) -> None:
        self._swapper, self._info = swapper, info
        self._numels: dict[int, int] = {}
        self._factors: dict[int, tuple[Factor, ...]] = {}  # scale factors of the steps since the piece was stored
        self._new: set[int] = set()  # offsets stored since the last step
        self._views: set[int] = set()  # offsets of views into a buffer that others write to
        info.has_gradients = lambda: True  # every step needs a gradient, and so a buffer to read it into
        info.release_unswapped_gradients = lambda: None

    def store_by(self, swap_out: Callable[[], None], offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Store new gradients by DeepSpeed's ``swap_out``; small ones, which it keeps as views, are copied."""
        kept = self._info.unswapped_gradients
        self._info.unswapped_gradients = {}
        swap_out()
        for offset, tensor in self._info.unswapped_gradients.items():
            if offset in kept:
                kept[offset].copy_(tensor)
            else:
                kept[offset] = tensor.clone()
        self._info.unswapped_gradients = kept
        for offset, tensor in self._split(offsets, tensors):
            self._note(offset, tensor.numel())

    def store_views(self, offsets: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """Store new gradients as ``views`` of a buffer that outlives the step, without a copy."""
        for offset, _ in self._split(offsets, views):
            self._forget(offset)
        for offset, view in zip(offsets, views, strict=True):
            self._info.unswapped_gradients[offset] = view
            self._views.add(offset)
            self._note(offset, view.numel())

    def store(self, offset: int, values: torch.Tensor) -> None:
        """Store ``values`` unscaled in place of the piece at ``offset``; call while the swapper transfers nothing."""
        self._forget(offset)
        for begin, part in self._split([offset], [values]):
            if self._swapper.is_swappable_tensor(tensor=part):
                paths = self._info.get_or_create_gradient_paths([begin], [part.numel()])
                handle = self._idle_handle()
                swap_out_tensors(handle, [part], paths)
                require_transfers(handle.wait(), 1, paths[0])
            else:
                self._info.unswapped_gradients[begin] = part.clone()
            self._numels[begin], self._factors[begin] = part.numel(), ()

    def store_all(self, gradient: torch.Tensor) -> None:
        """Store the whole ``gradient``, including the ranges that had no piece."""
        ranges = [*self._gaps(gradient.numel()), *((offset, offset + n) for offset, n in self._numels.items())]
        for begin, end in ranges:
            self.store(begin, gradient[begin:end])

    def complete(self, gradient: torch.Tensor) -> None:
        """Complete ``gradient``, which has the stored pieces, to CPU offload's buffer as it is before the step."""
        for begin, end in self._gaps(gradient.numel()):
            gradient[begin:end].zero_()
        for offset, factors in self._factors.items():
            for factor in factors:
                gradient.narrow(0, offset, self._numels[offset]).mul_(factor)

    def settle(self, gradient: torch.Tensor) -> None:
        """Forget old pieces of the completed ``gradient`` that are now zero; store those with many replays again."""
        for offset, factors in list(self._factors.items()):
            if not factors:
                continue
            piece = gradient.narrow(0, offset, self._numels[offset])
            if not piece.any():
                self._forget(offset)
            elif len(factors) >= _MOST_REPLAYS:
                self.store(offset, piece)

    def scaled(self, factor: Factor) -> None:
        """Note that the step has scaled the gradient by ``factor``, which later steps must apply to stored pieces."""
        if factor != 1:
            self._factors = {offset: (*factors, factor) for offset, factors in self._factors.items()}

    def lie_in(self, flat: torch.Tensor) -> bool:
        """Return whether ``flat``, which the views point into, already equals the result of `complete`."""
        views = self._views.issuperset(self._numels) and not any(self._factors.values())
        return views and not any(flat[begin:end].any() for begin, end in self._gaps(flat.numel()))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the gradient from the swapper, which then takes no buffer for it and copies nothing."""
        info = self._info
        found = info.has_gradients, info.swapped_gradients, info.unswapped_gradients
        info.has_gradients, info.swapped_gradients, info.unswapped_gradients = (lambda: False), {}, {}
        try:
            yield
        finally:
            info.has_gradients, info.swapped_gradients, info.unswapped_gradients = found

    def is_old_view(self, offset: int) -> bool:
        """Return whether the piece at ``offset`` is a view that was stored before the last :meth:`end_of_step`."""
        return offset in self._views - self._new

    def end_of_step(self) -> None:
        """End the step; from now on the stored pieces are old ones."""
        self._new.clear()

    def forget_all(self) -> None:
        """Return to the state before the first gradient."""
        for pieces in (self._numels, self._factors, self._new, self._views):
            pieces.clear()
        self._info.swapped_gradients, self._info.unswapped_gradients = {}, {}

    def _note(self, offset: int, numel: int) -> None:
        self._numels[offset], self._factors[offset] = numel, ()
        self._new.add(offset)

    def _forget(self, offset: int) -> None:
        for pieces in (self._info.swapped_gradients, self._info.unswapped_gradients, self._numels, self._factors):
            pieces.pop(offset, None)
        self._views.discard(offset)

    def _split(self, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (offset, piece), split as DeepSpeed does: a tail shorter than a unit of I/O is a piece of its own."""
        parts, begins = self._swapper._adjust_for_misaligned_lengths(tensors=tensors, offsets=offsets)
        return zip(begins, parts, strict=True)

    def _gaps(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end), in elements, of the ranges of a gradient of ``numel`` elements that have no piece."""
        end = 0
        for offset in sorted(self._numels):
            if end < offset:
                yield end, offset
            end = offset + self._numels[offset]
        if end < numel:
            yield end, numel

    def _idle_handle(self) -> Any:
        """Return the writing handle with no transfer in flight; a pipelined swapper may still be writing states."""
        operations = getattr(self._swapper, "swap_ops", {})
        if operations.get("async_swap_out"):
            self._swapper._complete_swap_out("async_swap_out")
        return self._swapper.aio_handle


class UnusedParameters:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` in which parameters without a gradient train as with CPU offload."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pieces: dict[int, GradientPieces] = {}  # by sub-group
        super().__init__(*args, **kwargs)
        if not self.swap_optimizer:
            return
        swapper = self.optimizer_swapper
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if self._swappable_optimizer_subgroup(index):
                info = swapper.swap_params_info[swapper.parameter_id(parameter)]
                self._pieces[index] = GradientPieces(swapper, info)
        self._sub_group_of = {swapper.parameter_id(p): i for i, p in enumerate(self.fp32_partitioned_groups_flat)}
        self._swap_out_gradients_of_stock = swapper.swap_out_gradients
        swapper.swap_out_gradients = self._store_gradients

    def _store_gradients(self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Any]) -> None:
        """Replace the swapper's ``swap_out_gradients``."""

        def swap_out() -> None:
            self._swap_out_gradients_of_stock(
                parameter=parameter, gradient_offsets=gradient_offsets, gradient_tensors=gradient_tensors
            )

        self._pieces_of(parameter).store_by(swap_out, gradient_offsets, gradient_tensors)

    def _pieces_of(self, parameter: Any) -> GradientPieces:
        return self._pieces[self._sub_group_of[self.optimizer_swapper.parameter_id(parameter)]]

    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int, timer_names: set[str] | None = None) -> None:
        if timer_names is None and _TIMERS_REQUIRED:
            timer_names = set()
        super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
        if sub_group_id in self._pieces and self.unconverted_gradient is None:
            self._pieces[sub_group_id].complete(self.fp32_partitioned_groups_flat[sub_group_id].grad)

    def _prepare_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        super()._prepare_sub_group(sub_group_id, timer_names)
        if sub_group_id in self._pieces and self.unconverted_gradient is None:
            self._pieces[sub_group_id].settle(self.fp32_partitioned_groups_flat[sub_group_id].grad)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Scale by DeepSpeed's arithmetic and remember the factor."""
        factor = self._factor_of_step(total_norm)
        self.fp32_partitioned_groups_flat[sub_group_id].grad.mul_(factor)
        self._note_scaling(sub_group_id, factor)

    def _factor_of_step(self, total_norm: torch.Tensor) -> Factor:
        """Return 1 / (loss scale and clipping), by DeepSpeed's arithmetic."""
        scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            scale = torch.clamp(clip, min=1.0) * self.loss_scale
        return 1.0 / scale

    def _note_scaling(self, sub_group_id: int, factor: Factor) -> None:
        if sub_group_id in self._pieces:
            self._pieces[sub_group_id].scaled(factor)

    def _writeback_swap_state(self, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        """Store the whole buffer after ``safe_set_full_grad``, whichever parameter has been set."""
        if write_gradients and sub_group_id in self._pieces:
            self._pieces[sub_group_id].store_all(self.fp32_partitioned_groups_flat[sub_group_id].grad)
            write_gradients = False
        super()._writeback_swap_state(sub_group_id, write_opt_state, write_gradients)

    def step(self, closure: Any = None) -> None:
        """Take DeepSpeed's step, after which the gradients stored in it are old ones."""
        super().step(closure)
        for pieces in self._pieces.values():
            pieces.end_of_step()

    def forget_gradients(self, sub_group_id: int) -> None:
        """Forget a sub-group's gradients, as in a fresh process, because a checkpoint has none."""
        self._pieces[sub_group_id].forget_all()

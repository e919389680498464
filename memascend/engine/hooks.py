"""Hooks of a model's modules and parameters that call the engine, registered once and removed together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memascend.engine.block_runtime import BlockRuntime
from memascend.engine.contents import TierContents
from memascend.engine.errors import NotStreamable
from memascend.engine.gradient_views import forget_gradient, stored_gradient, watch_gradients
from memascend.engine.layout import Kind, Part, Unit
from memascend.engine.matrices import StreamedRows
from memascend.engine.model_guards import ModelGuards
from memascend.engine.model_units import ModelUnits
from memascend.engine.outside_use import OutsideUse
from memascend.engine.profile import StepProfile
from memascend.engine.recompute import stream_block
from memascend.engine.unit_weights import UnitWeights
from memascend.ops.rows import slice_module
from memascend.storage.interrupts import whole


class HookedRuntime(BlockRuntime):
    """The engine as the hooks call it, in addition to the calls of blocks and matrices."""

    def model_begins(self, *_: Any) -> None:
        """Called before the model's forward pass."""

    def model_ends(self, *_: Any) -> None:
        """Called after the model's forward pass."""

    def comes_again(self, unit: Unit) -> bool:
        """Return whether backward visits of the unit are still to come; autograd sums its gradients until then."""
        return False

    def backward_begins(self) -> None:
        """Called within the user's backward pass, before a gradient is used."""

    def arrive(self, part: Part, gradient: torch.Tensor) -> None:
        """Take over the gradient of a parameter, which includes all of its uses in this pass."""


class ModelHooks:
    """The hooks of one engine on its model. Blocks are streamed, and sliced matrices are computed slice by slice. Other
    modules have their weights from before their forward pass to its end, resident ones until backward has ended."""

    def __init__(
        self,
        runtime: HookedRuntime,
        model: nn.Module,
        units: ModelUnits,
        weights: UnitWeights,
        contents: TierContents,
        profile: StepProfile,
    ) -> None:
        self._weights, self._profile, self._units = weights, profile, units
        self._runtime = weakref.ref(runtime)
        self._kept: dict[str, Unit] = {}  # resident units that wait for backward
        self._undo: list[Callable[[], None]] = []
        self.matrices: list[StreamedRows] = []
        for key, slices in units.matrices.items():
            rows = StreamedRows(weakref.proxy(runtime), units.matrix(key), slices)
            self.matrices.append(rows)
            self._undo += [slice_module(module, rows) for module in units.modules[key]]
        for unit in units.layout.units:
            for module in units.modules[unit.key] if unit.kind is not Kind.SLICE else ():
                if unit.kind is Kind.BLOCK:
                    self._undo.append(stream_block(module, unit, runtime))
                else:
                    before = module.register_forward_pre_hook(self._fetcher(unit, weakref.ref(runtime)))
                    after = module.register_forward_hook(self._releaser(unit), always_call=True)
                    self._undo += [before.remove, after.remove]
            for part, parameter in units.pairs(unit):
                if part.trained:
                    collect = _collector(weakref.ref(runtime), unit, part)
                    self._undo.append(parameter.register_post_accumulate_grad_hook(collect).remove)
        self._undo.append(watch_gradients(units.names, runtime))
        self._undo.append(weights.watch_rest())
        before = model.register_forward_pre_hook(runtime.model_begins)
        after = model.register_forward_hook(runtime.model_ends)
        self.outside = OutsideUse(model, weights, self)
        guards = ModelGuards(model, units.names, contents, runtime)
        self._undo += [before.remove, after.remove, self.outside.close, guards.close]

    @property
    def _inside(self) -> list[Unit]:
        return self._runtime().at_work.inside

    @property
    def model_passes(self) -> list[list[Unit] | None]:
        """Forward passes of the model in progress in the micro-batch at work (see `KeptForBackward`)."""
        return self._runtime().at_work.model_passes

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def left_over_of(self, runtime: HookedRuntime, unit: Unit) -> None:
        """Hand over the gradients of a unit that no hook has handed over."""
        for part, parameter in self._units.pairs(unit):
            if part.trained and stored_gradient(parameter) is not None:
                _hand_over(runtime, part, parameter)

    def left_over(self, runtime: HookedRuntime) -> None:
        """Hand over, at the end of backward, the gradients that no hook has handed over."""
        with torch._C.DisableTorchFunctionSubclass():  # bypasses the placeholders of parameters at rest
            for unit in self._units.layout.units:
                self.left_over_of(runtime, unit)
        for rows in self.matrices:
            rows.end_of_backward()

    @whole
    def give_back_kept(self) -> None:
        """Give back the units that were kept for a backward pass, which has ended or will not come."""
        while self._kept:
            self._weights.give_back(self._kept.popitem()[1], lend=True)

    def forget(self) -> None:
        """Drop the stored gradients of a step that is given up."""
        for owned in self._units.parameters.values():
            for parameter in owned:
                forget_gradient(parameter)

    def forget_kept(self) -> None:
        """Forget the units that were kept; the caller gives them back."""
        self._kept.clear()

    def end_cut_off(self) -> None:
        """End the uses of a forward pass that KeyboardInterrupt has ended, for which torch calls no hooks. No pass may
        be in progress."""
        self.outside.end_cut_off()
        self._end_inside(0)
        for unit in self._units.layout.units:
            while unit.kind is Kind.BLOCK and self._weights.is_in_use(unit):
                self._weights.give_back(unit)

    def _end_inside(self, depth: int) -> None:
        """End the uses of units whose forward passes are nested deeper than `depth`, the innermost first."""
        while len(self._inside) > depth:
            unit = self._inside.pop()
            self._profile.leaves(unit)
            self._release(unit)

    def _fetcher(self, unit: Unit, runtime: weakref.ref[HookedRuntime]) -> Callable[..., None]:
        """Return the hook that begins a unit's use before the forward pass of its module."""

        @whole
        def fetch(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                if torch.is_grad_enabled():
                    runtime().backward_begins()  # not within a reentrant checkpoint's nested one, which follows
                if not self._weights.is_copied(unit):
                    runtime().require_not_updated(unit)
            if unit.kind is Kind.LOOKED_UP and torch.is_grad_enabled():
                runtime().reaches(unit)
            self._weights.take(unit)
            self._inside.append(unit)
            self._profile.enters(unit)

        return fetch

    def _releaser(self, unit: Unit) -> Callable[..., None]:
        """Return the hook that ends this use. It raises NotStreamable if the pass has changed the weights."""

        @whole
        def release(*_: Any) -> None:
            if self._inside and self._inside[-1] is unit:  # else its fetch has failed
                self._inside.pop()
                self._profile.leaves(unit)
                refusal = self._weights.refusal_of_change(unit)
                self._release(unit)
                if refusal is not None:
                    raise refusal

        return release

    def _release(self, unit: Unit) -> None:
        """Give a unit back after its forward pass. Resident units stay for backward, if there will be one."""
        if unit.kind is Kind.RESIDENT and torch.is_grad_enabled():
            self.keep(unit)
        else:
            self._weights.give_back(unit, lend=unit.kind is Kind.RESIDENT)

    def keep(self, unit: Unit) -> None:
        """Let a use of the unit last until backward has ended."""
        if unit.key in self._kept:
            self._weights.give_back(unit, lend=True)
        else:
            self._kept[unit.key] = unit

    @contextlib.contextmanager
    def left_by(self, stop: type[BaseException]) -> Iterator[None]:
        """Return a context that `stop` may leave in the middle of modules' forward passes, whose uses end with it."""
        depth = len(self._inside)
        try:
            yield
        except stop:
            self._end_inside(depth)
            raise


def _collector(engine: weakref.ref[HookedRuntime], unit: Unit, part: Part) -> Callable[[nn.Parameter], None]:
    """Return the hook that autograd calls with a parameter whose gradient it has accumulated."""

    @whole
    def collect(parameter: nn.Parameter) -> None:
        runtime = engine()
        if unit.kind is not Kind.BLOCK:
            try:
                runtime.backward_begins()
            except BaseException:
                forget_gradient(parameter)  # the pass is refused, and the next gradient would be added to it
                raise
        if not runtime.comes_again(unit):
            _hand_over(runtime, part, parameter)

    return collect


def _hand_over(runtime: HookedRuntime, part: Part, parameter: nn.Parameter) -> None:
    """Take a parameter's gradient from autograd, and pass it to the engine. Raises NotStreamable if it is gone."""
    gradient = stored_gradient(parameter)
    if gradient is None:
        raise NotStreamable(
            f"a hook of the training loop took the gradient of {part.name} before the engine could use it: remove "
            "that hook"
        )
    forget_gradient(parameter)
    runtime.arrive(part, gradient)

"""Forward and backward passes of an engine's model: the methods that its hooks and its blocks call."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import torch
from torch import nn

from memascend.engine.arguments import tensors_in
from memascend.engine.block_runtime import PassInProgress
from memascend.engine.errors import NotStreamable
from memascend.engine.gradient_access import GradientAccess
from memascend.engine.layout import Part, Unit
from memascend.engine.recompute import OldGraph
from memascend.storage.interrupts import whole


class PassRuntime(GradientAccess):
    """The layer of the engine that follows passes: which units are needed when, and where gradients go.

    Autograd's hooks call these methods in the middle of a user's `backward()`, also in nested backward passes
    (reentrant checkpoints). So the state of a pass is not Python's stack but `at_work`: a backward pass begins with the
    first gradient of a result or the first block that is recomputed, and ends with the callback that autograd's engine
    calls last.
    """

    @whole
    def model_begins(self, *_: Any) -> None:
        """Begin a forward pass of the model; with `implicit_step` (LoHan, Fig. 4b) it first completes the previous
        step."""
        alone = self._together is None and torch._C._current_graph_task_id() == -1
        if alone and self._in_forward and not _is_nested(self.model):
            self._hooks.end_cut_off()
        self._require_usable()
        self._in_forward = True
        if not torch.is_grad_enabled():
            for running in (self._looking, self._together):
                if running is not None:
                    running.footprint.evaluated = True
            self._stream.read_ahead(self._pattern[: len(self._pattern) // 2])
            return
        if self._together is not None:
            return
        if self.options.implicit_step and self._passes >= self.options.accumulate:
            self.finish_step()
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Count a forward pass with a graph, and start reading ahead. Raises NotStreamable if a parameter that was
        frozen when the engine was created requires a gradient now."""
        if (unfrozen := next((name for p, name in self._frozen.items() if p.requires_grad), None)) is not None:
            raise NotStreamable(
                f"{unfrozen} was frozen when the optimizer was created, and is trainable now: announce that when it is "
                "created (unfreezes=True), in a new folder with the model's state_dict()"
            )
        self._visits = []
        self._forwards += 1
        self.at_work.begun = self._forwards
        if self._looking is not None:
            self._looking.routes.append([])
        self._profile.begin_forward()
        self._stream.read_ahead(self._pattern)

    @whole
    def model_ends(self, _: nn.Module, __: Any, results: Any) -> None:
        self._in_forward = False
        if not torch.is_grad_enabled():
            self._stream.release_idle()
            return
        # These hooks begin the backward pass in the user's own backward(), before the nested one that a checkpoint
        # around several blocks runs.
        engine, generation = weakref.ref(self), self.generation

        def begin(_: torch.Tensor) -> None:
            runtime = engine()
            assert runtime is not None
            runtime.backward_begins(generation)

        for result in tensors_in(results):
            if result.requires_grad:
                result.register_hook(begin)  # type: ignore[no-untyped-call]
        together = self._together
        if together is not None:
            together.forwards_ended += 1
        if together is None or together.forwards_ended == together.count:
            self._profile.end_forward(passes=1 if together is None else together.count)
        first = together is None or together.forwards_ended == 1
        if first and not self._waits and self._passes + self._side_by_side == self.options.accumulate:
            self.updates.expect()

    @whole
    def entered(self, unit: Unit) -> None:
        uses = self.at_work.uses
        uses[unit.key] = uses.get(unit.key, 0) + 1
        if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes the block within the user's backward pass
            if self._together is not None:
                raise NotStreamable(
                    f"{unit.key} is recomputed by a checkpoint around it: run micro-batches one after the other "
                    "(order='horizontal'), or remove the checkpoint"
                )
            if self._looking is not None:
                self._looking.why = "blocks are computed again by checkpoints around them"
            self.backward_begins()
        if self._visits is None:  # a part of the model was called without the model's own forward
            self._begin_pass()
        if self._together is None:
            assert self._visits is not None
            self._visits.append(unit.key)

    @whole
    def left(self, unit: Unit, by: PassInProgress) -> None:
        by.uses[unit.key] = max(0, by.uses.get(unit.key, 0) - 1)

    @whole
    def backward_begins(self, generation: int | None = None) -> None:
        """Begin the user's backward pass, unless it has begun; `_backward_ends` follows unless an error occurs.
        `generation`: that of the weights with which its graph was made. Raises OldGraph if they were replaced since,
        and RuntimeError for a backward pass that the step does not have."""
        if generation not in (None, self.generation):
            raise OldGraph("the model")
        if not self.at_work.backward_begun:
            if self._together is None and self._passes >= self.options.accumulate:
                raise RuntimeError(
                    f"backward pass {self._passes + 1} of a step that was set to have {self.options.accumulate}: call "
                    "optimizer.step() before it, or set their number per step (accumulate=)"
                )
            if self.at_work.ended:
                raise RuntimeError(
                    "second backward pass in one micro-batch: add up its losses and call backward() once, or run "
                    "micro-batches one after the other (order='horizontal')"
                )
            self.at_work.backward_begun, self.at_work.got_gradients = True, False
            if self._together is None or self._together.backward_begins():
                self.gradients.begin_pass(first=self._passes == 0)
                self.updates.zeroed = self.gradients.zeroed
                self.updates.scale = self.scale
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    @whole
    def recomputes(self, unit: Unit) -> None:
        self.backward_begins()
        if self._visits is not None and self._together is None:
            self._visits.append(unit.key)

    @whole
    def visited(self, unit: Unit) -> None:
        if self.comes_again(unit):
            return
        self._hooks.left_over_of(self, unit)
        if self._together is not None:
            if not self._together.all_visited(unit, self.at_work.number):
                return
            for part, gradient in self._together.sums.take(unit):
                self._use(part, gradient)
        self.updates.end_unit(unit, wait=self._waits or not self._is_last, last=self._is_last)

    def comes_again(self, unit: Unit) -> bool:
        if self.visits.is_nested_in(unit):
            return True  # a checkpoint inside of the block: the rest of its gradient follows
        return self.at_work.uses.get(unit.key, 0) > 1  # the same layer is used more than once

    def require_not_updated(self, unit: Unit) -> None:
        if self.updates.has_begun(unit):
            raise NotStreamable(
                f"{unit.key} would have to be computed again within one backward pass, after the update of its weights "
                "has begun: delay updates (wait=True when the optimizer is created), and use checkpoints with "
                "use_reentrant=False"
            )

    @whole
    def arrive(self, part: Part, gradient: torch.Tensor) -> None:
        """Take a part's complete gradient of this pass. Raises NotStreamable for a sparse gradient."""
        if gradient.layout != torch.strided:
            raise NotStreamable(f"the gradient of {part.name} is sparse: use a dense one (sparse=False)")
        self.at_work.got_gradients = True
        if self._together is not None:
            total = self._together.sums.add(part, gradient, self.at_work.number)
            if total is None:
                return
            gradient = total
        self._use(part, gradient)

    def _use(self, part: Part, gradient: torch.Tensor) -> None:
        """Pass a part's gradient on to the updates."""
        wait, last = self._waits or not self._is_last, self._is_last
        self.updates.arrive(part, gradient, wait=wait, last=last, is_needed=self._is_to_compute)

    def _is_to_compute(self, key: str) -> bool:
        """Return whether the pass at work has yet to recompute a block, for which its weights must not change."""
        visit = self.visits.open
        if visit is None or visit.unit.key != key:
            return self.at_work.uses.get(key, 0) > 0
        return visit.is_to_compute

    @whole
    def _backward_ends(self) -> None:
        """Called by autograd when the user's backward pass ends: hand over the gradients that are left, and end the
        pass unless it computed no gradient of a parameter."""
        self.visits.end()
        self._hooks.left_over(self)
        self.at_work.backward_begun = False
        if self._together is not None:
            self.at_work.ended = self.at_work.got_gradients
            return
        self._profile.end_backward()
        if not self.at_work.got_gradients:  # torch.autograd.grad of inputs or activations does not count as a pass
            self._visits = None
            return
        self._passes_end()

    def _passes_end(self) -> None:
        """Finish a backward pass, or all backward passes that were running side by side."""
        self.updates.end_pass(wait=self._waits or not self._is_last, last=self._is_last)
        self.gradients.whole = frozenset(self.updates.arrived)
        self._passes += self._side_by_side
        self._pattern, self._visits = self._visits or [], None
        if self._passes >= self.options.accumulate:  # before that, the graph of another pass may need the kept units
            self._hooks.give_back_kept()


def _is_nested(model: nn.Module) -> bool:
    """Return whether the model's forward pass is running inside of another forward pass of the same model."""
    frame: types.FrameType | None = sys._getframe()
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls > 1

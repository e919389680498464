"""Vertical accumulation: all micro-batches of a step pass through a block before any of them enters the next one.

    horizontal    micro-batch 0: b0 b1 b2, back b2 b1 b0; micro-batch 1: b0 b1 b2, back b2 b1 b0; ...
    vertical      b0 of all, b1 of all, b2 of all, back b2 of all, b1 of all, b0 of all

So weights are read twice per step, whatever the number of micro-batches, and a block's gradient is summed in memory and
used once; gradients of earlier micro-batches need not wait on the tier. Source: GreedySnake (arXiv 2512.17570).

A model's forward and backward passes are called by the user's loop. Each micro-batch therefore runs in its own thread,
one at a time: when it reaches a unit of weights (`Lanes.reaches`) it yields, and the micro-batch that is furthest
behind continues, among several the one with the lowest number. Each backward pass is autograd's own, over its own
graph, in the thread that called it, and a parameter's gradients arrive in the order of the micro-batches, so that
results are equal to the bit.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memascend.engine.device import Generators
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Part, Unit
from memascend.engine.module_state import ModuleState
from memascend.ops.threads import end_team

ORDERS = ("vertical", "horizontal")
Place = tuple[int, int]  # index on a route; for a matrix that is streamed in slices, also the slice's number
_START: Place = (-1, 0)


# -- whose turn it is --------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends a micro-batch's thread after another micro-batch has failed. It derives from BaseException, so that
    `except Exception` in the loop does not catch it."""


class Route:
    """The sequence of units that a micro-batch reaches in forward and backward."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Route) and self._keys == other._keys

    def after(self, place: Place, key: str, number: int) -> Place:
        """Return the next place of `key` on the route, at `place` or later. Raises NotStreamable without one."""
        index, last = place
        if index >= 0 and self._keys[index] == key and number >= last:
            return index, number
        for later in range(index + 1, len(self._keys)):
            if self._keys[later] == key:
                return later, number
        raise NotStreamable(
            f"a micro-batch runs {key} in another order than those of the first step: run micro-batches one after the "
            "other (order='horizontal')"
        )


class _Lane:
    """One micro-batch, and the thread that it runs in."""

    def __init__(self, number: int, run: Callable[[], Any]) -> None:
        self.number, self.run = number, run
        self.place, self.done = _START, False
        self.result: Any = None
        self.error: BaseException | None = None
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None


class Lanes:
    """Micro-batches that take turns. `run` is called once, by the thread that waits for them.

    `enter(number)` is called before a micro-batch continues, and `leave()` before one continues from another place than
    the previous one.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[], Any]],
        route: Route,
        *,
        enter: Callable[[int], None],
        leave: Callable[[], None],
    ) -> None:
        self._lanes = [_Lane(number, run) for number, run in enumerate(runs)]
        self._route, self._enter, self._leave = route, enter, leave
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running: _Lane | None = None
        self._stopping = False

    def run(self) -> list[Any]:
        """Run all micro-batches and return their results. Raises the first error; no thread is running then."""
        end_team()  # release this thread's kernel threads while it waits
        try:
            last = _START
            while left := [lane for lane in self._lanes if not lane.done]:
                place = min(lane.place for lane in left)
                if place != last:
                    self._leave()
                last = place
                for lane in left:
                    if lane.place == place:
                        self._go_on(lane)
            return [lane.result for lane in self._lanes]
        finally:
            self._stop()

    def reaches(self, key: str, number: int = 0) -> None:
        """Note that the running micro-batch has reached a unit, and wait until it is its turn. Raises NotStreamable in
        a thread that the function has started, and Stopped after a failure."""
        lane = self._running
        if lane is None or lane.thread is not threading.current_thread():
            raise NotStreamable(
                f"{key} is used in a thread started by the function of a micro-batch: run micro-batches one after the "
                "other (order='horizontal')"
            )
        if self._stopping:
            raise Stopped
        place = self._route.after(lane.place, key, number)
        if place != lane.place:
            lane.place = place
            end_team()
            self._back.put(None)
            lane.turn.get()
            if self._stopping:
                raise Stopped

    def _go_on(self, lane: _Lane) -> None:
        """Let a micro-batch run until it yields or ends; its first turn starts its thread. Raises its error."""
        self._enter(lane.number)
        if lane.thread is None:
            context, settings = contextvars.copy_context(), _thread_settings()
            lane.thread = threading.Thread(
                target=context.run,
                args=(self._work, lane, settings),
                name=f"memascend-micro-batch-{lane.number}",
                daemon=True,
            )
            lane.thread.start()
        self._running = lane
        lane.turn.put(None)
        self._back.get()
        self._running = None
        if lane.error is not None:
            raise lane.error

    def _work(self, lane: _Lane, settings: contextlib.ExitStack) -> None:
        """The target of a micro-batch's thread: run it, from its first turn on."""
        lane.turn.get()
        try:
            if self._stopping:
                raise Stopped
            with settings:
                lane.result = lane.run()
        except BaseException as error:
            lane.error = error
        end_team()
        lane.done = True
        lane.run = None
        self._back.put(None)

    def _stop(self) -> None:
        """End all threads, one after the other, the running one first: each ends at the next unit that it reaches."""
        self._stopping = True
        for lane in sorted(self._lanes, key=lambda lane: lane is not self._running):
            if lane.thread is None:
                continue
            if lane is not self._running and not lane.done:
                self._enter(lane.number)
                self._running = lane
            lane.turn.put(None)
            while lane.thread.is_alive():
                with contextlib.suppress(KeyboardInterrupt):  # a repeated Ctrl-C: the thread is ending already
                    lane.thread.join()
        self._running = None


def _thread_settings() -> contextlib.ExitStack:
    """Return a context in which another thread has this thread's grad mode and autocast settings."""
    stack = _Settings()
    stack.grad = torch.is_grad_enabled()
    kinds = {"cpu", torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"}
    stack.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    return stack


class _Settings(contextlib.ExitStack):
    """Context that sets the grad mode and autocast settings recorded in it."""

    grad: bool
    autocast: Sequence[tuple[str, torch.dtype, bool]]

    def __enter__(self) -> contextlib.ExitStack:
        super().__enter__()
        self.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype, enabled in self.autocast:
            if enabled:
                self.enter_context(torch.autocast(kind, dtype=dtype))
        return self


def cannot_be_carried_over() -> str | None:
    """Return a description of a torch setting of the calling thread that another thread would not have; None if there
    is none."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are switched off around it"
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
        return "a torch function or dispatch mode is active around it"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors are active around it"
    return None


# -- state shared by all micro-batches ---------------------------------------------------------------------------------


class SummedGradients:
    """Sums of the gradients of micro-batches side by side, added in the order of their numbers, in the dtype in which
    gradients wait on the tier."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = count, dtype
        # By part: the part, its sum, the number of the last micro-batch added, and how many were added.
        self._sums: dict[tuple[str, int], tuple[Part, torch.Tensor, int, int]] = {}

    def add(self, part: Part, gradient: torch.Tensor, number: int) -> torch.Tensor | None:
        """Add a micro-batch's gradient of a part; return the flat sum once all have come, otherwise None. Raises
        NotStreamable for gradients in another order than that of the micro-batches."""
        flat = gradient.detach().reshape(-1)
        _, total, last, came = self._sums.get(part.key, (part, None, -1, 0))
        if last >= number:
            raise NotStreamable(
                f"gradients of {part.name} arrive in another order than the micro-batches: run micro-batches one after "
                "the other (order='horizontal')"
            )
        if total is None:  # a copy, since autograd may share this memory with other gradients
            total = flat.to(self._dtype, copy=True)
        else:
            total.add_(flat.to(self._dtype))
        if came + 1 == self._count:
            self._sums.pop(part.key, None)
            return total
        self._sums[part.key] = part, total, number, came + 1
        return None

    def take(self, unit: Unit | None = None) -> Iterator[tuple[Part, torch.Tensor]]:
        """Remove and yield the incomplete sums of a unit (None: of all units): no more gradients will come for them."""
        keys = list(self._sums) if unit is None else [part.key for part in unit.parts if part.key in self._sums]
        for key in keys:
            part, total, *_ = self._sums.pop(key)
            yield part, total


class ForwardFootprint:
    """Side effects of forward passes: attributes, buffers, hooks and random number generators that they change.

    Micro-batches side by side would see each other's changes. The running averages of torch's batch norms are allowed:
    each module sees the micro-batches in order, and in training only the module itself reads them, unless the function
    also evaluates the model.
    """

    evaluated = False  # whether the model was called without a graph

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._numbers, self._device = Generators(device), device
        self._before = ModuleState(list(model.modules()))
        self._hooks = self._hooks_now()

    def _hooks_now(self) -> list[list[Any]]:
        """Return the forward hooks of all modules, without those marked `is_of_any_pass`."""
        return [
            [hook for hook in kind.values() if not getattr(hook, "is_of_any_pass", False)]
            for module in self._model.modules()
            for kind in (module._forward_pre_hooks, module._forward_hooks)
        ]

    def found_midway(self) -> str | None:
        """Return a description of a change that a forward pass may undo at its end, or None. Call it in the middle of
        the pass."""
        if self._hooks_now() != self._hooks:
            return "the forward pass hooks modules, and would see the other micro-batches"
        for owner, name in self._before.changed_attributes():
            return f"the forward pass changes {self._name(owner, name)}, which the micro-batches would share"
        return None

    def found(self) -> str | None:
        """Return a description of what was changed or drawn since this object was created, or None."""
        if self._numbers != Generators(self._device) or self._before.drawn():
            return "the forward pass draws random numbers (such as dropout's), whose order would be another one"
        fine = {
            id(buffer)
            for module in self._model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and not self.evaluated
            for buffer in module._buffers.values()
        }
        for iterator in self._before.iterators:
            return (
                f"{self._name(None, iterator)} is an iterator ({type(iterator).__name__}), from which they would take "
                "in another order"
            )
        for owner, what in self._before.changes():
            if id(what) not in fine:
                return f"the forward pass changes {self._name(owner, what)}, which the micro-batches would share"
        return None

    def _name(self, owner: Any, what: Any) -> str:
        """Return words for the attribute that a change concerns."""
        for name, module in self._model.named_modules():
            of = f"of {name}" if name else "of the model"
            if owner is vars(module) or owner is module._buffers:
                return f"the attribute {what} {of}"
            for key, value in [*module._buffers.items(), *vars(module).items()]:
                if value is what:
                    return f"the attribute {key} {of}"
        return "what an attribute of a module refers to"

"""Recomputation of streamed blocks: forward keeps only a block's inputs; backward fetches its weights and reruns it.

A block's forward pass runs with a graph, as in training in memory; the tensors that autograd saves are replaced by
handles (`torch.autograd.graph.saved_tensors_hooks`). The first handle that backward unpacks, or the first gradient that
reaches an output of the block, begins the block's *visit*: the weights are fetched, the block is recomputed from its
inputs, and the tensors saved by the recomputation are returned for the handles, in the same order. The visit ends when
another block's begins, or with the backward pass. So values that leave a block other than by its result (attributes,
hooks, objects) are on the graph too, and gradients are autograd's own. The idea is that of
torch.utils.checkpoint(use_reentrant=False); the difference is what a visit owns: the weights' slot, inputs that wait on
a tier, and results of products that were kept.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from memascend.engine.arguments import Arguments, tensors_in
from memascend.engine.block_forward import BlockForward
from memascend.engine.block_runtime import BlockRuntime
from memascend.engine.device import Generators
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Unit
from memascend.engine.module_state import ModuleState, ValuesAreGone, undisturbed
from memascend.engine.operators import Taken
from memascend.engine.samples import Samples, is_compared
from memascend.engine.saved_tensors import Handle, left_by_ctrl_c, memory_of, meta, save_on_a_node, words


class OldGraph(RuntimeError):
    """Raised when backward uses a graph whose weights have been replaced since its forward pass."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"backward goes through {where} over a graph from before the last optimizer.step() or zero_grad(), whose "
            "weights are gone: compute the loss again after it, or call both backward() before step() (accumulate=2)"
        )


class _Complete(BaseException):
    """Ends a recomputation that has saved all tensors that backward needs. It derives from BaseException, so that
    `except Exception` in the block does not catch it."""


def _no_node() -> None:
    return None


class BlockPass:
    """One forward pass of a block with a graph, and its visit in backward. Lives as long as any of its handles.

    Why handles instead of the tensors: the tensors that autograd saves would keep a block's weights and activations in
    memory until backward. Why handles are numbered: a recomputation saves the same tensors in the same order, provided
    that nothing it depends on has changed; where shape, dtype, device or sampled values differ, backward raises an
    error, since gradients would be silently wrong. Why the recomputation ends with an exception: all that follows the
    last needed tensor would be computed in vain.
    """

    _left = _entered = False

    def __init__(self, streamed: StreamedForward) -> None:
        self._streamed, self.unit, self._runtime = streamed, streamed.unit, streamed.runtime
        self._of = self._runtime.at_work
        self._device = self._runtime.weights.device
        self._generators = Generators(self._device)
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._handles: list[weakref.ref[Handle]] = []
        self._values: dict[int, torch.Tensor] = {}  # recomputed tensors of the visit, by the number of their handle
        # Tensors that the running autograd.Function has already been given. Its node is referenced weakly, since it
        # holds our handles: an error may leave the visit open, and no garbage collector would find that cycle.
        self._had: tuple[Callable[[], Any], dict[int, torch.Tensor]] = _no_node, {}
        self._in_forward = True
        self._computed_in = -1  # the backward pass in which the block was computed again last
        self.backward = -1  # autograd's number of the backward pass that the visit belongs to
        self._since = math.inf

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's forward pass, keep what its recomputation needs, and return its results. Raises NotStreamable
        for arguments that cannot be copied, and for changes that a recomputation would not repeat."""
        runtime, unit = self._runtime, self.unit
        self._generation = runtime.generation
        try:
            self._arguments = Arguments(args, kwargs)
        except TypeError as error:
            raise NotStreamable(f"{unit.key}: {error}: hand over a dataclass, a dict or a list") from error
        runtime.reaches(unit)
        runtime.weights.take(unit)
        runtime.in_block += 1
        try:
            runtime.entered(unit)
            self._entered = True
            tensors, modules = self._arguments.tensors, self._streamed.modules
            self._call = _kind_of_call(modules, tensors)
            self._streamed.passes[self._call] += 1
            self._samples = Samples() if is_compared(self._streamed.passes[self._call]) else None
            self._needed, self._changed = [t.requires_grad for t in tensors], set(range(len(tensors)))
            self._products = 0
            self._on_tier: tuple[int, Any] | None = None
            before = ModuleState(modules)
            inputs = self._inputs_before(tensors)
            self._source: Callable[[], list[torch.Tensor]] = lambda: [kept for kept, _ in inputs]
            self._entry, self._taken = before, Taken()
            began = runtime.now()
            with runtime.taking(unit, tensors) as taken, torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                results = self._streamed.call(args, kwargs)
            self._streamed.require_unchanged()
            runtime.passed(unit, runtime.now() - began, math.inf)
        finally:
            self._in_forward = False
            runtime.in_block -= 1
            runtime.weights.give_back(unit)
        self._forget_casts()
        self._values, self._source = {}, list
        if self._handles:
            before.forget_unchanged()
            self._keep(self._inputs_after(tensors, inputs), taken)
            self._await_gradients(results, tensors)
        self._arguments.drop_tensors()
        self._streamed.require_no_view()
        return results

    def _forget_casts(self) -> None:
        """Clear autocast's copies of this block's weights, which it would keep until the outermost autocast ends."""
        if self._autocast[0]:
            torch.clear_autocast_cache()

    def _inputs_before(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int | None]]:
        """Return (the tensor that recomputation starts from, version) of each input: a copy where the block may change
        it in place. The version is None for inference tensors, which have none."""
        copied = self._streamed.changed_inputs.get(self._call, range(len(tensors)))
        return [
            (t.detach().clone() if n in copied else t.detach(), None if t.is_inference() else t._version)
            for n, t in enumerate(tensors)
        ]

    def _inputs_after(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[tuple[torch.Tensor, int | None]]
    ) -> list[torch.Tensor]:
        """Return the tensors that recomputation starts from: the inputs themselves, or their copies where the block has
        changed them in place. Raises NotStreamable if such a change was not expected, or concerns shared memory."""
        changed = {n for n, (_, version) in enumerate(inputs) if version is not None and tensors[n]._version != version}
        known = self._streamed.changed_inputs.setdefault(self._call, changed)
        if not changed <= known:
            raise NotStreamable(
                f"{self.unit.key} changes an argument in place in this pass and did not in the first one like it, and "
                "backward would compute it again from the changed one: use the out-of-place operation"
            )
        memory = [memory_of(t) for t in tensors]
        if any(memory.count(memory[n]) > 1 for n in changed):
            raise NotStreamable(
                f"{self.unit.key} changes an argument in place that shares its memory with another one: hand over a "
                "copy of one of them (.clone()), or use the out-of-place operation"
            )
        self._changed = changed
        return [kept if n in changed else tensors[n].detach() for n, (kept, _) in enumerate(inputs)]

    def _keep(self, tensors: list[torch.Tensor], taken: Taken) -> None:
        """Keep what the recomputation needs: the inputs, of which the first floating-point one may go to the tier
        (`keep_input`), and the results of products that were taken."""
        self._taken = taken
        first = next((n for n, t in enumerate(tensors) if t.is_floating_point()), None)
        if first is not None:
            kept = self._runtime.keep_input(tensors[first])
            if kept is not tensors[first]:
                self._on_tier = first, kept
                tensors = [*tensors[:first], *tensors[first + 1 :]]
        # Detached, since tensors of the graph would keep the graph alive through our handles.
        products = [each.detach() for each in taken.tensors()]
        self._products = len(products)
        saved: Any = save_on_a_node([*tensors, *products])
        self._source = lambda: list(saved.grad_fn.saved_tensors)

    def _await_gradients(self, results: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Begin the visit with the first gradient of a result, before any node of the block reads a parameter."""
        passed = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            if (owner := passed()) is not None:
                owner._runtime.visits.begin(owner)

        for result in tensors_in(results):
            if result.requires_grad and not any(result is each for each in inputs):
                result.register_hook(begin)  # type: ignore[no-untyped-call]

    def _pack(self, tensor: torch.Tensor) -> Handle | torch.Tensor:
        """Return the handle that autograd gets in place of a tensor that it saves."""
        if not self._in_forward:
            return left_by_ctrl_c(tensor)
        handle = Handle(self, len(self._handles), tensor)
        if self._samples is not None:
            self._samples.add(tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Return a context with the random number generators and autocast settings of the forward pass."""
        enabled, dtype = self._autocast
        with self._generators.again(), torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
            yield

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_visit(self) -> None:
        """Fetch the weights. The tensors that backward needs are recomputed when the first of them is unpacked.

        Raises OldGraph, and NotStreamable for the graph of another micro-batch."""
        if self._generation != self._runtime.generation:
            raise OldGraph(self.unit.key)
        if self._of is not self._runtime.at_work:
            raise NotStreamable(
                f"backward goes through {self.unit.key} over the graph of another micro-batch: call backward() in the "
                "function that computes the loss, and share no graph between micro-batches"
            )
        self._runtime.reaches(self.unit)
        self._runtime.recomputes(self.unit)
        self._runtime.weights.take(self.unit)
        self.backward = torch._C._current_graph_task_id()

    def end_visit(self) -> None:
        """End the visit: report its time and the end of the block's backward, and give the weights back."""
        if self._since != math.inf:
            self._runtime.passed(self.unit, math.inf, self._runtime.now() - self._since)
        self.forget_visit()
        try:
            self._runtime.visited(self.unit)
        finally:
            self._leave()
            self._runtime.weights.give_back(self.unit)

    @property
    def is_to_compute(self) -> bool:
        """Whether backward needs tensors of the block that are not recomputed yet."""
        return self._computed_in != self.backward and any(handle() is not None for handle in self._handles)

    def forget_visit(self) -> None:
        """Drop the recomputed tensors."""
        self._values, self._had, self._since = {}, (_no_node, {}), math.inf

    def value(self, number: int) -> torch.Tensor:
        """Return the tensor that the forward pass saved as `number`, recomputed, and drop this object's reference to
        it. Raises NotStreamable for a gradient of a gradient."""
        if self._in_forward:  # the block computes a gradient in its forward pass: its weights are in memory
            if number not in self._values:
                self._recompute()
            return self._values.pop(number)
        if torch.is_grad_enabled():
            raise NotStreamable(
                f"a gradient of a gradient goes through {self.unit.key}, whose weights are only there for one backward "
                "pass: remove create_graph=True, and in the backward of an autograd.Function call autograd outside of "
                "enable_grad()"
            )
        if self.backward != torch._C._current_graph_task_id() and self._runtime.visits.open is self:
            self._runtime.visits.end()  # the open visit belongs to another backward pass over the same graph
        self._runtime.visits.begin(self)
        node = torch._C._current_autograd_node()
        if not isinstance(node, BackwardCFunction):
            self._had = _no_node, {}
        elif self._had[0]() is not node:
            self._had = weakref.ref(node), {}
        elif number in self._had[1]:  # its backward reads ctx.saved_tensors a second time
            return self._had[1][number]
        if number not in self._values:
            self._recompute()
        found = self._values.pop(number)
        if isinstance(node, BackwardCFunction):
            self._had[1][number] = found
        return found

    def _recompute(self) -> None:
        """Run the block again until it has saved the last tensor that backward needs, and store those tensors in
        `_values`. Raises RuntimeError if the block computes something else, and NotStreamable if it cannot be
        recomputed."""
        if not self._in_forward and self._computed_in == self.backward:
            self._runtime.require_not_updated(self.unit)
        self._computed_in, self._values = self.backward, {}
        last = max((n for n, each in enumerate(self._handles) if each() is not None), default=-1)
        args, kwargs = self._arguments.rebuilt(self._inputs_again())
        saved: list[int] = [0]
        is_over = False

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if is_over:
                return left_by_ctrl_c(tensor)
            number, saved[0] = saved[0], saved[0] + 1
            tensor = tensor.detach()
            handle = self._handles[number]() if number < len(self._handles) else None
            if handle is not None:
                if handle.meta != meta(tensor):
                    raise self._differs(f"tensor {number} of what autograd saves is {words(tensor)}")
                if self._samples is not None and self._samples.differ(number, tensor):
                    raise self._differs(f"tensor {number} of what autograd saves, {words(tensor)}, has other values")
                self._values[number] = tensor
            if number >= last:
                raise _Complete
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        unseen = _disable_current_modes() if self._in_forward else contextlib.nullcontext()
        again = undisturbed(self._streamed.modules, self._entry)
        replaying = self._runtime.replaying(self.unit, self._taken)  # replays nothing in forward: none were taken yet
        try:
            self._runtime.in_block += 1
            left = self._runtime.left_by(_Complete)
            with unseen, torch.enable_grad(), self._as_in_forward(), again, replaying, left, hooks:
                self._streamed.call(args, kwargs)
        except _Complete:
            pass
        except ValuesAreGone as gone:
            raise NotStreamable(
                f"{self.unit.key} has a buffer, or an attribute's tensor or array, {gone}, that was changed in place "
                "between the forward pass and backward, which would compute the block again with the new values: "
                "change it after backward()"
            ) from gone
        else:
            raise self._differs(f"autograd saves {saved[0]} tensors of it, where it saved {len(self._handles)}")
        finally:
            is_over = True
            self._runtime.in_block -= 1
            self._forget_casts()
            self._taken.tensors()  # drops them: autograd holds those that it needs
        self._since = self._runtime.now()

    def _inputs_again(self) -> list[torch.Tensor]:
        """Return the inputs for a recomputation, as new tensors with the `requires_grad` of the forward pass. Raises
        NotStreamable if one that waited in memory was changed in place."""
        try:
            tensors = self._source()
        except RuntimeError as error:
            if "inplace operation" not in str(error):  # only the error of torch's version check is explained below
                raise
            raise NotStreamable(
                f"an input of {self.unit.key} that waits in memory was changed in place after the block had it: use "
                f"the out-of-place operation, or let inputs wait on the SSD (checkpoints='tier'): {error}"
            ) from error
        if self._products:
            self._taken.bring_back(tensors[-self._products :])
            del tensors[-self._products :]
        if self._on_tier is not None:
            first, kept = self._on_tier
            tensors.insert(first, self._runtime.bring_back(kept))
        found = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, self._needed, strict=True)]
        with torch.enable_grad():  # an input that the block changes in place must be a copy, and not a leaf
            return [t.clone() if n in self._changed else t for n, t in enumerate(found)]

    def _differs(self, what: str) -> RuntimeError:
        """Return the error for a recomputation that does not repeat the forward pass."""
        return RuntimeError(
            f"{self.unit.key} computes something else in its recomputation: {what}. Its forward pass must depend on "
            "its arguments, parameters, buffers and torch's random numbers alone"
        )

    def _leave(self) -> None:
        """Report to the engine, once, that the first visit has ended or will not come."""
        if self._entered and not self._left:
            self._left = True
            self._runtime.left(self.unit, self._of)

    def __del__(self) -> None:  # the graph is freed, maybe without any backward pass
        self._leave()


def _kind_of_call(modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor]) -> Hashable:
    """Return a key by which calls are grouped: calls with equal keys change the same arguments in place."""
    modes = tuple(module.training for module in modules)
    return modes, tuple((t.dtype, t.dim(), t.requires_grad) for t in tensors)


def _unpack(handle: Handle | torch.Tensor) -> torch.Tensor:
    """Return the tensor that a handle stands for."""
    return handle if isinstance(handle, torch.Tensor) else handle.owner.value(handle.number)


class StreamedForward(BlockForward):
    """The callable that replaces a streamed block's `forward`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with its weights in memory; with a graph as a `BlockPass`. Raises NotStreamable if gradient
        checkpointing of transformers is on."""
        block: Any = self._block()
        if torch._C._current_graph_task_id() != -1:  # a checkpoint around the block, or a hook
            self.runtime.require_not_updated(self.unit)
        if getattr(block, "gradient_checkpointing", False) and block.training:
            raise NotStreamable(
                f"gradient checkpointing of transformers is on in {self.unit.key}: the engine already recomputes by "
                "itself; switch it off (model.gradient_checkpointing_disable())"
            )
        if torch.is_grad_enabled():  # also for a frozen block: a gradient may reach it through an attribute
            if self.unit.trained or any(t.requires_grad for t in tensors_in((args, kwargs))):
                args = tuple(map(self.with_own_cache, args))
                kwargs = {name: self.with_own_cache(value) for name, value in kwargs.items()}
            return BlockPass(self).forward(args, kwargs)
        self.runtime.weights.take(self.unit)
        try:
            results = self.stock(*args, **kwargs)
            self.require_unchanged()
        finally:
            self.runtime.weights.give_back(self.unit)
        self.require_no_view()
        return results


def stream_block(block: nn.Module, unit: Unit, runtime: BlockRuntime) -> Callable[[], None]:
    """Replace a block's `forward` with the engine's, and return a function that undoes it."""
    had = vars(block).get("forward")
    forward = StreamedForward(block, unit, runtime)
    block.forward = forward

    def undo() -> None:
        if vars(block).get("forward") is forward:
            del block.forward
            if had is not None:
                block.forward = had

    return undo

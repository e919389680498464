"""Matrices of embeddings and heads that are read from the tier slice by slice, for `memascend.ops.rows`.

The next slices are read while one is in use, and each gradient is handed over with its slice. If a matrix is used more
than once in a pass (a tied one is, by the embedding and by the head), all gradients but the last wait on the tier, and
are added in the order in which autograd would add them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from memascend.engine.block_runtime import PassInProgress
from memascend.engine.layout import Part, Piece, Unit, padded
from memascend.engine.model_units import ModelUnits
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.weights import WeightStream
from memascend.ops.rows import WholeRows, slice_module

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a parameter
SLICES_AHEAD = 2  # slices that a pass reads before it needs them


class MatrixRuntime(Protocol):
    """The engine as a matrix that it trains calls it."""

    weights: UnitWeights
    at_work: PassInProgress

    def reaches(self, unit: Unit, *, needs_it: bool = True) -> None:
        """Called when the pass at work comes to a slice."""

    def backward_begins(self) -> None:
        """Called within the user's backward pass, before a gradient is used."""

    def require_not_updated(self, unit: Unit) -> None:
        """Raise if an update of the slice has begun, since nothing can be computed with it then."""

    def arrive(self, part: Part, gradient: torch.Tensor) -> None:
        """Take over the gradient of a slice, which includes all of its uses in this pass."""

    def gradient_stream(self) -> WeightStream:
        """Return the stream of waiting gradients, whose tensors have the sizes of pieces."""

    def computed_outside(self, seconds: float) -> None:
        """Record the seconds of a forward pass with a slice in memory."""

    def now(self) -> float:
        """Return the time in seconds."""


@dataclass
class _Uses:
    """The uses of a matrix by one micro-batch."""

    number: int
    with_graph: bool = False  # whether the forward pass at work has a graph
    passes: int = 0  # forward passes whose backward has not ended
    waiting: set[int] = field(default_factory=set)  # slices with a gradient on the tier

    def begin_pass(self) -> None:
        self.passes += 1

    def end_pass(self) -> None:
        self.passes = max(0, self.passes - 1)


class StreamedRows:
    """`Rows` over the slices of one matrix on the tier. Not thread-safe."""

    def __init__(self, runtime: MatrixRuntime, parameter: nn.Parameter, slices: Sequence[Unit]) -> None:
        self._runtime, self._slices = runtime, slices
        self.width, self.dtype = parameter.shape[1], parameter.dtype
        begins = [unit.parts[0].offset // self.width for unit in slices]
        self.bounds = list(zip(begins, [*begins[1:], parameter.shape[0]], strict=True))
        self._parameter, self._trained = parameter, slices[0].trained

    @property
    def anchor(self) -> torch.Tensor:
        """A scalar that requires a gradient if the matrix does now: one that is frozen later is not trained. It is read
        once per forward pass."""
        self._uses.with_graph = torch.is_grad_enabled()
        if self._uses.with_graph and self._trained:
            self._require_no_hooks()
        return torch.zeros((), requires_grad=self._trained and self._parameter.requires_grad)

    def _require_no_hooks(self) -> None:
        """Raise RuntimeError if the parameter has a gradient hook, which would never be called."""
        if any(getattr(self._parameter, kind, None) for kind in _HOOKS):
            name, module = self._slices[0].parts[0].name, self._slices[0].matrix
            raise RuntimeError(
                f"{name} has a gradient hook, but its gradient arrives in slices of rows, so that the hook would never "
                f"be called: remove it, or have {module or 'its module'} streamed in one piece by naming it among the "
                "blocks (blocks=[...])"
            )

    @contextmanager
    def open(self, number: int, ahead: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        weights, unit = self._runtime.weights, self._slices[number]
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self._runtime.require_not_updated(unit)
        if self._uses.with_graph or in_backward:
            self._runtime.reaches(unit)
        weights.take(unit)
        try:
            weights.stream.prefetch([self._slices[each].key for each in ahead[:SLICES_AHEAD]])
            begin, end = self.bounds[number]
            before = self._runtime.now()
            yield weights.values(unit)[: (end - begin) * self.width].view(end - begin, self.width)
            self._runtime.computed_outside(self._runtime.now() - before)
        finally:
            weights.give_back(unit)

    @property
    def _uses(self) -> _Uses:
        """The uses of the matrix in the micro-batch at work."""
        at_work = self._runtime.at_work
        return at_work.matrices.setdefault(self._slices[0].matrix, _Uses(at_work.number))

    def gradients(self) -> _Pass:
        return _Pass(self, self._uses)

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Take a slice's gradient from backward. It waits on the tier while more uses of the matrix are to come in this
        pass; the last one hands the sum over."""
        self._runtime.backward_begins()
        self._runtime.reaches(self._slices[number], needs_it=False)
        uses = self._uses
        if number in uses.waiting:
            gradient = self._brought_back(number).to(gradient.device).view_as(gradient).add_(gradient)
            uses.waiting.remove(number)
        if uses.passes > 1:
            self._let_wait(number, gradient)
        else:
            self._runtime.arrive(self._slices[number].parts[0], gradient)

    def end_of_backward(self) -> None:
        """Hand over gradients that still wait for other uses, whose backward did not come in this pass."""
        uses = self._uses
        for number in sorted(uses.waiting):
            self._runtime.arrive(self._slices[number].parts[0], self._brought_back(number))
        uses.waiting.clear()

    def _let_wait(self, number: int, gradient: torch.Tensor) -> None:
        """Write a slice's gradient to the tier, piece by piece."""
        stream, flat = self._runtime.gradient_stream(), gradient.reshape(-1)
        uses = self._uses
        for piece in self._slices[number].pieces:
            key = partial_key(piece, uses.number)
            if uses.number:
                stream.register(key, padded(piece.numel, stream.pool.dtype))
            slot = stream.put(key)
            slot[: piece.numel].copy_(flat[piece.first : piece.first + piece.numel])
            stream.write(key)
            stream.release(key)
        uses.waiting.add(number)

    def _brought_back(self, number: int) -> torch.Tensor:
        """Return a slice's waiting gradient, flat, in host memory of its own."""
        stream, unit = self._runtime.gradient_stream(), self._slices[number]
        flat = torch.empty(unit.numel, dtype=self.dtype)
        for piece in unit.pieces:
            key = partial_key(piece, self._uses.number)
            (slot,) = stream.fetch([key])
            flat[piece.first : piece.first + piece.numel].copy_(slot[: piece.numel])
            stream.release(key)
        return flat


class _Pass:
    """One forward pass. It ends when its gradients have been added, or when its graph is freed."""

    def __init__(self, rows: StreamedRows, uses: _Uses) -> None:
        self._rows, self._uses, self._ended = rows, uses, False
        uses.begin_pass()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._rows.add(number, gradient)

    def end(self) -> None:
        """Note that no gradient of this pass is to come. Idempotent."""
        if not self._ended:
            self._ended = True
            self._uses.end_pass()

    def __del__(self) -> None:
        self.end()


def partial_key(piece: Piece, number: int = 0) -> str:
    """Return the key of a piece's waiting gradients. `number`: of the micro-batch, among those side by side."""
    return f"first gradients of {piece.key}" + (f" ({number})" if number else "")


def slice_in_memory(model: nn.Module, **options: object) -> Callable[[], None]:
    """Let a model in memory compute its sums over the vocabulary as a streamed one does. Return the undo function.

    `options`: those of ModelUnits. Modules that the engine would not slice stay as they are. Raises
    NotStreamable for a model that the engine cannot stream.
    """
    units, undo = ModelUnits(model, **options), []
    for key, slices in units.matrices.items():
        parameter = units.matrix(key)
        begins = [unit.parts[0].offset // parameter.shape[1] for unit in slices]
        rows = WholeRows(parameter, list(zip(begins, [*begins[1:], parameter.shape[0]], strict=True)))
        undo += [slice_module(module, rows) for module in units.modules[key]]

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all

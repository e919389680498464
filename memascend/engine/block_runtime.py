"""What a block's forward and backward pass ask of the engine that trains it, and which block's visit is open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from memascend.engine.layout import Unit
from memascend.engine.operators import Taken
from memascend.engine.unit_weights import UnitWeights


class Visit(Protocol):
    """Of a block in backward: its weights are in memory from the begin to the end. `backward`: autograd's number of the
    backward pass that it belongs to."""

    unit: Unit
    backward: int

    def begin_visit(self) -> None: ...

    def end_visit(self) -> None: ...

    def forget_visit(self) -> None:
        """After an error: somebody else gives the weights back."""


class PassInProgress:
    """What an engine keeps of one micro-batch's forward and backward pass. One at a time is at work.

    `number`: of the micro-batch, among those side by side.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.visits = Visits()
        self.uses: dict[str, int] = {}  # passes through blocks whose visit has not ended
        self.begun = 0  # the number of its forward pass
        self.backward_begun = self.got_gradients = False
        self.ended = False  # its backward pass
        self.inside: list[Unit] = []  # whose modules' forward passes are in progress, outermost first
        self.model_passes: list[list[Unit] | None] = []  # see `OutsideUse`
        self.matrices: dict[str, Any] = {}  # see `StreamedRows`


class BlockRuntime:
    """What a block's visits ask of the engine that trains it."""

    weights: UnitWeights
    at_work: PassInProgress
    in_block = 0  # forward passes of blocks, first ones or again, that are in progress
    generation = 0  # of weights: another one after a step, and after one that was given up

    @property
    def visits(self) -> Visits:
        return self.at_work.visits

    @property
    def passes_begun(self) -> int:
        """Of forward passes with a graph, the number of the one at work."""
        return self.at_work.begun

    def reaches(self, unit: Unit, *, needs_it: bool = True) -> None:
        """The pass at work comes to a unit, in either direction; `needs_it`: its weights. Others may go on first."""

    def entered(self, unit: Unit) -> None:
        """A forward pass through the block, with a graph, begins."""

    def recomputes(self, unit: Unit) -> None:
        """The visit that belongs to it begins, in backward."""

    def visited(self, unit: Unit) -> None:
        """That visit ends; the weights are still there."""

    def left(self, unit: Unit, by: PassInProgress) -> None:
        """Its first visit has ended, or none will come."""

    def require_not_updated(self, unit: Unit) -> None:
        """Raise where an update of the block's weights has begun, so that it cannot be computed again."""

    def passed(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        """Seconds of a pass through the block in memory, in one direction (inf: the other one); the recomputation is in
        neither. The least counts."""

    def now(self) -> float:
        """Seconds; where blocks are measured, when the device has computed all that it was given."""
        return time.perf_counter()

    def keep_input(self, tensor: torch.Tensor) -> Any:
        """Of a block's hidden states: what brings them back (see `bring_back`), or the tensor itself."""
        return tensor

    def bring_back(self, kept: Any) -> torch.Tensor:
        tensor: torch.Tensor = kept
        return tensor

    def left_by(self, stop: type[BaseException]) -> contextlib.AbstractContextManager[Any]:
        """Around a recomputation, which `stop` may end in the middle of modules that are not the block's own."""
        return contextlib.nullcontext()

    def taking(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Taken]:
        """Around a forward pass: results of its products that wait for backward."""
        return contextlib.nullcontext(Taken())

    def replaying(self, unit: Unit, taken: Taken) -> contextlib.AbstractContextManager[Any]:
        """Around its recomputation, which has them again."""
        return contextlib.nullcontext()


class Visits:
    """Which block's backward visit is open: one at a time. Not thread-safe."""

    def __init__(self) -> None:
        self.open: Visit | None = None

    def begin(self, visited: Visit) -> None:
        """Open a pass's visit; that of another one ends."""
        if self.open is visited:
            return
        self.end()
        visited.begin_visit()
        self.open = visited

    def end(self) -> None:
        """No visit is open."""
        visited, self.open = self.open, None
        if visited is not None:
            visited.end_visit()

    def forget(self) -> None:
        """After an error: somebody else gives the weights back."""
        visited, self.open = self.open, None
        if visited is not None:
            visited.forget_visit()

    def is_nested_in(self, unit: Unit) -> bool:
        """Whether a backward pass runs inside of the open visit of `unit` (a reentrant checkpoint in the block)."""
        return (
            self.open is not None and self.open.unit is unit and self.open.backward != torch._C._current_graph_task_id()
        )

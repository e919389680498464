"""The engine as a block's forward and backward passes see it, and the block visit that is open."""

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
    """A visit to a block in backward: the block's weights are in memory from `begin_visit` to `end_visit`. `backward`:
    autograd's number of the backward pass that the visit belongs to."""

    unit: Unit
    backward: int

    @property
    def is_to_compute(self) -> bool:
        """Whether backward needs tensors of the block that are not recomputed yet."""

    def begin_visit(self) -> None: ...

    def end_visit(self) -> None: ...

    def forget_visit(self) -> None:
        """Forget the visit after an error. Its caller gives the weights back."""


class PassInProgress:
    """State of one micro-batch's forward and backward pass. One of them is at work at a time.

    `number`: the number of the micro-batch among those that run side by side.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.visits = Visits()
        self.uses: dict[str, int] = {}  # by unit key: passes through the block whose visit has not ended
        self.begun = 0  # the number of its forward pass
        self.backward_begun = self.got_gradients = False
        self.ended = False  # whether its backward pass has ended
        self.inside: list[Unit] = []  # units whose modules' forward passes are in progress, outermost first
        self.model_passes: list[list[Unit] | None] = []  # see `OutsideUse`
        self.matrices: dict[str, Any] = {}  # see `StreamedRows`


class BlockRuntime:
    """The engine that trains a block, as the passes and visits of the block call it."""

    weights: UnitWeights
    at_work: PassInProgress
    in_block = 0  # forward passes of blocks in progress, recomputations included
    generation = 0  # changes with the weights: after each step, completed or given up

    @property
    def visits(self) -> Visits:
        """The backward visits of the micro-batch at work."""
        return self.at_work.visits

    @property
    def passes_begun(self) -> int:
        """The number of the forward pass at work, counting passes with a graph."""
        return self.at_work.begun

    def reaches(self, unit: Unit, *, needs_it: bool = True) -> None:
        """Called when the pass at work comes to a unit, in forward or backward. Other micro-batches may run before it
        returns. `needs_it`: whether the pass needs the unit's weights."""

    def entered(self, unit: Unit) -> None:
        """Called when a forward pass through the block, with a graph, begins."""

    def recomputes(self, unit: Unit) -> None:
        """Called when the visit that belongs to such a pass begins, in backward."""

    def visited(self, unit: Unit) -> None:
        """Called when that visit ends; the weights are still in memory."""

    def left(self, unit: Unit, by: PassInProgress) -> None:
        """Called when the first visit of a pass has ended, or none will come. `by`: the micro-batch of that pass."""

    def require_not_updated(self, unit: Unit) -> None:
        """Raise if an update of the unit's weights has begun, since nothing can be computed with them then."""

    def passed(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        """Record the seconds of a pass through the block in memory, in one direction (inf for the other one). The
        recomputation is in neither. The smallest values count."""

    def now(self) -> float:
        """Return the time in seconds; where blocks are measured, after all work submitted to the device is done."""
        return time.perf_counter()

    def keep_input(self, tensor: torch.Tensor) -> Any:
        """Store a block's hidden states until backward. Return a handle for `bring_back`, or the tensor itself."""
        return tensor

    def bring_back(self, kept: Any) -> torch.Tensor:
        """Return the hidden states for a handle that `keep_input` has returned."""
        tensor: torch.Tensor = kept
        return tensor

    def left_by(self, stop: type[BaseException]) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a recomputation, which `stop` may end inside of modules that are units of their own."""
        return contextlib.nullcontext()

    def taking(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Taken]:
        """Return the context of a forward pass; it yields the results of products that are kept for backward."""
        return contextlib.nullcontext(Taken())

    def replaying(self, unit: Unit, taken: Taken) -> contextlib.AbstractContextManager[Any]:
        """Return the context of its recomputation, in which the kept results are used again."""
        return contextlib.nullcontext()


class Visits:
    """The backward visit that is open, one block's at a time. Not thread-safe."""

    def __init__(self) -> None:
        self.open: Visit | None = None

    def begin(self, visited: Visit) -> None:
        """Open a visit, and end the one that was open, if it is another one."""
        if self.open is visited:
            return
        self.end()
        visited.begin_visit()
        self.open = visited

    def end(self) -> None:
        """End the visit that is open, if any."""
        visited, self.open = self.open, None
        if visited is not None:
            visited.end_visit()

    def forget(self) -> None:
        """Forget the open visit after an error. The caller gives the weights back."""
        visited, self.open = self.open, None
        if visited is not None:
            visited.forget_visit()

    def is_nested_in(self, unit: Unit) -> bool:
        """Return whether a backward pass runs inside of the open visit of `unit` (a reentrant checkpoint in it)."""
        return (
            self.open is not None and self.open.unit is unit and self.open.backward != torch._C._current_graph_task_id()
        )

"""The state of each piece of the optimizer states in the current step, in one record per piece.

    WAITING -> ARRIVED -> SPILLED -> SUMMED -> UPDATED -> WRITTEN

Gradients that need not wait go from ARRIVED to UPDATED; another backward pass moves a SPILLED piece to ARRIVED again; a
piece without a gradient goes from WAITING to UPDATED, updated with zeros or unchanged.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from memascend.engine.layout import Layout, Piece, Unit

Gradients = dict[tuple[str, int], torch.Tensor]  # flat gradients, by the key of their part


class PieceState(enum.Enum):
    """The state of a piece in the current step; see the diagram in the module docstring."""

    WAITING = "waiting"  # no gradient has arrived in this step
    ARRIVED = "arrived"  # gradients of this pass are in memory
    SPILLED = "spilled"  # the gradients so far are on the tier, or being written to it
    SUMMED = "summed"  # all gradients have arrived, and their squares are in the norm or about to be added
    UPDATED = "updated"  # its update has begun, or it stays unchanged
    WRITTEN = "written"  # the write of its states has begun; its weights are written when all of its unit are done


_NEXT = {
    PieceState.WAITING: {PieceState.ARRIVED, PieceState.UPDATED},
    PieceState.ARRIVED: {PieceState.SPILLED, PieceState.SUMMED, PieceState.UPDATED},
    PieceState.SPILLED: {PieceState.ARRIVED, PieceState.SUMMED, PieceState.UPDATED},
    PieceState.SUMMED: {PieceState.UPDATED},
    PieceState.UPDATED: {PieceState.WRITTEN},
    PieceState.WRITTEN: set(),
}
_TAKES = {PieceState.ARRIVED, *(state for state, after in _NEXT.items() if PieceState.ARRIVED in after)}
_BEGUN = {PieceState.UPDATED, PieceState.WRITTEN}


@dataclass
class _Record:
    """The state of one piece, and its gradients in memory."""

    state: PieceState = PieceState.WAITING
    gradients: Gradients = field(default_factory=dict)  # gradients of this pass, until `take`
    on_tier: bool = False  # whether gradients of this step are on the tier


class StepPieces:
    """The pieces of a layout in one step, and the units whose weights are kept in memory for their updates.

    Thread-safe. Every change of a state is checked: one that the diagram above does not allow raises AssertionError
    with the piece's name.
    """

    def __init__(self, layout: Layout) -> None:
        self._lock = threading.Lock()
        self._units = {unit.key: unit for unit in layout.units}
        self._records = {piece.key: _Record() for piece in layout.pieces}
        self._begun = 0
        self._open: set[str] = set()  # keys of units

    def state(self, piece: Piece) -> PieceState:
        return self._records[piece.key].state

    def move(self, piece: Piece, state: PieceState) -> None:
        """Change a piece's state. Raises AssertionError for a change that the diagram does not allow."""
        with self._lock:
            self._move(piece, state)

    def _move(self, piece: Piece, state: PieceState) -> None:
        """Change a piece's state; the caller holds the lock."""
        record = self._records[piece.key]
        if state not in _NEXT[record.state]:
            raise AssertionError(f"{piece.key} was {record.state.value} and cannot be {state.value} next")
        record.state = state
        record.on_tier |= state in (PieceState.SPILLED, PieceState.SUMMED)
        self._begun += state is PieceState.UPDATED

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add(self, piece: Piece, part: tuple[str, int], gradient: torch.Tensor) -> bool:
        """Add a part's flat gradient of this pass; return whether the piece now has those of all its parts."""
        with self._lock:
            record = self._records[piece.key]
            if part in record.gradients:
                raise AssertionError(f"{part[0]}: two gradients in one pass, both incomplete")
            if record.state is not PieceState.ARRIVED:
                self._move(piece, PieceState.ARRIVED)
            record.gradients[part] = gradient
            return len(record.gradients) == len(piece.runs)

    def takes_no_more(self, piece: Piece, part: tuple[str, int]) -> bool:
        """Return whether a gradient of that part would be too late, or the second one in this pass."""
        record = self._records[piece.key]
        return record.state not in _TAKES or part in record.gradients

    def take(self, piece: Piece) -> Gradients:
        """Remove and return the gradients of this pass."""
        record = self._records[piece.key]
        found, record.gradients = record.gradients, {}
        return found

    def is_on_tier(self, piece: Piece) -> bool:
        """Return whether gradients of this step are on the tier."""
        return self._records[piece.key].on_tier

    def set_on_tier(self, pieces: Iterable[Piece]) -> None:
        """Mark pieces whose gradients an earlier process has left on the tier."""
        for piece in pieces:
            self._records[piece.key].state = PieceState.SPILLED
            self._records[piece.key].on_tier = True

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def any_begun(self) -> bool:
        """Whether an update has begun, so that weights and states may mix those before and after this step."""
        return self._begun > 0

    def has_begun(self, piece: Piece) -> bool:
        return self.state(piece) in _BEGUN

    def open(self, unit: str) -> bool:
        """Note that a unit's weights are kept in memory for its updates; return False if they already are."""
        with self._lock:
            if unit in self._open:
                return False
            self._open.add(unit)
            return True

    def close(self, unit: str) -> bool:
        """Note that a unit's weights are no longer kept; return False if they were not."""
        with self._lock:
            if unit not in self._open:
                return False
            self._open.discard(unit)
            return True

    def is_open(self, unit: str) -> bool:
        """Return whether a unit's weights are kept in memory for its updates."""
        return unit in self._open

    @property
    def open_units(self) -> list[str]:
        """Keys of the units whose weights are kept in memory for their updates."""
        with self._lock:
            return list(self._open)

    def is_written(self, unit: Unit) -> bool:
        """Return whether all pieces of a unit are done, so that its weights can be written."""
        return all(self.state(piece) is PieceState.WRITTEN for piece in unit.pieces)

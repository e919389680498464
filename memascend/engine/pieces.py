"""What has become of each piece of the optimizer states in the current step: one record each, in one place.

    WAITING -> ARRIVED -> SPILLED -> SUMMED -> UPDATED -> WRITTEN

Gradients that need not wait go from ARRIVED to UPDATED; a further backward pass brings a SPILLED piece to ARRIVED
again; a piece that gets no gradient goes from WAITING to UPDATED, with zeros or as it is.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from memascend.engine.layout import Layout, Piece, Unit

Gradients = dict[tuple[str, int], torch.Tensor]  # flat, by the key of the part


class PieceState(enum.Enum):
    WAITING = "waiting"  # no gradient has come in this pass, nor in an earlier one
    ARRIVED = "arrived"  # gradients of this pass are in memory
    SPILLED = "spilled"  # those that have come are on the tier, or on their way there
    SUMMED = "summed"  # no more will come; their squares are in the norm
    UPDATED = "updated"  # its update has begun, or it is left as it is
    WRITTEN = "written"  # its states are on their way to the tier; its weights go when all of its unit are done


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
    state: PieceState = PieceState.WAITING
    gradients: Gradients = field(default_factory=dict)  # of this pass, until they are handed over
    on_tier: bool = False  # gradients of this step are there


class StepPieces:
    """The pieces of a layout in one step, and the units whose weights are kept in memory for their updates.

    Thread-safe. Every change goes by `move`, which raises AssertionError, with the piece's name, for one that the
    diagram above does not have.
    """

    def __init__(self, layout: Layout) -> None:
        self._lock = threading.Lock()
        self._units = {unit.key: unit for unit in layout.units}
        self._records = {piece.key: _Record() for piece in layout.pieces}
        self._begun = 0
        self._open: set[str] = set()  # units

    def state(self, piece: Piece) -> PieceState:
        return self._records[piece.key].state

    def move(self, piece: Piece, state: PieceState) -> None:
        with self._lock:
            self._move(piece, state)

    def _move(self, piece: Piece, state: PieceState) -> None:
        record = self._records[piece.key]
        if state not in _NEXT[record.state]:
            raise AssertionError(f"{piece.key} was {record.state.value} and cannot be {state.value} next")
        record.state = state
        record.on_tier |= state in (PieceState.SPILLED, PieceState.SUMMED)
        self._begun += state is PieceState.UPDATED

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add(self, piece: Piece, part: tuple[str, int], gradient: torch.Tensor) -> bool:
        """A part's gradient of this pass, flat; whether all of the piece's have come."""
        with self._lock:
            record = self._records[piece.key]
            if part in record.gradients:
                raise AssertionError(f"{part[0]}: two gradients in one pass, both incomplete")
            if record.state is not PieceState.ARRIVED:
                self._move(piece, PieceState.ARRIVED)
            record.gradients[part] = gradient
            return len(record.gradients) == len(piece.runs)

    def takes_no_more(self, piece: Piece, part: tuple[str, int]) -> bool:
        """Whether a gradient of that part would come too late, or as a second one in this pass."""
        record = self._records[piece.key]
        return record.state not in _TAKES or part in record.gradients

    def take(self, piece: Piece) -> Gradients:
        """Those of this pass; the record has none afterwards."""
        record = self._records[piece.key]
        found, record.gradients = record.gradients, {}
        return found

    def is_on_tier(self, piece: Piece) -> bool:
        """Whether gradients of this step wait there."""
        return self._records[piece.key].on_tier

    def set_on_tier(self, pieces: Iterable[Piece]) -> None:
        """Their gradients are there already, from an earlier process."""
        for piece in pieces:
            self._records[piece.key].state = PieceState.SPILLED
            self._records[piece.key].on_tier = True

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def any_begun(self) -> bool:
        """Whether an update has: weights and states may be neither those before this step nor after it."""
        return self._begun > 0

    def has_begun(self, piece: Piece) -> bool:
        return self.state(piece) in _BEGUN

    def open(self, unit: str) -> bool:
        """Note that a unit's weights are kept in memory for its updates; False: they are already."""
        with self._lock:
            if unit in self._open:
                return False
            self._open.add(unit)
            return True

    def close(self, unit: str) -> bool:
        """They are kept no longer; False: they were not."""
        with self._lock:
            if unit not in self._open:
                return False
            self._open.discard(unit)
            return True

    def is_open(self, unit: str) -> bool:
        return unit in self._open

    @property
    def open_units(self) -> list[str]:
        with self._lock:
            return list(self._open)

    def is_written(self, unit: Unit) -> bool:
        """Whether nothing is left to do with its weights."""
        return all(self.state(piece) is PieceState.WRITTEN for piece in unit.pieces)

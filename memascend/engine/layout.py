"""The division of a model on the tier: units that stream as a whole, and pieces whose states are updated together.

A *unit* is in memory as a whole: a block, or a module outside of the blocks (embedding, head, last norm). Its weights
are one tensor on the tier. A *piece* is a run of a unit's trained elements whose optimizer states are one tensor on the
tier: small parameters are combined, large ones are cut. An embedding or a head that is larger than a piece is cut by
rows into units of their own, *slices*, so that no buffer's size depends on the vocabulary. A layout follows from sizes
and names alone, so that a plan builds the same layout as a run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from memascend.ops.adamw8 import BLOCK, scales_shape

# Transfers are multiples of the unit of direct I/O, so that no tail goes through a bounce buffer.
UNIT_BYTES = 4096
# The most elements of a piece: 192 MiB of fp32 states with a master, which any SSD streams at its full rate.
PIECE_ELEMENTS = 1 << 24
# Parameters are aligned as in torch: kernels are chosen by alignment, and another kernel gives other last digits.
ALIGNED_BYTES = 64
# Step of the native sum of squares (unscale.cpp): cuts are multiples of it, so that norms keep their summation order.
SUM_ELEMENTS = 1 << 16


class Kind(Enum):
    """The kind of a unit, which says when its weights are in memory."""

    BLOCK = "block"  # in forward, and again in backward for the recomputation
    RESIDENT = "resident"  # from forward until its gradients have been used: head, norms
    LOOKED_UP = "looked up"  # in forward only: backward of an embedding needs no weights
    SLICE = "slice"  # while its rows are at work, in forward and again in backward


@dataclass(frozen=True)
class Part:
    """A parameter in its unit, or some of its rows. `first`: the number of its first element in the unit;
    `trained_first`: the same among all trained elements of the model, in the model's order (-1: frozen); `offset`: the
    number of the parameter's elements before it."""

    name: str
    shape: tuple[int, ...]
    first: int
    trained_first: int
    offset: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the part: each slice of a parameter has a different key."""
        return self.name, self.offset

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def trained(self) -> bool:
        return self.trained_first >= 0


@dataclass(frozen=True)
class Run:
    """Elements `begin` to `end` of a part."""

    part: Part
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def of(self, unit: torch.Tensor) -> torch.Tensor:
        """Return these elements of the unit's weights, as a view."""
        return unit[self.part.first + self.begin : self.part.first + self.end]


@dataclass(frozen=True, eq=False)
class Piece:
    """Runs that are contiguous in the states, and in the unit except for gaps. `first`: first element in the unit."""

    key: str
    unit: str
    first: int
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)


@dataclass(frozen=True, eq=False)
class Unit:
    """Parts that are in memory together, trained ones first. Each part begins at a multiple of `ALIGNED_BYTES`, so
    there may be gaps. `matrix`: for a slice, the key of the module whose matrix it was cut from."""

    key: str
    kind: Kind
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]
    matrix: str = ""

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def end(self) -> int:
        """The number of elements from the first to the last one, including gaps."""
        return max((part.first + part.numel for part in self.parts), default=0)

    @property
    def trained_end(self) -> int:
        """The number of elements from the first to the last trained one, including gaps."""
        return max((part.first + part.numel for part in self.parts if part.trained), default=0)

    @property
    def trained(self) -> bool:
        return bool(self.pieces)

    @property
    def frozen_numel(self) -> int:
        return sum(part.numel for part in self.parts if not part.trained)


@dataclass(frozen=True, kw_only=True)
class UnitParameters:
    """A unit's parameters: (name, shape, trained) in the model's order. `rows_of`: name of a matrix that may be cut."""

    key: str
    kind: Kind
    parameters: Sequence[tuple[str, tuple[int, ...], bool]]
    rows_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one model. `weights`: the dtype of parameters; `states`: that of moments and master weights.

    If the two are the same, the weights are their own masters, and a piece's states are two moments; else the master
    precedes them (LoHan, Table II: P16, P32 + OS32). torch.int8 stands for the states of `memascend.ops.adamw8`: the
    weights are the only master, and a piece's states are bytes, codes of both moments followed by the scales of each
    run's blocks (arXiv 2110.02861). Blocks are those of the whole parameter, whatever it is cut into: cuts are
    multiples of `SUM_ELEMENTS`.
    """

    units: tuple[Unit, ...]
    weights: torch.dtype
    states: torch.dtype
    order: tuple[str, ...] = field(default=())  # trained parameters in the model's order
    splits: bool = True  # False: as in stores of earlier versions, where a unit's weights are always one tensor

    @property
    def own_masters(self) -> bool:
        """Whether the weights are their own masters, so that a piece's states include no separate one."""
        return self.states in (self.weights, torch.int8)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states, in their order within a piece."""
        if self.states == torch.int8:
            return "exp_avg", "exp_avg_sq", "scales"
        return ("exp_avg", "exp_avg_sq") if self.own_masters else ("master", "exp_avg", "exp_avg_sq")

    @property
    def stored_states(self) -> torch.dtype:
        """The dtype of a piece's states on the tier and in memory."""
        return torch.uint8 if self.states == torch.int8 else self.states

    def dtype_of(self, state: str) -> torch.dtype:
        """Return the dtype of a state, or of "master" where the weights are their own masters."""
        return self.weights if state == "master" and self.own_masters else self.stored_states

    @property
    def pieces(self) -> list[Piece]:
        return [piece for unit in self.units for piece in unit.pieces]

    def unit_numel(self, unit: Unit) -> int:
        """Return the number of elements of the unit's weights on the tier."""
        return padded(unit.end, self.weights)

    def step_numel(self, unit: Unit) -> int:
        """Return the number of elements of the unit's weights that a step writes: the trained ones, in whole units of
        direct I/O. The frozen ones that follow are a tensor of their own on the tier. A unit that is frozen as a whole
        is one tensor."""
        return padded(unit.trained_end, self.weights) if unit.trained and self.splits else self.unit_numel(unit)

    def states_numel(self, piece: Piece) -> int:
        """Return the number of elements of a piece's states, which are contiguous, in whole units of direct I/O."""
        return padded(sum(self._state_span(piece, state) for state in self.state_names), self.stored_states)

    def state_places(self, piece: Piece) -> Iterator[tuple[Run, dict[str, slice]]]:
        """Yield each run, and where its states are in those of the piece."""
        place, begins = 0, {}
        for state in self.state_names:
            begins[state] = place
            place += self._state_span(piece, state)
        for run in piece.runs:
            numels = {state: numel_of_state(state, run.numel) for state in begins}
            yield run, {state: slice(begin, begin + numels[state]) for state, begin in begins.items()}
            begins = {state: begin + numels[state] for state, begin in begins.items()}

    def _state_span(self, piece: Piece, state: str) -> int:
        """Return the number of elements from the beginning of a piece's state to that of the next one. Codes and scales
        are written as one tensor, and each begins at a multiple of `ALIGNED_BYTES`."""
        numel = sum(numel_of_state(state, run.numel) for run in piece.runs)
        if self.states == torch.int8:
            return -(-numel // ALIGNED_BYTES) * ALIGNED_BYTES
        return padded(numel, self.states)

    @property
    def nbytes(self) -> list[int]:
        """The bytes of each tensor on the tier, for one version."""
        trained = [self.step_numel(unit) for unit in self.units]
        frozen = [self.unit_numel(unit) - numel for unit, numel in zip(self.units, trained, strict=True)]
        weights = [numel * self.weights.itemsize for numel in trained + frozen if numel]
        return weights + [self.states_numel(piece) * self.stored_states.itemsize for piece in self.pieces]

    @property
    def earlier_piece_elements(self) -> int:
        """The former default `piece_elements` of `make_layout`, which cut a small model's largest block in two."""
        blocks = [unit.numel for unit in self.units if unit.kind is Kind.BLOCK]
        return min(PIECE_ELEMENTS, max(blocks, default=PIECE_ELEMENTS))

    @property
    def digest(self) -> str:
        """A hash that is equal for two layouts that can read each other's tier."""
        what: list[Any] = [str(self.weights), str(self.states)]
        if any(self.step_numel(unit) < self.unit_numel(unit) for unit in self.units):
            what.append("frozen elements apart")
        if any(unit.end > unit.numel for unit in self.units):
            what.append(f"parts on {ALIGNED_BYTES} bytes")
        for unit in self.units:
            what.append([unit.key, [(part.name, part.shape, part.trained) for part in unit.parts]])
            what.append([[(run.part.name, run.begin, run.end) for run in piece.runs] for piece in unit.pieces])
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def numel_of_state(state: str, numel: int) -> int:
    """Return the number of elements of a state for `numel` elements of a parameter that start at a block."""
    return math.prod(scales_shape(numel)) if state == "scales" else numel


def padded(numel: int, dtype: torch.dtype) -> int:
    """Return `numel` rounded up to whole units of direct I/O."""
    step = UNIT_BYTES // dtype.itemsize
    return -(-numel // step) * step


def make_layout(
    units: Iterable[UnitParameters],
    order: Sequence[tuple[str, int]],
    *,
    weights: torch.dtype,
    states: torch.dtype = torch.float32,
    piece_elements: int | None = None,
    aligned: bool = True,
) -> Layout:
    """Return the layout of a model with these units.

    `order`: (name, elements) of all trained parameters in the model's order. `piece_elements`: the most elements of a
    piece, rounded down to steps of the sum of squares (default: the largest block as one piece, but no more than
    `PIECE_ELEMENTS`). `aligned`: False as in stores of earlier versions, where parts follow one another without gaps.
    Raises ValueError if two units or pieces would have the same key.
    """
    units = list(units)
    first, place = {}, 0
    for name, numel in order:
        first[name] = place
        # With 8-bit moments each parameter begins at a block, as in `AdamW8bit`: element numbers key the rounding.
        place += scales_shape(numel)[0] * BLOCK if states == torch.int8 else numel
    if piece_elements is None:
        blocks = [sum(torch.Size(shape).numel() for _, shape, _ in u.parameters) for u in units if u.kind is Kind.BLOCK]
        piece_elements = min(PIECE_ELEMENTS, max(blocks, default=PIECE_ELEMENTS) + SUM_ELEMENTS - 1)
    limit = max(SUM_ELEMENTS, piece_elements // SUM_ELEMENTS * SUM_ELEMENTS)
    step = ALIGNED_BYTES // weights.itemsize if aligned else 1
    made = tuple(each for unit in units for each in _cut_by_rows(unit, first, limit, step))
    _require_different_keys(made)
    return Layout(units=made, weights=weights, states=states, order=tuple(name for name, _ in order))


def _require_different_keys(units: Iterable[Unit]) -> None:
    """Raise ValueError if two tensors have the same key: they would overwrite each other on the tier."""
    counts = Counter(key for unit in units for key in (unit.key, *(piece.key for piece in unit.pieces)))
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ValueError(
            f"two parts of the model would both be {twice[0]!r} on the tier: give one of these modules another name"
        )


def rows_of_a_slice(width: int, limit: int) -> int:
    """Return how many rows fit into `limit` elements. Slices begin at steps of the sum of squares, so that norms keep
    their summation order; a slice has at least the rows of one such step."""
    step = SUM_ELEMENTS // math.gcd(width, SUM_ELEMENTS)
    return max(1, limit // (step * width)) * step


def _cut_by_rows(unit: UnitParameters, first: dict[str, int], limit: int, step: int) -> Iterator[Unit]:
    """Yield a unit for each slice of the matrix, if it is larger than one slice, and one for the other parameters."""
    matrix = next((each for each in unit.parameters if each[0] == unit.rows_of), None)
    if matrix is None or matrix[1][0] <= (rows := rows_of_a_slice(matrix[1][1], limit)):
        yield _unit(unit, first, limit, step)
        return
    name, (height, width), trained = matrix
    rest = [each for each in unit.parameters if each is not matrix]
    if rest:
        yield _unit(UnitParameters(key=unit.key, kind=Kind.RESIDENT, parameters=rest), first, limit, step)
    for begin in range(0, height, rows):
        end, offset = min(begin + rows, height), begin * width
        part = Part(name, (end - begin, width), 0, first[name] + offset if trained else -1, offset)
        key = f"{unit.key}[{begin}:{end}]"
        yield Unit(key, Kind.SLICE, (part,), _pieces(key, [part] if trained else [], limit), unit.key)


def _unit(unit: UnitParameters, first: dict[str, int], limit: int, step: int) -> Unit:
    """Return a unit with its trained parts first, each beginning at a multiple of `step` elements, and with its pieces.
    `first`: the model-wide number of each trained parameter's first element."""
    parts, place = [], 0
    for name, shape, trained in sorted(unit.parameters, key=lambda each: not each[2]):
        place = -(-place // step) * step
        parts.append(Part(name, tuple(shape), place, first[name] if trained else -1))
        place += parts[-1].numel
    cut = _pieces(unit.key, [part for part in parts if part.trained and part.numel], limit)
    return Unit(unit.key, unit.kind, tuple(parts), cut)


def _pieces(key: str, trained: Sequence[Part], limit: int) -> tuple[Piece, ...]:
    """Cut a unit's trained parts into pieces of at most `limit` elements."""
    return tuple(
        Piece(f"{key}/{number}", key, runs[0].part.first + runs[0].begin, tuple(runs))
        for number, runs in enumerate(_cut(trained, limit))
    )


def _cut(parts: Sequence[Part], limit: int) -> list[list[Run]]:
    """Combine whole parameters while they fit, and cut larger ones at multiples of `limit`."""
    pieces: list[list[Run]] = []
    filled = limit
    for part in parts:
        if filled + part.numel > limit or part.numel > limit:
            pieces += [[Run(part, b, min(b + limit, part.numel))] for b in range(0, part.numel, limit)]
            filled = part.numel if part.numel <= limit else limit
        else:
            pieces[-1].append(Run(part, 0, part.numel))
            filled += part.numel
    return pieces

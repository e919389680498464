"""How a model lies on the tier: units that stream as a whole, pieces whose states are updated together.

A *unit* is what is in memory at once: a block, or a module outside of the blocks (embedding, head, last norm). Its
weights are one tensor on the tier. A *piece* is a run of a unit's trained elements whose optimizer states are one
tensor on the tier: small parameters are put together, large ones are cut, so that the vocabulary does not set the size
of the state buffers. Sizes and names alone: a plan builds the same layout as a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

# Transfers are whole units of direct I/O, so that no end goes through a bounce buffer.
UNIT_BYTES = 4096
# Elements of a piece at most: 192 MiB of fp32 states with a master, which any SSD streams at its full rate.
PIECE_ELEMENTS = 1 << 24
# The fixed steps of the native sum of squares (unscale.cpp): cuts lie on them, so that norms keep their order of sums.
SUM_ELEMENTS = 1 << 16


class Kind(Enum):
    """When a unit's weights are in memory."""

    BLOCK = "block"  # in forward, and again in backward for the recomputation
    HELD = "held"  # from forward until its gradients have been used: head, norms
    LOOKED_UP = "looked up"  # in forward alone: backward of an embedding needs none


@dataclass(frozen=True)
class Part:
    """A parameter in its unit. `first`: of its elements in the unit; `trained_first`: among all trained elements of the
    model, in the model's order (-1: frozen)."""

    name: str
    shape: tuple[int, ...]
    first: int
    trained_first: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def trained(self) -> bool:
        return self.trained_first >= 0


@dataclass(frozen=True)
class Run:
    """Elements `begin` to `end` of a parameter."""

    part: Part
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class Piece:
    """`runs` follow one another in the unit and in the states; `first` is the first element in the unit."""

    key: str
    unit: str
    first: int
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)


@dataclass(frozen=True, eq=False)
class Unit:
    """Trained parts come first."""

    key: str
    kind: Kind
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def trained(self) -> bool:
        return bool(self.pieces)

    @property
    def frozen_numel(self) -> int:
        return sum(part.numel for part in self.parts if not part.trained)


@dataclass(frozen=True, kw_only=True)
class UnitParameters:
    """What a unit consists of: (name, shape, trained) in the model's order."""

    key: str
    kind: Kind
    parameters: Sequence[tuple[str, tuple[int, ...], bool]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of one model. `weights` is the parameters' dtype, `states` that of moments and master weights.

    Where the two are the same the weights are their own masters, and a piece's states are two moments; else the master
    is in front of them (LoHan, Table II: P16, P32 + OS32).
    """

    units: tuple[Unit, ...]
    weights: torch.dtype
    states: torch.dtype
    order: tuple[str, ...] = field(default=())  # trained parameters in the model's order

    @property
    def own_masters(self) -> bool:
        return self.weights == self.states

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self.own_masters else ("master", "exp_avg", "exp_avg_sq")

    @property
    def pieces(self) -> list[Piece]:
        return [piece for unit in self.units for piece in unit.pieces]

    def unit_numel(self, unit: Unit) -> int:
        """Elements of the unit's weights on the tier."""
        return padded(unit.numel, self.weights)

    def state_numel(self, piece: Piece) -> int:
        """Elements of each of a piece's states on the tier."""
        return padded(piece.numel, self.states)

    def states_numel(self, piece: Piece) -> int:
        """Elements of all states of a piece, which follow one another."""
        return len(self.state_names) * self.state_numel(piece)

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each tensor on the tier, one version."""
        weights = [self.unit_numel(unit) * self.weights.itemsize for unit in self.units]
        return weights + [self.states_numel(piece) * self.states.itemsize for piece in self.pieces]

    @property
    def digest(self) -> str:
        """The same for two layouts that can read each other's tier."""
        what = [str(self.weights), str(self.states)]
        for unit in self.units:
            what.append([unit.key, [(part.name, part.shape, part.trained) for part in unit.parts]])
            what.append([[(run.part.name, run.begin, run.end) for run in piece.runs] for piece in unit.pieces])
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def padded(numel: int, dtype: torch.dtype) -> int:
    """`numel` rounded up to whole units of direct I/O."""
    step = UNIT_BYTES // dtype.itemsize
    return -(-numel // step) * step


def make_layout(
    units: Iterable[UnitParameters],
    order: Sequence[tuple[str, int]],
    *,
    weights: torch.dtype,
    states: torch.dtype = torch.float32,
    piece_elements: int | None = None,
) -> Layout:
    """`order`: (name, elements) of all trained parameters in the model's order. `piece_elements`: of a piece at most
    (default: those of the largest block, but no more than `PIECE_ELEMENTS`)."""
    units = list(units)
    first, place = {}, 0
    for name, numel in order:
        first[name] = place
        place += numel
    if piece_elements is None:
        blocks = [sum(torch.Size(shape).numel() for _, shape, _ in u.parameters) for u in units if u.kind is Kind.BLOCK]
        piece_elements = min(PIECE_ELEMENTS, max(blocks, default=PIECE_ELEMENTS))
    limit = max(SUM_ELEMENTS, piece_elements // SUM_ELEMENTS * SUM_ELEMENTS)
    made = tuple(_unit(unit, first, limit) for unit in units)
    return Layout(units=made, weights=weights, states=states, order=tuple(name for name, _ in order))


def _unit(unit: UnitParameters, first: dict[str, int], limit: int) -> Unit:
    parts, place = [], 0
    for name, shape, trained in sorted(unit.parameters, key=lambda each: not each[2]):
        parts.append(Part(name, tuple(shape), place, first[name] if trained else -1))
        place += parts[-1].numel
    pieces = [
        Piece(f"{unit.key}/{number}", unit.key, runs[0].part.first + runs[0].begin, tuple(runs))
        for number, runs in enumerate(_cut([part for part in parts if part.trained and part.numel], limit))
    ]
    return Unit(unit.key, unit.kind, tuple(parts), tuple(pieces))


def _cut(parts: Sequence[Part], limit: int) -> list[list[Run]]:
    """Whole parameters together while they fit; larger ones cut at multiples of `limit`."""
    pieces: list[list[Run]] = []
    held = limit
    for part in parts:
        if held + part.numel > limit or part.numel > limit:
            pieces += [[Run(part, b, min(b + limit, part.numel))] for b in range(0, part.numel, limit)]
            held = part.numel if part.numel <= limit else limit
        else:
            pieces[-1].append(Run(part, 0, part.numel))
            held += part.numel
    return pieces

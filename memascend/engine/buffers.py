"""The host buffers of the streaming engine: a few slots each for weights, states, gradients and activation checkpoints.

A plan makes them over an allocator that counts, a run over one that allocates: both by this class, and so entry by
entry the same. Their sizes are those of the largest unit and the largest piece; the depth of the model is not in them,
and the vocabulary only as far as a slice of it goes.
"""

from __future__ import annotations

from collections import Counter

import torch

from memascend.engine.layout import Kind, Layout, padded
from memascend.memory.pinned import Allocator
from memascend.memory.pools import AdaptiveBufferPool, MonolithicBufferPool, PoolClass

BLOCKS_IN_FLIGHT = 3  # one at work, one on its way in, one that is updated and written
SLICES_IN_FLIGHT = 3  # as of blocks
STATE_SLOTS = 3  # one read, one updated, one written (LoHan, Fig. 3b)
GRADIENT_SLOTS = 3  # where gradients wait on the tier
CHECKPOINT_SLOTS = 3
SAVED_BYTES = 4 << 20  # at a time: four commands of the engine below


class _Named:
    """An allocator under whose owner a pool's memory is booked, in place of the pool's own name for itself."""

    def __init__(self, allocator: Allocator, owner: str, name: str) -> None:
        self._allocator, self._owner, self._name = allocator, owner, name
        self.allocated: list[torch.Tensor] = []
        self.name, self.ledger = allocator.name, allocator.ledger

    def reserved_bytes(self, requested: int) -> int:
        return self._allocator.reserved_bytes(requested)

    def allocate(self, numel: int, dtype: torch.dtype, **_: object) -> torch.Tensor:
        self.allocated.append(self._allocator.allocate(numel, dtype, name=self._name, owner=self._owner))
        return self.allocated[-1]


def weight_classes(layout: Layout, blocks_in_flight: int) -> list[PoolClass]:
    """Slots by size: for blocks and slices as many as are in flight, for every other unit one of its own."""
    blocks = Counter(layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.BLOCK)
    counts = Counter({numel: min(count, blocks_in_flight) for numel, count in blocks.items()})
    slices = Counter(layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.SLICE)
    last = {unit.matrix: layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.SLICE}
    for numel, count in slices.items():  # the last one of a matrix may be smaller, and comes alone
        alone = count == sum(numel == each for each in last.values())
        counts[numel] += 1 if alone else min(count, SLICES_IN_FLIGHT)
    counts.update(layout.unit_numel(unit) for unit in layout.units if unit.kind in (Kind.RESIDENT, Kind.LOOKED_UP))
    return [PoolClass(f"unit-{numel}", numel, counts[numel]) for numel in sorted(counts, reverse=True)]


class EngineBuffers:
    """Pools over `allocator`. `state_slots`: one where states are read, updated and written in turn."""

    def __init__(
        self,
        layout: Layout,
        allocator: Allocator,
        *,
        blocks_in_flight: int = BLOCKS_IN_FLIGHT,
        state_slots: int | None = None,
        gradients: torch.dtype = torch.float32,
    ) -> None:
        self.layout, self.allocator, self.gradient_dtype = layout, allocator, gradients
        classes = weight_classes(layout, blocks_in_flight)
        weights, states = (
            _Named(allocator, "streamed_weights", "weights"),
            _Named(allocator, "streamed_states", "optimizer states"),
        )
        self.weights = AdaptiveBufferPool(classes, layout.weights, weights)
        pieces = layout.pieces
        self.states: MonolithicBufferPool | None = None
        if pieces:
            self.states = MonolithicBufferPool(
                max(map(layout.states_numel, pieces)),
                state_slots or STATE_SLOTS,
                layout.stored_states,
                states,
                separate=False,
            )
        self.streamed = weights.allocated + states.allocated  # memory of both pools
        self.gradients: MonolithicBufferPool | None = None
        self.checkpoints: MonolithicBufferPool | None = None
        self.saved: torch.Tensor | None = None

    def need_arrivals(self) -> torch.Tensor:
        """For the gradients of a piece on their way from an accelerator, in the type of its weights."""
        return self.allocator.allocate(
            max((piece.numel for piece in self.layout.pieces), default=1),
            self.layout.weights,
            name="arriving gradients",
            owner="streamed_gradients",
        )

    def need_gradients(self) -> MonolithicBufferPool:
        """For gradients that wait on the tier; made once, when it turns out that they must."""
        if self.gradients is None:
            self.gradients = MonolithicBufferPool(
                max(padded(piece.numel, self.gradient_dtype) for piece in self.layout.pieces),
                GRADIENT_SLOTS,
                self.gradient_dtype,
                _Named(self.allocator, "streamed_gradients", "gradients"),
                separate=False,
            )
        return self.gradients

    def need_checkpoints(self, numel: int, dtype: torch.dtype) -> MonolithicBufferPool:
        """For the inputs of blocks on their way to the tier and back, `numel` elements each."""
        self.checkpoints = MonolithicBufferPool(
            padded(numel, dtype),
            CHECKPOINT_SLOTS,
            dtype,
            _Named(self.allocator, "activation_checkpoints", "activation checkpoints"),
            separate=False,
        )
        return self.checkpoints

    def need_saved(self) -> torch.Tensor:
        """For what is copied into a save while training goes on, as bytes; made once, with the first of them."""
        if self.saved is None:
            nbytes = min(SAVED_BYTES, max(self.layout.nbytes))
            self.saved = self.allocator.allocate(nbytes, torch.uint8, name="save", owner="streamed_saves")
        return self.saved

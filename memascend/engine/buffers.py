"""The host buffers of the streaming engine: a few slots each for weights, states, gradients and activation checkpoints.

A plan creates them over an allocator that only counts, a run over one that allocates. Both use this class, so that
their entries are the same. Sizes follow from the largest unit and the largest piece. They do not depend on the depth of
the model, and on its vocabulary only by the size of one slice.
"""

from __future__ import annotations

from collections import Counter

import torch

from memascend.engine.layout import Kind, Layout, padded
from memascend.memory.pinned import Allocator
from memascend.memory.pools import AdaptiveBufferPool, MonolithicBufferPool, PoolClass

BLOCKS_IN_FLIGHT = 3  # one computes, one is read, one is updated and written
SLICES_IN_FLIGHT = 3  # as for blocks
STATE_SLOTS = 3  # one read, one updated, one written (LoHan, Fig. 3b)
GRADIENT_SLOTS = 3  # for gradients that wait on the tier
CHECKPOINT_SLOTS = 3
SAVED_BYTES = 4 << 20  # bytes at a time: four commands of the I/O engine


class _Named:
    """An allocator that books a pool's memory under this owner and name, in place of the pool's own."""

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
    """Return slots by size: for blocks and slices as many as are in flight, and one for every other unit."""
    blocks = Counter(layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.BLOCK)
    counts = Counter({numel: min(count, blocks_in_flight) for numel, count in blocks.items()})
    slices = Counter(layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.SLICE)
    last = {unit.matrix: layout.unit_numel(unit) for unit in layout.units if unit.kind is Kind.SLICE}
    for numel, count in slices.items():  # the last slice of a matrix may be smaller, and needs one slot
        alone = count == sum(numel == each for each in last.values())
        counts[numel] += 1 if alone else min(count, SLICES_IN_FLIGHT)
    counts.update(layout.unit_numel(unit) for unit in layout.units if unit.kind in (Kind.RESIDENT, Kind.LOOKED_UP))
    return [PoolClass(f"unit-{numel}", numel, counts[numel]) for numel in sorted(counts, reverse=True)]


class EngineBuffers:
    """The engine's buffer pools, from `allocator`. `state_slots`: 1 where states are read, updated and written in turn.

    `gradients`: the dtype of gradients that wait on the tier.
    """

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
        """Allocate the buffer for a piece's gradients on their way from an accelerator, in the dtype of the weights."""
        return self.allocator.allocate(
            max((piece.numel for piece in self.layout.pieces), default=1),
            self.layout.weights,
            name="arriving gradients",
            owner="streamed_gradients",
        )

    def need_gradients(self) -> MonolithicBufferPool:
        """Return the pool for gradients that wait on the tier. It is created once, when it is first needed."""
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
        """Create the pool for block inputs of `numel` elements each, on their way to the tier and back."""
        self.checkpoints = MonolithicBufferPool(
            padded(numel, dtype),
            CHECKPOINT_SLOTS,
            dtype,
            _Named(self.allocator, "activation_checkpoints", "activation checkpoints"),
            separate=False,
        )
        return self.checkpoints

    def need_saved(self) -> torch.Tensor:
        """Return the byte buffer that saves are copied through while training goes on. The first save creates it."""
        if self.saved is None:
            nbytes = min(SAVED_BYTES, max(self.layout.nbytes))
            self.saved = self.allocator.allocate(nbytes, torch.uint8, name="save", owner="streamed_saves")
        return self.saved

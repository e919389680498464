"""Host memory for the activation checkpoints of one rank: a single reservation with one slot per block.

MemAscend, Eq. 1: B x C x L x H elements per rank, for B sequences of C tokens, L blocks and hidden size H. The
reservation is a single allocation, so the allocator's rounding applies to the whole store: nothing with the exact
allocator, up to twice the bytes with the power-of-two one. The paper's baseline shows that granularity (its totals grow
by p2(B C L H 2) per GPU; rounding each block would give other steps).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any

import torch

from memascend.activation.gone import Gone
from memascend.memory.pinned import Allocator

OWNER = "activation_checkpoints"


class _Segment:
    """One reservation, divided into equal slots. `pending` has the event after the last copy of each device."""

    def __init__(self, buffer: torch.Tensor, slot_bytes: int) -> None:
        self.buffer = buffer.view(torch.uint8)
        self.pending: dict[torch.device, Any] = {}
        self.leased: set[Gone] = set()
        self.returned: deque[Gone] = deque()
        self.carve(slot_bytes)

    def carve(self, slot_bytes: int) -> None:
        """Divide the reservation into free slots of `slot_bytes`."""
        self.slot_bytes = slot_bytes
        self.count = self.buffer.numel() // slot_bytes
        self.free = list(range(self.count))[::-1]

    def collect(self) -> None:
        """Make the slots free whose `Slot` objects are gone."""
        while self.returned:
            gone = self.returned.popleft()
            self.leased.discard(gone)
            self.free.append(gone.of)

    @property
    def empty(self) -> bool:
        """Whether no slot is in use."""
        return len(self.free) == self.count

    def __del__(self) -> None:
        for event in self.pending.values():
            event.synchronize()  # a copy may still access memory that is about to be freed


class Slot:
    """Host memory of one checkpoint, returned when this object is deleted."""

    def __init__(self, segment: _Segment, index: int) -> None:
        self._segment, self._index = segment, index
        segment.leased.add(Gone(self, segment.returned, index))
        self.pending = segment.pending

    def view(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the slot as a dense tensor; the caller must have leased at least its bytes."""
        begin = self._index * self._segment.slot_bytes
        flat = self._segment.buffer[begin : begin + math.prod(size) * dtype.itemsize].view(dtype)
        return flat.as_strided(size, stride, flat.storage_offset())


class CheckpointStore:
    """One rank's checkpoints in memory of `allocator`, booked in its ledger (owner `activation_checkpoints`).

    `blocks` is the number of checkpoints per forward pass (`offload_checkpoints` sets it). The size of a slot is that
    of the first checkpoint, or is set in advance by `reserve`. For a larger batch, the reservation is replaced by a
    larger one. If a second forward pass runs before the first one's backward, it gets its own reservation. Thread-safe.
    """

    def __init__(self, allocator: Allocator, *, blocks: int | None = None) -> None:
        self.allocator = allocator
        self.blocks = blocks
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    def reserve(self, batch: int, context: int, layers: int, hidden: int, dtype: torch.dtype) -> None:
        """Make the reservation of Eq. 1 before the first forward pass. Raises ValueError for sizes below one."""
        if min(batch, context, layers, hidden) < 1:
            raise ValueError(
                f"activation checkpoints of batch {batch}, context {context}, {layers} layers, hidden size {hidden}: "
                "all must be positive"
            )
        with self._lock:
            self.blocks = layers
            self._add(batch * context * hidden, dtype, layers)

    def lease(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return memory for one checkpoint of `numel` elements. Raises MemoryError if the allocator refuses."""
        if self.blocks is None:
            raise ValueError("CheckpointStore: the number of blocks is unknown: pass blocks=, or call reserve first")
        wanted = numel * dtype.itemsize
        with self._lock:
            for segment in self._segments:
                segment.collect()
                if segment.slot_bytes == wanted and segment.free:
                    return Slot(segment, segment.free.pop())
            segment = self._empty_segment_for(wanted, self.blocks) or self._add(numel, dtype, self.blocks)
            return Slot(segment, segment.free.pop())

    def close(self) -> None:
        """Release the memory; checkpoints that are still needed keep theirs until they are used."""
        with self._lock:
            self._segments.clear()

    @property
    def requested_bytes(self) -> int:
        """Bytes requested from the allocator, for all reservations together."""
        return sum(segment.buffer.numel() for segment in self._segments)

    @property
    def leased(self) -> int:
        """Number of checkpoints in host memory now."""
        with self._lock:
            for segment in self._segments:
                segment.collect()
            return sum(segment.count - len(segment.free) for segment in self._segments)

    def _empty_segment_for(self, slot_bytes: int, blocks: int) -> _Segment | None:
        """Return an unused reservation, divided anew; if all unused ones are too small, drop one, to be replaced."""
        idle = sorted((s for s in self._segments if s.empty), key=lambda s: s.buffer.numel())
        for segment in idle:
            if segment.buffer.numel() >= slot_bytes * blocks:
                segment.carve(slot_bytes)
                return segment
        if idle:
            self._segments.remove(idle[-1])
        return None

    def _add(self, slot_numel: int, dtype: torch.dtype, blocks: int) -> _Segment:
        """Add a reservation of `blocks` slots. Raises MemoryError if the allocator refuses."""
        buffer = self.allocator.allocate(slot_numel * blocks, dtype, name="activation checkpoints", owner=OWNER)
        segment = _Segment(buffer, slot_numel * dtype.itemsize)
        self._segments.append(segment)
        return segment

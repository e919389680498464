"""Auxiliary data of an engine on the tier: gradients that wait, inputs of blocks, swapped activations."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from memascend.engine.buffer_table import StreamOptions
from memascend.engine.buffers import EngineBuffers
from memascend.engine.in_place_update import GradientsInStore
from memascend.engine.layout import Layout
from memascend.engine.matrices import partial_key
from memascend.engine.protocols import Storage
from memascend.engine.state_store import StateStore
from memascend.engine.updates import gradient_key, gradient_numel
from memascend.engine.weights import WeightStream
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier

WAIT_S = 3600.0  # timeout for a slot: longer than the largest update on the slowest disk


class AuxiliaryTiers:
    """Scratch files in the store's folder, created on first use, by any thread, and removed by `close`.

    `redoes`: gradients are stored with the states, so that a step can be redone. This class also records the bounce
    buffers of all I/O engines, including the store's, in the memory ledger, since they do not come from the allocator.
    """

    def __init__(self, store: StateStore, layout: Layout, buffers: EngineBuffers, *, redoes: bool) -> None:
        self._store, self._layout, self._buffers, self._redoes = store, layout, buffers, redoes
        self._scratch: DirectTier | None = None
        self.gradients: WeightStream | None = None  # created by `gradient_stream`
        self._making = threading.RLock()  # reentrant: the stream of gradients may create the scratch tier
        self._booked: list[int] = []
        self._of_store = self._book(store.bounce_buffers)

    def scratch(self) -> DirectTier:
        """Return the tier of gradients that wait and of activations; created on the first call. Any thread."""
        with self._making:
            if self._scratch is None:
                self._scratch = self._in_file("gradients and activations")
            return self._scratch

    def swap_tier(self) -> DirectTier:
        """Return a new tier for swapped activations, which the caller closes."""
        return self._in_file("swapped activations")

    def gradient_stream(self) -> WeightStream:
        """Return the stream of gradients that wait on the tier; created on the first call."""
        with self._making:
            if self.gradients is None:
                pool = self._buffers.need_gradients()
                stream = WeightStream(self._gradient_storage(), pool=pool, options=StreamOptions(wait_s=WAIT_S))
                for piece in self._layout.pieces:
                    for key in (gradient_key(piece), partial_key(piece)):
                        stream.register(key, gradient_numel(piece, self._buffers.gradient_dtype))
                self.gradients = stream
        return self.gradients

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written on the scratch tier, without swapped activations."""
        moved = self._scratch.transferred if self._scratch is not None else None
        return (moved.bytes_read, moved.bytes_written) if moved is not None else (0, 0)

    def store_was_reopened(self) -> None:
        """Record the new bounce buffers of the store in place of the old ones."""
        for entry in self._of_store:
            self._booked.remove(entry)
            self._buffers.allocator.ledger.close(entry)
        self._of_store = self._book(self._store.bounce_buffers)

    def close(self) -> None:
        """Close the scratch tier, remove its records from the ledger, and drop references to buffers. Idempotent."""
        if self._scratch is not None:
            with contextlib.suppress(OSError):
                self._scratch.close()
        while self._booked:
            self._buffers.allocator.ledger.close(self._booked.pop())
        for name in ("_buffers", "gradients"):
            vars(self).pop(name, None)

    def _in_file(self, what: str) -> DirectTier:
        """Return a tier in a new file in the store's folder, with its bounce buffers recorded."""
        config = DirectEngineConfig(control_folder=os.fspath(self._store.folder))
        tier = DirectTier.in_file(self._store.folder, what, config)
        self._book(tier.engine.bounce_buffers)
        return tier

    def _gradient_storage(self) -> Storage:
        """Return the storage of gradients that wait: with a redo, the store has all but partial sums."""
        if not self._redoes:
            return self.scratch()
        return GradientsInStore(self._store, self.scratch, {gradient_key(piece) for piece in self._layout.pieces})

    def _book(self, buffers: Sequence[tuple[int, int]]) -> list[int]:
        """Record bounce buffers, as (address, bytes), in the ledger; return the numbers of the entries."""
        ledger = self._buffers.allocator.ledger
        entries = [
            ledger.record("bounce buffers", "nvme_engine_buffers", size, allocator="direct engine", address=address)
            for address, size in (buffers if ledger is not None else ())
        ]
        self._booked += entries
        return entries

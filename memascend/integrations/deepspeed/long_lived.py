"""Buffers that live as long as a training run, registered with the open tiers (io_uring pins them once)."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from memascend.storage.tier import Tier


class LongLivedBuffers:
    """The long-lived buffers of a store's users, each kept alive until it is removed. Thread-safe.

    Finalizers may call the methods too, even while their thread is inside one of them, because a garbage collection can
    run at any point.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # last in the lock order, so that callers may hold other locks
        self._buffers: dict[int, tuple[torch.Tensor, object]] = {}  # (buffer, user) by address
        self._tiers: list[Tier] = []
        self._taken: set[int] = set()  # addresses that a tier has pinned
        self._pid = os.getpid()

    def add(self, tensor: torch.Tensor, user: object) -> None:
        """Register a buffer with all open tiers, and with those opened later.

        A tier that cannot pin it (another kind of tier, the limit on locked memory) still transfers from and to it.
        """
        if tensor.numel() == 0 or os.getpid() != self._pid:
            return
        with self._lock:
            self._buffers[tensor.data_ptr()] = tensor, user
            for tier in list(self._tiers):
                self._register(tier, tensor)

    def remove(self, tensor: torch.Tensor) -> None:
        """Unregister a buffer; on return no tier refers to its memory. No error if unknown, or in a forked child."""
        if os.getpid() == self._pid:
            self._remove(tensor.data_ptr())

    def remove_all_of(self, user: object) -> None:
        """Unregister all buffers of a user. Does nothing in a forked child."""
        if os.getpid() == self._pid:
            with self._lock:
                for address in [each for each, (_, owner) in self._buffers.items() if owner is user]:
                    self._remove(address)

    def opened(self, tier: Tier) -> None:
        """Register all buffers with a tier that has just been opened."""
        with self._lock:
            self._tiers.append(tier)
            for tensor, _ in list(self._buffers.values()):
                self._register(tier, tensor)

    def closing(self, tier: Tier) -> None:
        """Forget a tier; must be called before it closes, which releases the memory that it has pinned."""
        with self._lock:
            self._tiers.remove(tier)
            if not self._tiers:
                self._taken.clear()

    @property
    def registered_bytes(self) -> int:
        """Bytes of the buffers that at least one open tier has pinned."""
        with self._lock:
            return sum(self._buffers[address][0].nbytes for address in self._taken)

    def _register(self, tier: Tier, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if tier.register(tensor):
            self._taken.add(address)
        if address not in self._buffers:  # a finalizer has removed it in the meantime
            tier.unregister(tensor)
            self._taken.discard(address)

    def _remove(self, address: int) -> None:
        with self._lock:
            entry = self._buffers.pop(address, None)
            self._taken.discard(address)
            if entry is not None:
                for tier in self._tiers:
                    tier.unregister(entry[0])

"""Frozen weights of units that also train some, such as adapters: a tensor of their own on the tier, written once.

In memory a unit is one buffer with its trained elements first. A step writes only these: with LoRA, kilobytes instead
of the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from memascend.engine.layout import Layout
from memascend.engine.state_store import StateStore
from memascend.storage.completion import Completion, Promise, all_of


class FrozenApart:
    """Storage for the weights of units in a store, with frozen ones separate. Thread-safe, like the store."""

    def __init__(self, store: StateStore, layout: Layout) -> None:
        self._store = store
        self._trained = {  # elements of each unit in which frozen ones follow them
            unit.key: layout.step_numel(unit)
            for unit in layout.units
            if layout.step_numel(unit) < layout.unit_numel(unit)
        }

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        """Read a unit's weights into one buffer; separate frozen elements take a second request."""
        if key not in self._trained:
            return self._store.read(key, tensor, priority=priority)
        numel = self._trained[key]
        return _both(
            lambda: self._store.read(key, tensor[:numel], priority=priority),
            lambda: self._store.read(frozen_key(key), tensor[numel:], priority=priority),
        )

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        """Write a unit's weights. Only the first write includes the frozen elements, since nothing changes them."""
        if key not in self._trained:
            return self._store.write(key, tensor, priority=priority)
        numel, frozen = self._trained[key], frozen_key(key)
        if frozen in self._store:
            return self._store.write(key, tensor[:numel], priority=priority)
        return _both(
            lambda: self._store.write(key, tensor[:numel], priority=priority),
            lambda: self._store.write(frozen, tensor[numel:], priority=priority),
        )


def frozen_key(key: Hashable) -> str:
    """Return the key of a unit's frozen elements on the tier."""
    return f"frozen of {key}"


def _both(first: Callable[[], Completion], second: Callable[[], Completion]) -> Completion:
    """Submit two transfers of one buffer, and return a completion that ends when both have. A second transfer that
    cannot be submitted makes it fail, but only once the first has ended."""
    begun = first()
    try:
        return all_of([begun, second()])
    except Exception as error:  # the buffer belongs to the first transfer until that has ended
        refused = Promise("the frozen part of a unit")
        refused.set_error(error)
        return all_of([begun, refused])

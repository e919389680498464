"""A block's own forward pass as the engine calls it: its caches of keys and values, and what it must not do."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Hashable
from typing import Any

from torch import nn

from memascend.engine.arguments import tensors_in
from memascend.engine.block_runtime import BlockRuntime
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Unit


class BlockForward:
    """Of one block, for as long as it is streamed."""

    def __init__(self, block: nn.Module, unit: Unit, runtime: BlockRuntime) -> None:
        self.stock = block.forward
        self._block, self.unit, self.runtime = weakref.ref(block), unit, runtime
        # Numbers of the tensors that the block changes in place, by the kind of call, once that has been seen.
        self.changed_inputs: dict[Hashable, set[int]] = {}
        self.passes: collections.Counter[Hashable] = collections.Counter()  # with a graph, by the kind of call

    @property
    def modules(self) -> list[nn.Module]:
        block = self._block()
        assert block is not None
        return list(block.modules())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's own forward."""
        caches: list[tuple[_OwnCache, Any]] = []

        def own(value: Any) -> Any:
            if not isinstance(value, _OwnCache):
                return value
            caches.append((value, value.made()))
            return caches[-1][1]

        results = self.stock(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
        if any(before.is_missing_in(cache) for before, cache in caches):
            raise NotStreamable(
                f"{self.unit.key} appends to a cache of keys and values that is already filled, which has no effect in "
                "training: omit past_key_values"
            )
        return results

    def with_own_cache(self, value: Any) -> Any:
        """A cache of keys and values, as transformers' models hand out in training, too, where nobody reads what a
        block adds to it: the block gets a copy that goes with its forward pass, as the recomputation will. Without any
        it would compute the same from other memory layouts, in another order of sums."""
        if not callable(getattr(value, "get_seq_length", None)):
            return value
        if value.get_seq_length():  # by passes without a graph: the block has slots of its own in it
            return _OwnCache(_copy_around_tensors(value), filled=True)
        empty, of_pass = _while_empty.get(value, (None, self.runtime.passes_begun))
        if of_pass != self.runtime.passes_begun:
            raise NotStreamable(
                f"{self.unit.key} gets a cache of keys and values of an earlier pass, which a pass with a graph cannot "
                "extend: omit past_key_values in training"
            )
        if empty is None:
            empty = copy.deepcopy(value)
            _while_empty[value] = empty, of_pass
        return _OwnCache(empty, filled=False)

    def require_unchanged(self) -> None:
        """NotStreamable where a forward pass that has just ended has changed the block's weights."""
        if (refusal := self.runtime.weights.refusal_of_change(self.unit)) is not None:
            raise refusal

    def require_no_view(self) -> None:
        """NotStreamable where something that is left of a forward pass uses memory of the block's weights."""
        if self.runtime.weights.is_referred_to(self.unit):
            raise NotStreamable(
                f"{self.unit.key} returns or keeps a view of its own weights, whose memory other blocks use from here "
                "on: make it a copy (.clone()), or in an autograd.Function use ctx.save_for_backward"
            )


# Of caches that were empty when a block got them: copies, since passes without a graph may fill them before backward
# comes, and the pass with a graph that had them first.
_while_empty: weakref.WeakKeyDictionary[Any, tuple[Any, int]] = weakref.WeakKeyDictionary()


def _copy_around_tensors(cache: Any) -> Any:
    """Its objects are new ones, and its tensors the same: arguments of the block as others are."""
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in tensors_in(cache)})


class _OwnCache:
    """Stands for a cache among a block's arguments, as it was before the block's forward pass: that, and each
    recomputation, has a copy of its own."""

    def __init__(self, cache: Any, *, filled: bool) -> None:
        self._cache, self._filled = cache, filled

    def made(self) -> Any:
        return _copy_around_tensors(self._cache) if self._filled else copy.deepcopy(self._cache)

    def is_missing_in(self, made: Any) -> bool:
        """Whether anything that the cache is filled with is no longer in the copy."""
        there = {id(tensor) for tensor in tensors_in(made)} if self._filled else set()
        return self._filled and any(id(tensor) not in there for tensor in tensors_in(self._cache))

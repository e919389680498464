"""A block's own forward pass as the engine calls it: its key-value caches, and what it must not do."""

from __future__ import annotations

import collections
import copy
import pickle
import weakref
from collections.abc import Hashable
from typing import Any

from torch import nn

from memascend.engine.arguments import Opaque, tensors_in
from memascend.engine.block_runtime import BlockRuntime
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Unit


class BlockForward:
    """Calls the forward pass of one block, for as long as the block is streamed."""

    def __init__(self, block: nn.Module, unit: Unit, runtime: BlockRuntime) -> None:
        self.stock = block.forward
        self._block, self.unit, self.runtime = weakref.ref(block), unit, runtime
        # By kind of call: the numbers of the tensors that the block changes in place, once a pass has shown them.
        self.changed_inputs: dict[Hashable, set[int]] = {}
        self.passes: collections.Counter[Hashable] = collections.Counter()  # passes with a graph, by kind of call

    @property
    def modules(self) -> list[nn.Module]:
        """The block and all of its submodules."""
        block = self._block()
        assert block is not None
        return list(block.modules())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block's own forward, with a copy for each `_OwnCache` in the arguments."""
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
        """Return a stand-in for a key-value cache; any other value is returned as it is.

        The models of transformers pass such a cache in training, too, where nobody reads what a block adds to it. The
        block gets a copy that lives as long as its forward pass, and so does the recomputation. Without a cache it
        would compute the same from other memory layouts, in another order of summation. Raises NotStreamable for a
        cache of an earlier pass.
        """
        if not callable(getattr(value, "get_seq_length", None)):
            return value
        if value.get_seq_length():  # filled by passes without a graph: the block has entries of its own in it
            return _OwnCache(_copy_around_tensors(value), filled=True)
        found, of_pass = _while_empty.get(value, (None, self.runtime.passes_begun))
        if of_pass != self.runtime.passes_begun:
            raise NotStreamable(
                f"{self.unit.key} gets a cache of keys and values of an earlier pass, which a pass with a graph cannot "
                "extend: omit past_key_values in training"
            )
        if found is None:
            empty = copy.deepcopy(value)
            found = _OwnCache(empty, filled=False) if any(tensors_in(empty)) else _OwnEmptyCache(empty)
            _while_empty[value] = found, of_pass
        return found

    def require_unchanged(self) -> None:
        """Raise NotStreamable if the forward pass that has just ended changed the block's weights."""
        if (refusal := self.runtime.weights.refusal_of_change(self.unit)) is not None:
            raise refusal

    def require_no_view(self) -> None:
        """Raise NotStreamable if a tensor that outlives the forward pass uses the memory of the block's weights."""
        if self.runtime.weights.is_referred_to(self.unit):
            raise NotStreamable(
                f"{self.unit.key} returns or keeps a view of its own weights, whose memory other blocks use from here "
                "on: make it a copy (.clone()), or in an autograd.Function use ctx.save_for_backward"
            )


# By cache that was empty when a block got it: its stand-in, with a copy, since passes without a graph may fill the
# cache before backward, and the number of the first pass with a graph that used it.
_while_empty: weakref.WeakKeyDictionary[Any, tuple[Any, int]] = weakref.WeakKeyDictionary()


def _copy_around_tensors(cache: Any) -> Any:
    """Copy a cache's objects but not its tensors, which are arguments of the block like any other."""
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in tensors_in(cache)})


class _OwnCache:
    """Stands for a cache among a block's arguments, as it was before the block's forward pass. That pass and each
    recomputation get a copy of their own."""

    def __init__(self, cache: Any, *, filled: bool) -> None:
        self._cache, self._filled = cache, filled

    def made(self) -> Any:
        """Return a new copy of the cache; the tensors of a filled one are shared with the original."""
        return _copy_around_tensors(self._cache) if self._filled else copy.deepcopy(self._cache)

    def is_missing_in(self, made: Any) -> bool:
        """Return whether any tensor that the cache was filled with is no longer in the copy `made`."""
        there = {id(tensor) for tensor in tensors_in(made)} if self._filled else set()
        return self._filled and any(id(tensor) not in there for tensor in tensors_in(self._cache))


class _OwnEmptyCache(_OwnCache, Opaque):
    """The same for a cache without tensors. Its copies are made from a pickle, in a fifth of `deepcopy`'s time, since
    every block gets one in each pass."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache, filled=False)
        self._pickle: bytes | None
        try:
            self._pickle = pickle.dumps(cache, pickle.HIGHEST_PROTOCOL)
            pickle.loads(self._pickle)
        except Exception:  # such as a class defined in a function: anything may be raised
            self._pickle = None

    def made(self) -> Any:
        """Return a new copy of the cache."""
        return super().made() if self._pickle is None else pickle.loads(self._pickle)

"""Measures the cost of a block's operators, and replaces operators with kept results when the block is recomputed.

Only products are considered (matrix products and attention): the cost of all others is negligible (LoHan, Eq. 6). A
kept result equals what the recomputation would compute, to the bit, and autograd uses it in the same way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from memascend.engine.device import Generators


@dataclass(frozen=True)
class Seen:
    """A product as a forward pass ran it. `nbytes`: size of its result; 0 if the result cannot replace the product.
    `seconds`: time of the call, which on an accelerator is that of its launch alone."""

    name: str
    flops: int
    nbytes: int
    seconds: float


@dataclass
class Taken:
    """The names of one forward pass's products, in order, and the results that were taken, by the product's number."""

    names: list[str] = field(default_factory=list)
    results: dict[int, _Result] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all results, and drop the references to them here."""
        found = []
        for result in self.results.values():
            found += result.tensors
            result.count, result.tensors = len(result.tensors) or result.count, []
        return found

    def bring_back(self, tensors: list[torch.Tensor]) -> None:
        """Restore the tensors of all results, given in the order in which `tensors` has returned them."""
        rest = iter(tensors)
        for result in self.results.values():
            result.tensors = [next(rest) for _ in range(result.count)]


_TENSOR = object()  # marks a tensor among the leaves, since None is an undefined tensor (flash attention on a GPU)


@dataclass
class _Result:
    """A product's result: its pytree, with `_TENSOR` in place of its tensors, and `count` tensors."""

    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]
    count: int = 0
    changed: bool = False  # whether the block changes it in place later

    def rebuilt(self) -> Any:
        """Return the result, over new tensor objects; tensors that the block changes in place are copied."""
        # New tensors, since autograd makes the returned ones results of a node of its graph.
        given = iter([each.clone() if self.changed else each.detach() for each in self.tensors])
        return tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


class _OfAPass(TorchDispatchMode):
    """A dispatch mode for the time of one pass. If Ctrl-C, between two bytecodes, leaves it on torch's stack, it does
    nothing from then on, and is removed at the next pass or when the step is given up."""

    _is_over = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Return the context of the pass, for which the mode is on. It can be entered once."""
        take_off_left_over()
        try:
            with self:
                yield
        finally:
            self._is_over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_over:
            return func(*args, **(kwargs or {}))
        return self.dispatched(func, args, kwargs or {})

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of the pass, and return its result."""
        raise NotImplementedError


def take_off_left_over() -> None:
    """Remove modes of finished passes, which Ctrl-C has left behind, from the thread's stack."""
    over = [isinstance(each, _OfAPass) and each._is_over for each in _get_current_dispatch_mode_stack()]
    if True not in over:
        return
    others = []
    for is_over in reversed(over[over.index(True) :]):
        mode = _get_current_dispatch_mode_stack()[-1]
        if not is_over:
            others.append(_pop_mode())
            continue
        try:
            mode.__exit__(None, None, None)
        except IndexError:  # its `__exit__` was interrupted before
            _pop_mode()
    for mode in reversed(others):
        _push_mode(mode)


class Measuring(_OfAPass):
    """Measures FLOP, result sizes and seconds of a pass's products, in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        out, fixed = _run(func, args, kwargs)
        if is_product(func):
            seconds = time.perf_counter() - began
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            nbytes = sum(each.nbytes for each in tensors) if fixed else 0
            self.seen.append(Seen(str(func), _flops(func, args, kwargs, out), nbytes, seconds))
        return out


class Taking(_OfAPass):
    """Takes the results of the products with the numbers `chosen`; a result is copied before it is changed in place."""

    def __init__(self, chosen: frozenset[int]) -> None:
        super().__init__()
        self.taken, self._chosen = Taken(), chosen
        self._storages: dict[int, _Result] = {}

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable and self._storages:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._copy(self._storages.pop(leaf.untyped_storage()._cdata, None))
        out, fixed = _run(func, args, kwargs)
        if is_product(func):
            number = len(self.taken.names)
            self.taken.names.append(str(func))
            if number in self._chosen and fixed:
                self._take(number, out)
        return out

    def _take(self, number: int, out: Any) -> None:
        """Keep `out` as the result of product `number`."""
        leaves, spec = tree_flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        result = _Result([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec, tensors)
        self.taken.results[number] = result
        for each in tensors:
            self._storages[each.untyped_storage()._cdata] = result

    @staticmethod
    def _copy(result: _Result | None) -> None:
        """Copy a result's tensors, once, before the block changes one of them in place."""
        if result is not None and not result.changed:
            result.tensors, result.changed = [each.clone() for each in result.tensors], True


class Replaying(_OfAPass):
    """Replaces products with the results that were taken. Raises RuntimeError at the first product that differs from
    the forward pass's."""

    def __init__(self, taken: Taken, where: str) -> None:
        super().__init__()
        self._taken, self._where, self._number = taken, where, 0

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_product(func):
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        there = self._taken.names[number] if number < len(self._taken.names) else "none"
        if there != str(func):
            raise RuntimeError(
                f"{self._where} computes something else in its recomputation (product {number}: {func}, in forward "
                f"{there}), so that its swapped activations do not match; train without swapping activations"
            )
        result = self._taken.results.get(number)
        return func(*args, **kwargs) if result is None else result.rebuilt()


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Run an operator, and return its result and whether it may be replaced later: it changes no tensor in place and
    draws no random numbers."""
    if not (is_product(func) and torch.Tag.nondeterministic_seeded in func.tags):
        return func(*args, **kwargs), not func._schema.is_mutable
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    before = Generators(device)
    out = func(*args, **kwargs)
    return out, before == Generators(device)


def is_product(func: Any) -> bool:
    """Return whether an operator of a forward pass is a product."""
    return func._overloadpacket in flop_registry or "scaled_dot_product" in func._overloadpacket.__name__


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOP of a product, by torch's formulas; an operator that torch does not know counts as attention."""
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=out))
    query, key, value = (tuple(each.shape) for each in args[:3])
    return int(sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:])))

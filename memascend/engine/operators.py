"""A block's operators: what they cost, and results that are put in their place when the block is computed again.

Only products are looked at (matrix products and attention): all others cost nothing next to them (LoHan, Eq. 6). A
result that was kept is what the recomputation would have made, to the bit; it goes on through autograd like that.
"""

from __future__ import annotations

import contextlib
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
    """A product as a forward pass ran it. `nbytes`: of what it leaves; 0: that cannot be put in its place."""

    name: str
    flops: int
    nbytes: int


@dataclass
class Taken:
    """Of one forward pass: its products in their order, and the results that were taken, by their number."""

    names: list[str] = field(default_factory=list)
    results: dict[int, _Result] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All of them; they are let go of here."""
        found = []
        for result in self.results.values():
            found += result.tensors
            result.count, result.tensors = len(result.tensors) or result.count, []
        return found

    def bring_back(self, tensors: list[torch.Tensor]) -> None:
        rest = iter(tensors)
        for result in self.results.values():
            result.tensors = [next(rest) for _ in range(result.count)]


_TENSOR = object()  # stands where one belongs; None is what an undefined one comes as (flash attention's on a GPU)


@dataclass
class _Result:
    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]
    count: int = 0
    changed: bool = False  # in place, later on in the block

    def rebuilt(self) -> Any:
        # New tensors: autograd makes what it gets here the result of a node of its graph.
        given = iter([each.clone() if self.changed else each.detach() for each in self.tensors])
        return tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


class _OfAPass(TorchDispatchMode):
    """Around one pass. One that Ctrl-C has left on torch's stack, between two bytecodes, does nothing afterwards, and
    goes with the next pass, or when the step is given up."""

    _is_over = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
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
        raise NotImplementedError


def take_off_left_over() -> None:
    """Take modes of passes that are over, which Ctrl-C has left there, off the thread's stack."""
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
        except IndexError:  # it was interrupted in the middle of this
            _pop_mode()
    for mode in reversed(others):
        _push_mode(mode)


class Measuring(_OfAPass):
    """Finds out what the products of a pass cost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        out, fixed = _run(func, args, kwargs)
        if is_product(func):
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            nbytes = sum(each.nbytes for each in tensors) if fixed else 0
            self.seen.append(Seen(str(func), _flops(func, args, kwargs, out), nbytes))
        return out


class Taking(_OfAPass):
    """Takes the results of the products `chosen`, by number; one that is changed in place later is copied before."""

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
        leaves, spec = tree_flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        result = _Result([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec, tensors)
        self.taken.results[number] = result
        for each in tensors:
            self._storages[each.untyped_storage()._cdata] = result

    @staticmethod
    def _copy(result: _Result | None) -> None:
        if result is not None and not result.changed:
            result.tensors, result.changed = [each.clone() for each in result.tensors], True


class Replaying(_OfAPass):
    """Puts what was taken in the place of its products. Raises RuntimeError for a pass of other products, at the first
    of them."""

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
    """The result, and whether it is a new tensor that took no random numbers: leaving it out later changes no other."""
    if not (is_product(func) and torch.Tag.nondeterministic_seeded in func.tags):
        return func(*args, **kwargs), not func._schema.is_mutable
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    before = Generators(device)
    out = func(*args, **kwargs)
    return out, before == Generators(device)


def is_product(func: Any) -> bool:
    """Whether an operator is a product; none of a backward pass is asked for."""
    return func._overloadpacket in flop_registry or "scaled_dot_product" in func._overloadpacket.__name__


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=out))
    query, key, value = (tuple(each.shape) for each in args[:3])
    return int(sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:])))

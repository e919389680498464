"""Detection of parameters that a model uses outside of the forward pass of the module that owns them.

A streamed parameter has its values only while its module runs. A model that uses another module's weight (a tied head
as `F.linear(x, self.embedding.weight)` in the model's own forward) would compute with the placeholder's NaN. The first
forward pass with a graph and the first one without are observed operator by operator; in later passes the placeholder
itself reports such uses (`placeholder_parameters`), which costs a model without them nothing. A parameter found this
way is kept in memory with its unit for the whole forward pass of the model, and until backward has ended. This is not
possible for a block's weights or a matrix that is streamed in slices, which raise NotStreamable; so does an in-place
change, which would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.engine.arguments import tensors_in
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Kind, Unit
from memascend.engine.unit_weights import UnitWeights
from memascend.storage.interrupts import whole


class KeptForBackward(Protocol):
    """Keeps units that a backward pass needs, as `ModelHooks` does."""

    # Forward passes of the model in progress: the units that a pass without a graph keeps; None for one with a graph.
    model_passes: list[list[Unit] | None]

    def keep(self, unit: Unit) -> None:
        """Extend a use of the unit until backward has ended."""


class OutsideUse:
    """Finds outside uses in one engine's model, and keeps the units found in memory during each later forward pass. Not
    thread-safe."""

    def __init__(self, model: nn.Module, weights: UnitWeights, kept: KeptForBackward) -> None:
        self._weights, self._kept = weights, kept
        self._units = {
            parameter: unit
            for unit in weights.units.layout.units
            if unit.kind in (Kind.RESIDENT, Kind.LOOKED_UP)
            for _, parameter in weights.units.pairs(unit)
        }
        self._found: dict[bool, dict[str, Unit]] = {True: {}, False: {}}  # by whether the pass has a graph
        self._to_come = {True, False}
        self._watch: _Watching | None = None
        self._watched: tuple[int, int] = 0, 0  # the observed pass: the id of its list of passes, and its depth in it
        before = model.register_forward_pre_hook(self._begin)
        after = model.register_forward_hook(self._end, always_call=True)
        self._hooks = before, after

    @property
    def _passes(self) -> list[list[Unit] | None]:
        return self._kept.model_passes

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def end_cut_off(self) -> None:
        """End forward passes that were left by a BaseException such as Ctrl-C, for which torch calls no hooks."""
        while self._passes:
            self._end()

    @whole
    def _begin(self, *_: Any) -> None:
        """Hook before the model's forward pass: take the units that are used outside of their modules, and watch the
        first pass with a graph and the first one without."""
        with_graph = torch.is_grad_enabled()
        self._passes.append(None if with_graph else [])
        for unit in self._found[with_graph].values():
            self._take(unit)
        if with_graph in self._to_come and self._watch is None:
            self._to_come.discard(with_graph)
            self._watch, self._watched = _Watching(self._weights, self.hold), (id(self._passes), len(self._passes))
            self._watch.__enter__()

    @whole
    def _end(self, *_: Any) -> None:
        """Hook after the model's forward pass: end what `_begin` has begun, except what backward needs."""
        if not self._passes:  # another hook raised an error before `_begin` was called
            return
        if self._watch is not None and self._watched == (id(self._passes), len(self._passes)):
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)
        for unit in self._passes.pop() or ():
            self._weights.give_back(unit, lend=True)

    def _take(self, unit: Unit) -> None:
        """Begin a use of a unit that lasts until the end of this pass; with a graph, until backward has ended."""
        self._weights.take(unit)
        if self._passes[-1] is None:
            self._kept.keep(unit)
        else:
            self._passes[-1].append(unit)

    def hold(self, parameter: nn.Parameter) -> bool:
        """Give a parameter its values for the rest of the model's forward pass, and until backward has ended if the
        pass has a graph. Return False if that is impossible."""
        unit = self._units.get(parameter)
        if unit is None or not self._passes:
            return False
        self._found[self._passes[-1] is None][unit.key] = unit
        self._take(unit)
        return True


class _Watching(TorchDispatchMode):
    """Dispatch mode that observes one forward pass: it gives values to empty parameters where that is possible, and
    raises NotStreamable for their other uses and for in-place changes."""

    gives_values = True  # this mode gives values to empty parameters, see `placeholder_parameters`

    def __init__(self, weights: UnitWeights, hold: Callable[[nn.Parameter], bool]) -> None:
        super().__init__()
        self._names: Mapping[nn.Parameter, str] = weights.units.names
        self._nothing = weights.nothing.untyped_storage()._cdata
        self._hold = hold
        self._viewed: dict[str, None] = {}  # names of parameters of which a view was made
        self._filled: dict[int, str] = {}  # names of parameters that got values, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs or {}):
                self._require_no_parameter(tensor)
        if not _looks_at_no_value(func):
            for tensor in tensors_in((args, kwargs or {})):
                if _storage(tensor) == self._nothing and not self._fill(tensor):
                    self._refuse(func, tensor)
        return func(*args, **(kwargs or {}))

    def _fill(self, tensor: torch.Tensor) -> bool:
        """Give an empty parameter its values; return False if that is impossible or the tensor is no parameter."""
        if tensor not in self._names or not self._hold(tensor):
            return False
        self._filled[_storage(tensor)] = self._names[tensor]
        return True

    def _require_no_parameter(self, tensor: torch.Tensor) -> None:
        """Raise NotStreamable if a tensor that an operator changes in place has the memory of a parameter."""
        storage = _storage(tensor)
        if storage == self._nothing or storage in self._filled:
            which = self._names.get(tensor) or self._filled.get(storage) or self._some_viewed()
            raise NotStreamable(
                f"{which} is changed in place outside of the forward pass of its module, and the weights of a streamed "
                "model change with the optimizer's step alone: leave that out, or compute with a changed copy"
            )

    def _some_viewed(self) -> str:
        """Return the last names of parameters of which a view was made, for messages."""
        return " or ".join(list(self._viewed)[-3:]) or "a parameter"

    def _refuse(self, func: Any, tensor: torch.Tensor) -> None:
        """Raise NotStreamable for a use of an empty parameter. A view of it is only recorded."""
        name = self._names.get(tensor)
        if func.is_view or func._overloadpacket.__name__ == "detach":  # an error is raised when the result is used
            self._viewed.update({} if name is None else {name: None})
            return
        which = name or self._some_viewed()
        raise NotStreamable(
            f"{which} is used outside of the forward pass of its module, where a streamed model has no values of it, "
            "since it is a block's, or comes by slices: call the module there (a tied head as an nn.Linear with the "
            "same weight), or name a block that holds both (blocks=[...])"
        )


def _storage(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage, or 0 if it has none."""
    return tensor.untyped_storage()._cdata if tensor.numel() and tensor.layout == torch.strided else 0


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))


def _looks_at_no_value(func: Any) -> bool:
    """Return whether an operator uses only the dtype and shape of its tensors, as `x.new_zeros(...)` and
    `torch.empty_like(x)` do, and an assignment to `x.data` in inference mode."""
    name = func._overloadpacket.__name__
    return name.startswith("new_") or name.endswith("_like") or name == "_has_compatible_shallow_copy_type"

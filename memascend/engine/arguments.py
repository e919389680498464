"""The arguments of a block as its forward pass got them, so that it can be called with the same ones again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for a tensor: its number."""

    number: int


class Arguments:
    """`args` and `kwargs` taken apart: their structure, and each tensor once.

    Containers that torch's pytree knows, dataclasses and namespaces are copied, so that a block may change them; any
    other object is the caller's own.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, _Place] = {}

        def place(tensor: torch.Tensor) -> _Place:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = _Place(len(self.tensors))
                self.tensors.append(tensor)
            return numbers[id(tensor)]

        self._args, self._kwargs = _map((args, kwargs), torch.Tensor, place, {})

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with `tensors` in the places of theirs."""
        return _map((self._args, self._kwargs), _Place, lambda place: tensors[place.number], {})

    def drop_tensors(self) -> list[torch.Tensor]:
        """Hand the tensors over to the caller; the structure stays."""
        found, self.tensors = self.tensors, []
        return found


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a structure, once."""
    yield from Arguments((tree,), {}).tensors


def _map(node: Any, kind: type, change: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    if isinstance(node, kind):
        return change(node)
    if isinstance(node, torch.Tensor | torch.nn.Module | type) or node is None:
        return node
    if id(node) in seen:  # the same object twice, or a circle
        return seen[id(node)]
    known = SUPPORTED_NODES.get(type(node))
    if known is None and isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*[_map(each, kind, change, seen) for each in node])
    if known is not None:
        children, context = known.flatten_fn(node)
        return known.unflatten_fn([_map(each, kind, change, seen) for each in children], context)
    if dataclasses.is_dataclass(node) or type(node) is SimpleNamespace:
        made = seen[id(node)] = copy.copy(node)
        names = [field.name for field in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
        for name in {*names, *getattr(made, "__dict__", ())}:
            if hasattr(made, name):
                object.__setattr__(made, name, _map(getattr(made, name), kind, change, seen))
        return made
    return node

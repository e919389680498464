"""The arguments of a block as its forward pass received them, so that it can be called with them again."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES


class Opaque:
    """Base class of objects that `Arguments` passes on as they are, since they refer to no tensor."""


_LEAVES = (str, bytes, int, float, complex, type, enum.Enum, torch.nn.Module, torch.optim.Optimizer, Opaque)
_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclasses.dataclass(frozen=True)
class _Place:
    """A placeholder for the tensor with this number."""

    number: int


class Arguments:
    """The structure of `args` and `kwargs`, and each tensor in them once.

    Containers that torch's pytree knows, classes derived from dict and list, dataclasses and namespaces are copied, and
    so is every other object of a Python class with tensors in its attributes or items, so that a block may change them.
    Any other object is not copied and stays the caller's. Raises TypeError for an object with tensors that cannot be
    copied.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, _Place] = {}

        def place(tensor: torch.Tensor) -> _Place:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = _Place(len(self.tensors))
                self.tensors.append(tensor)
            return numbers[id(tensor)]

        self._args, self._kwargs = _Mapping(torch.Tensor, place)((args, kwargs))

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same arguments with `tensors` in place of the original ones, in the order of `self.tensors`."""
        made = _Mapping(_Place, lambda place: tensors[place.number])((self._args, self._kwargs))
        args, kwargs = made
        return args, kwargs

    def drop_tensors(self) -> list[torch.Tensor]:
        """Return the tensors and drop the references to them; the structure stays."""
        found, self.tensors = self.tensors, []
        return found


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a structure once."""
    seen: dict[int, Any] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, _LEAVES):
            continue
        seen[id(node)] = node
        if isinstance(node, torch.Tensor):
            yield node
        else:
            waiting += reversed(_children(node))


class _Mapping:
    """Copies a structure and changes every node of one type. An object that occurs twice is copied once."""

    def __init__(self, kind: type, change: Callable[[Any], Any]) -> None:
        self._kind, self._change = kind, change
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive, so that no other object can get the id of one of them
        self._has_some: dict[int, bool] = {}

    def __call__(self, node: Any) -> Any:
        """Return `node` with all nodes of the type changed. Leaves, and objects of other classes without such nodes,
        are returned as they are. Raises TypeError for an object that cannot be copied."""
        if isinstance(node, self._kind):
            return self._change(node)
        if node is None or isinstance(node, (*_LEAVES, torch.Tensor)):
            return node
        if id(node) in self._made:  # a shared object, or a cycle
            return self._made[id(node)]
        if (known := SUPPORTED_NODES.get(type(node))) is not None:
            children, context = known.flatten_fn(node)
            return known.unflatten_fn([self(each) for each in children], context)
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*[self(each) for each in node])
        if not _is_value(node) and not (_is_of_python(node) and self._has(node)):
            return node
        made = self._made[id(node)] = _shallow(node)
        self._originals.append(node)
        for name, value in _attributes(made).items():
            object.__setattr__(made, name, self(value))
        if isinstance(made, dict):
            for key, value in list(dict.items(made)):
                dict.__setitem__(made, key, self(value))
        elif isinstance(made, list):
            list.__setitem__(made, slice(None), [self(each) for each in list.__iter__(made)])
        return made

    def _has(self, root: Any) -> bool:
        """Return whether a node of the type can be reached from `root`; parameters of a model do not count."""
        if id(root) not in self._has_some:
            self._look_at(root)
        return self._has_some[id(root)]

    def _look_at(self, root: Any) -> None:
        """Record for every object that `root` leads to whether it leads to a node of the type."""
        parents: dict[int, list[int]] = {id(root): []}
        nodes, waiting, found = [root], [root], []
        while waiting:
            node = waiting.pop()
            if isinstance(node, self._kind) and not isinstance(node, torch.nn.Parameter):
                found.append(id(node))
            if isinstance(node, (self._kind, torch.Tensor, *_LEAVES)):
                continue
            for child in _children(node):
                if id(child) not in parents:
                    parents[id(child)] = []
                    nodes.append(child)
                    waiting.append(child)
                parents[id(child)].append(id(node))
        self._originals += nodes
        self._has_some.update(dict.fromkeys(parents, False))
        while found:
            reached = found.pop()
            if not self._has_some[reached]:
                self._has_some[reached] = True
                found += parents[reached]


def _children(node: Any) -> list[Any]:
    """Return the nodes that a node refers to directly; none if its contents are not followed."""
    if (known := SUPPORTED_NODES.get(type(node))) is not None:
        return list(known.flatten_fn(node)[0])
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(node)
    if not _is_value(node) and not _is_of_python(node):
        return []
    children = list(_attributes(node).values())
    if isinstance(node, dict):
        children += dict.values(node)
    elif isinstance(node, list):
        children += list.__iter__(node)
    return children


def _is_value(node: Any) -> bool:
    """Return whether a node is copied even if it contains no tensor, since a block may add one."""
    if isinstance(node, dict | list | UserDict | UserList):
        return _is_of_python(node)
    return (dataclasses.is_dataclass(node) and not isinstance(node, type)) or type(node) is SimpleNamespace


def _is_of_python(node: Any) -> bool:
    """Return whether the node's class is a heap type, as classes defined in Python are."""
    return bool(type(node).__flags__ & _PYTHON_CLASS)


def _attributes(node: Any) -> dict[str, Any]:
    """Return an object's attributes by name, including those in slots."""
    found = dict(getattr(node, "__dict__", {}))
    for kind in type(node).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(node, name):
                found[name] = getattr(node, name)
    return found


def _shallow(node: Any) -> Any:
    """Return a shallow copy. Raises TypeError for an object with a `__del__`, or one that copy.copy refuses."""
    if hasattr(type(node), "__del__"):
        raise TypeError(f"an argument of type {type(node).__name__} holds tensors, and has a __del__ of its own")
    try:
        return copy.copy(node)
    except Exception as error:
        raise TypeError(f"an argument of type {type(node).__name__} holds tensors, and copy.copy: {error}") from error

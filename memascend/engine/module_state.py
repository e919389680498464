"""What a forward pass changes of its modules beside parameters: buffers and attributes, as before and after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ABSENT = object()
_OWN = frozenset(vars(nn.Module()))  # attributes of every module: parameters, hooks, ...


class ModuleState:
    """Of a module and all modules in it, at one moment: buffers and tensors in attributes (by value), attributes (by
    reference), and lists, dicts, sets and deques in attributes (by their items).

    Other objects that an attribute refers to are not copied: what a forward pass changes of them stays changed.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._attributes = [(owner, dict(owner)) for module in modules for owner in (vars(module), module._buffers)]
        tensors: dict[int, torch.Tensor] = {}
        containers: dict[int, Any] = {}
        for module in modules:
            for buffer in module._buffers.values():
                if buffer is not None:
                    tensors[id(buffer)] = buffer
            for name, value in vars(module).items():
                if name not in _OWN:
                    _collect(value, tensors, containers)
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._containers = [(each, _items(each)) for each in containers.values()]

    def keep_changes(self) -> bool:
        """Forget what is still as it was; whether anything is not."""
        self._attributes = [
            (owner, before)
            for owner, before in (
                (owner, {key: before.get(key, _ABSENT) for key in _different(owner, before)})
                for owner, before in self._attributes
            )
            if before
        ]
        # By value: an operator may change running averages without a word to autograd.
        self._tensors = [(tensor, values) for tensor, values in self._tensors if not _equal(tensor, values)]
        self._containers = [(each, items) for each, items in self._containers if not _has_items(each, items)]
        return bool(self._attributes or self._tensors or self._containers)

    def restore(self) -> None:
        """Undo what has changed since."""
        for owner, before in self._attributes:
            for key in _different(owner, before):
                _set(owner, key, before.get(key, _ABSENT))
        self._restore_values()

    def put_back(self) -> None:
        """The values at that moment, of what `keep_changes` found changed."""
        for owner, before in self._attributes:
            for key, value in before.items():
                _set(owner, key, value)
        self._restore_values()

    def _restore_values(self) -> None:
        for tensor, values in self._tensors:
            if not _equal(tensor, values):
                tensor.data.copy_(values)  # `data`: autograd need not see it, whoever saved the tensor saved this value
        for each, items in self._containers:
            if not _has_items(each, items):
                each.clear()
                each.extend(items) if isinstance(each, list | deque) else each.update(items)


def _collect(value: Any, tensors: dict[int, torch.Tensor], containers: dict[int, Any]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not isinstance(value, nn.Parameter):
            tensors[id(value)] = value
    elif type(value) in (list, dict, set, deque) and id(value) not in containers:
        containers[id(value)] = value
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, tensors, containers)


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _has_items(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), items.items(), strict=True)
        return all(key is known and value is before for (key, value), (known, before) in pairs)
    if isinstance(container, set):
        return all(each in container for each in items)
    return all(each is before for each, before in zip(container, items, strict=True))


def _equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    return tensor.shape == values.shape and torch.equal(tensor, values)


def _set(owner: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def _different(owner: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **owner} if owner.get(key, _ABSENT) is not before.get(key, _ABSENT)]


@contextmanager
def undisturbed(modules: list[nn.Module], entry: ModuleState | None = None) -> Iterator[None]:
    """What runs inside leaves buffers and attributes as they were. It finds them as at `entry`, if given."""
    before = ModuleState(modules)
    if entry is not None:
        entry.put_back()
    try:
        yield
    finally:
        before.restore()

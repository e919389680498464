"""What a forward pass changes of its modules beside parameters: buffers and attributes, as before and after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ABSENT = object()


class ModuleState:
    """Buffers (by value) and attributes (by reference) of a module and all modules in it, at one moment.

    An object that an attribute refers to is not copied: a list that a forward pass appends to stays changed.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._attributes = [(owner, dict(owner)) for module in modules for owner in (vars(module), module._buffers)]
        buffers = {buffer for module in modules for buffer in module._buffers.values() if buffer is not None}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

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
        self._buffers = [(buffer, values) for buffer, values in self._buffers if not torch.equal(buffer, values)]
        return bool(self._attributes or self._buffers)

    def restore(self) -> None:
        """Undo what has changed since."""
        for owner, before in self._attributes:
            for key in _different(owner, before):
                _set(owner, key, before.get(key, _ABSENT))
        self._restore_buffers()

    def put_back(self) -> None:
        """The values at that moment, of what `keep_changes` found changed."""
        for owner, before in self._attributes:
            for key, value in before.items():
                _set(owner, key, value)
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        for buffer, values in self._buffers:
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)  # `data`: autograd need not see it, whoever saved the buffer saved this value


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

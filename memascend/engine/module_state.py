"""What a forward pass depends on and changes beside parameters: its modules' buffers and attributes, and the generators
of random numbers that are not torch's own (Python's, NumPy's, a torch.Generator in an attribute)."""

from __future__ import annotations

import enum
import functools
import operator
import random
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

_ABSENT = object()
_OWN = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module: parameters, hooks, ...


class ValuesAreGone(RuntimeError):
    """A tensor has been changed in place since, and its values of that moment were not kept."""


class ModuleState:
    """Of a module and all modules in it, at one moment: buffers and tensors in attributes (by value), attributes (by
    reference), what the attributes refer to (lists, dicts, sets and deques by their items, objects by their own
    attributes), and generators of random numbers. What these refer to in their turn is looked at in containers alone.
    """

    def __init__(self, modules: list[nn.Module], *, generators: bool = True) -> None:
        """`generators`: whether those of random numbers are asked for their states (most of what this takes)."""
        own = [(vars(module), _without_own(vars(module))) for module in modules]
        self._attributes = [*own, *((module._buffers, dict(module._buffers)) for module in modules)]
        tensors: dict[int, torch.Tensor] = {}
        containers: dict[int, Any] = {}
        objects: dict[int, dict[str, Any]] = {}
        self._generators: list[_Generator] = [_PythonGenerator(), _NumpyGenerator()] if generators else []
        for buffers in (module._buffers for module in modules):
            tensors.update((id(buffer), buffer) for buffer in buffers.values() if buffer is not None)
        for value in (value for _, attributes in own for value in attributes.values()):
            kind = _kind(type(value))
            if kind is _Kind.PLAIN:
                if id(value) not in objects and isinstance(value.__dict__, dict):
                    objects[id(value)] = vars(value)
            elif kind is not _Kind.NOTHING:
                _collect(value, tensors, containers, self._generators if generators else [])
        self._attributes += [(owner, dict(owner)) for owner in objects.values()]
        # (tensor, its values, or None and the version that it had with them)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None, int]] = [
            (tensor, tensor.detach().clone(), 0) for tensor in tensors.values()
        ]
        self._containers = [(each, _items(each)) for each in containers.values()]

    def forget_unchanged(self) -> None:
        """Values of tensors, and states of generators, that are now as they were then, need not be kept."""
        # By value: an operator may change running averages without a word to autograd.
        self._tensors = [
            (tensor, None, _version(tensor)) if values is None or _equal(tensor, values) else (tensor, values, 0)
            for tensor, values, _ in self._tensors
        ]
        self._generators = [each for each in self._generators if each.has_drawn()]

    @property
    def has_drawn(self) -> bool:
        """Whether the state of a generator is kept."""
        return bool(self._generators)

    def drawn(self) -> bool:
        """Whether a generator of random numbers has been used since."""
        return any(each.has_drawn() for each in self._generators)

    def changed_attributes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """(attributes, name) of those that are other objects now."""
        for owner, before in self._attributes:
            yield from ((owner, key) for key in _different(owner, before))

    def changes(self) -> Iterator[tuple[Any, Any]]:
        """What is not as it was, before `forget_unchanged`: (attributes, name), (None, tensor) or (None, container)."""
        yield from self.changed_attributes()
        yield from ((None, tensor) for tensor, values, _ in self._tensors if not _equal(tensor, values))
        yield from ((None, each) for each, items in self._containers if not _has_items(each, items))

    def restore(self) -> None:
        """Everything is as at that moment. Raises ValuesAreGone where `forget_unchanged` has forgotten what has changed
        since."""
        for owner, before in self._attributes:
            for key in _different(owner, before):
                _set(owner, key, before.get(key, _ABSENT))
        for tensor, values, version in self._tensors:
            if values is None:
                if _version(tensor) != version:
                    raise ValuesAreGone(f"of {_words(tensor)}")
            elif not _equal(tensor, values):
                tensor.data.copy_(values)  # `data`: autograd need not see it, whoever saved the tensor saved this value
        for each, items in self._containers:
            if not _has_items(each, items):
                each.clear()
                each.extend(items) if isinstance(each, list | deque) else each.update(items)
        for generator in self._generators:
            generator.restore()


class _Generator:
    """Of random numbers, and its state at one moment."""

    def __init__(self) -> None:
        self._then = self.state()

    def state(self) -> Any:
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        raise NotImplementedError

    def has_drawn(self) -> bool:
        return self.state() != self._then

    def restore(self) -> None:
        if self.has_drawn():
            self.set_state(self._then)


class _PythonGenerator(_Generator):
    def state(self) -> Any:
        return random.getstate()

    def set_state(self, state: Any) -> None:
        random.setstate(state)


class _NumpyGenerator(_Generator):
    def state(self) -> Any:
        name, key, *rest = numpy.random.get_state()
        return name, key.tobytes(), *rest

    def set_state(self, state: Any) -> None:
        name, key, *rest = state
        numpy.random.set_state((name, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


class _TorchGenerator(_Generator):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        super().__init__()

    def state(self) -> Any:
        return self._generator.get_state().numpy().tobytes()

    def set_state(self, state: Any) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Kind(enum.Enum):
    """What becomes of a value in an attribute or a container."""

    NOTHING = enum.auto()  # it is known by its reference
    TENSOR = enum.auto()
    GENERATOR = enum.auto()
    CONTAINER = enum.auto()
    PLAIN = enum.auto()  # an object that holds values, such as a namespace or a configuration


@functools.lru_cache(maxsize=4096)
def _kind(of: type) -> _Kind:
    if issubclass(of, torch.Tensor):
        return _Kind.TENSOR
    if issubclass(of, torch.Generator):
        return _Kind.GENERATOR
    if of in (list, dict, set, deque):
        return _Kind.CONTAINER
    holds_values = of.__dictoffset__ != 0 and not any("__call__" in vars(each) for each in of.__mro__)
    return _Kind.PLAIN if holds_values and not issubclass(of, types.ModuleType) else _Kind.NOTHING


def _collect(
    value: Any, tensors: dict[int, torch.Tensor], containers: dict[int, Any], generators: list[_Generator]
) -> None:
    kind = _kind(type(value))
    if kind is _Kind.TENSOR:
        if value.layout == torch.strided and not isinstance(value, nn.Parameter):
            tensors[id(value)] = value
    elif kind is _Kind.GENERATOR:
        generators.append(_TorchGenerator(value))
    elif kind is _Kind.CONTAINER and id(value) not in containers:
        containers[id(value)] = value
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, tensors, containers, generators)


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


def _without_own(owner: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in owner.items() if key not in _OWN}


def _different(owner: dict[str, Any], before: dict[str, Any]) -> list[str]:
    now = _without_own(owner)
    if list(now) == list(before) and all(map(operator.is_, now.values(), before.values())):
        return []
    return [key for key in {**before, **now} if now.get(key, _ABSENT) is not before.get(key, _ABSENT)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@contextmanager
def undisturbed(modules: list[nn.Module], entry: ModuleState) -> Iterator[None]:
    """What runs inside finds everything as at `entry`, and leaves it as it was. Raises ValuesAreGone."""
    before = ModuleState(modules, generators=entry.has_drawn)  # a pass that drew no numbers draws none again
    try:
        entry.restore()
        yield
    finally:
        before.restore()

"""The state besides parameters that a forward pass depends on and changes: buffers and attributes of its modules, and
random number generators that are not torch's own (Python's, NumPy's, any in an attribute)."""

from __future__ import annotations

import array
import functools
import operator
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress, islice
from typing import Any

import numpy
import torch
from torch import nn

from memascend.engine.attribute_kinds import KINDS, ValueKind, has_dict, slots_of, that_matter
from memascend.engine.random_generators import NumpyGenerator, PythonGenerator, RandomGenerator, generator_of

_ABSENT = object()
_OWN = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module: parameters, hooks, ...
_DEEP = 4  # nested objects that are followed
_SMALL = 4096  # arrays of up to so many bytes are always kept


class ValuesAreGone(RuntimeError):
    """A tensor or array was changed in place after the snapshot, and its values of then were not kept."""


class ModuleState:
    """A snapshot of modules: their buffers, their attributes, what these refer to, and random number generators.

    Attributes are recorded by reference. The values that they refer to are recorded if their type is one of these:

    - tensors, NumPy arrays, bytearrays and array.arrays: by value. Parameters, sparse tensors, read-only arrays and
      subclasses of NumPy's array are left out.
    - lists, dicts, sets, deques, Counters, OrderedDicts and defaultdicts, but none of their subclasses: by their items.
      Tuples are followed.
    - objects: by their attributes and slots, by reference. Left out are modules, functions, and anything callable.

    The values of items, attributes and slots are recorded in the same way, down to the attributes of the fourth nested
    object. Objects of classes of torch, of the standard library (except namespaces), of memascend, and configurations
    of transformers are recorded by their own attributes alone. Attributes of classes, globals, closures and items of
    subclasses of containers are not recorded. Iterators are recorded as such (`iterators`), without their position.
    """

    def __init__(self, modules: list[nn.Module], *, generators: bool = True, also: Iterable[Any] = ()) -> None:
        """Take the snapshot. `generators`: whether the states of random number generators are recorded. `also`: values
        that are recorded as if attributes referred to them."""
        buffers = [module._buffers for module in modules]
        self._of_modules = _References([*map(vars, modules), *buffers], without=_OWN)
        found = _Found(chain.from_iterable(map(dict.values, buffers)))
        found.add(chain(self._of_modules.values, also))
        self._of_objects = _References(found.attributes)
        self._objects, self._slots = found.objects, found.slots
        # (tensor, values, 0), or (tensor, None, its version) once the values are dropped
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None, int]] = [
            (tensor, tensor.detach().clone(), 0) for tensor in found.tensors.values()
        ]
        # (array, bytes, 0), or (array, None, hash of the bytes) once the bytes are dropped
        self._arrays: list[tuple[Any, bytes | None, int]] = [(each, _bytes(each), 0) for each in found.arrays]
        self._containers, self.iterators = found.containers, found.iterators
        self._generators: list[RandomGenerator] = []
        if generators:
            self._generators = [PythonGenerator(), NumpyGenerator(), *map(generator_of, found.generators)]

    @property
    def referred_to(self) -> list[Any]:
        """The values that attributes referred to in the snapshot and that are recorded by more than their reference."""
        tensors, arrays = [each for each, *_ in self._tensors], [each for each, *_ in self._arrays]
        return [*self._objects, *tensors, *arrays, *(each for each, _ in self._containers)]

    def forget_unchanged(self) -> None:
        """Drop the values of tensors and large arrays, and the states of generators, that have not changed since."""
        # Compared by value: an operator may change running averages unnoticed by autograd.
        self._tensors = [
            (tensor, None, _version(tensor)) if values is None or _equal(tensor, values) else (tensor, values, 0)
            for tensor, values, _ in self._tensors
        ]
        self._arrays = [
            (each, None, hash(values))
            if values is not None and len(values) > _SMALL and _bytes(each) == values
            else (each, values, known)
            for each, values, known in self._arrays
        ]
        self._generators = [each for each in self._generators if each.has_drawn()]

    @property
    def has_drawn(self) -> bool:
        """Whether the state of any generator is kept."""
        return bool(self._generators)

    def drawn(self) -> bool:
        """Return whether a random number generator has been used since the snapshot."""
        return any(each.has_drawn() for each in self._generators)

    def changed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Yield (attributes, name) of each attribute, and (object, name) of each slot, that is another object now."""
        for owner, key, _ in chain(self._of_modules.changed(), self._of_objects.changed()):
            yield owner, key
        yield from ((owner, slot.__name__) for owner, slot, value in self._slots if _in_slot(owner, slot) is not value)

    def changes(self) -> Iterator[tuple[Any, Any]]:
        """Yield what differs from the snapshot: (attributes, name), (object, name), or None and a tensor, an array or a
        container. To be called before `forget_unchanged`."""
        yield from self.changed_attributes()
        yield from (
            (None, tensor) for tensor, values, _ in self._tensors if values is None or not _equal(tensor, values)
        )
        yield from ((None, each) for each, values, _ in self._arrays if _bytes(each) != values)
        yield from ((None, each) for each, items in self._containers if not _has_items(each, items))

    def restore(self) -> None:
        """Restore all that is recorded to the snapshot. Raises ValuesAreGone if something has changed whose values
        `forget_unchanged` has dropped."""
        for references in (self._of_modules, self._of_objects):
            for owner, key, value in list(references.changed()):
                _set(owner, key, value)
        for owner, slot, value in self._slots:
            if _in_slot(owner, slot) is not value:
                _set_slot(owner, slot, value)
        for tensor, values, version in self._tensors:
            if values is None:
                if _version(tensor) != version:
                    raise ValuesAreGone(f"of {_words(tensor)}")
            elif not _equal(tensor, values):
                tensor.data.copy_(values)  # `data`: autograd need not see it, since a graph saved this value
        for each, raw, known in self._arrays:
            now = _bytes(each)
            if raw is None:
                if hash(now) != known:
                    raise ValuesAreGone(f"of {_words(each)}")
            elif now != raw:
                _set_bytes(each, raw)
        for each, items in self._containers:
            if not _has_items(each, items):
                _set_items(each, items)
        for generator in self._generators:
            generator.restore()


class _References:
    """A snapshot of references. `owners`: dicts of attributes; names in `without` do not count.

    All dicts are copied and compared as one, since nearly always nothing has changed.
    """

    def __init__(self, owners: list[dict[str, Any]], *, without: frozenset[str] = frozenset()) -> None:
        self._owners, self._without = owners, without
        self._keys, self._sizes = _names(owners), list(map(len, owners))
        self._counts = _that_count(self._keys, without)
        self.values = self._now()

    def changed(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield (owner, name, value in the snapshot or _ABSENT) of each attribute that has changed."""
        owners = self._owners
        same_names = _names(owners) == self._keys and list(map(len, owners)) == self._sizes
        if same_names and all(map(operator.is_, self._now(), self.values)):
            return
        keys, values = iter(self._keys), iter(self.values)
        for owner, size in zip(owners, self._sizes, strict=True):
            before = {key: next(values) for key in islice(keys, size) if key not in self._without}
            for key in {**before, **owner}:
                if key not in self._without and owner.get(key, _ABSENT) is not before.get(key, _ABSENT):
                    yield owner, key, before.get(key, _ABSENT)

    def _now(self) -> list[Any]:
        """Return the current values of all attributes that count, in order."""
        return list(compress(chain.from_iterable(map(dict.values, self._owners)), self._counts))


def _names(owners: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(chain.from_iterable(map(dict.keys, owners)))  # in the order of `dict.values`, also for an OrderedDict


@functools.lru_cache(maxsize=128)  # blocks of one kind have the same names, in the same order
def _that_count(keys: tuple[str, ...], without: frozenset[str]) -> tuple[bool, ...]:
    """Return for each key whether changes of its attribute count."""
    return tuple(key not in without for key in keys)


class _Found:
    """The values that attributes refer to, each once. `buffers`: tensors of any layout, or None."""

    def __init__(self, buffers: Iterable[torch.Tensor | None]) -> None:
        self.tensors = {id(buffer): buffer for buffer in buffers if buffer is not None}
        self.generators: list[Any] = []
        self.iterators: list[Any] = []
        self.arrays: list[Any] = []
        self.containers: list[tuple[Any, Any]] = []  # and their items
        self.objects: list[Any] = []
        self.attributes: list[dict[str, Any]] = []  # attributes of objects
        self.slots: list[tuple[Any, types.MemberDescriptorType, Any]] = []  # slots of objects, and their values
        self._seen: set[int] = set()

    def add(self, values: Iterable[Any]) -> None:
        """Add the values of modules' attributes, and what these refer to in turn."""
        waiting = that_matter(values)
        for _ in range(_DEEP):
            if not waiting:
                return
            waiting = that_matter(self._of(self._objects_in(waiting)))

    def _objects_in(self, waiting: list[Any]) -> list[Any]:
        """Record the values that are not objects, and return the objects."""
        objects = []
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            kind = KINDS[type(value)]
            if kind is ValueKind.PLAIN or kind is ValueKind.INERT:
                objects.append(value)
            elif kind is ValueKind.CONTAINER:
                self.containers.append((value, _items(value)))
                waiting += that_matter(value.values() if isinstance(value, dict) else value)
            elif kind is ValueKind.TUPLE:
                waiting += that_matter(value)
            elif kind is ValueKind.TENSOR:
                if value.layout == torch.strided and not isinstance(value, nn.Parameter):
                    self.tensors[id(value)] = value
            elif kind is ValueKind.GENERATOR:
                self.generators.append(value)
            elif kind is ValueKind.ITERATOR:
                self.iterators.append(value)
            elif not isinstance(value, numpy.ndarray):
                self.arrays.append(value)
            elif value.dtype == object and value.flags.writeable:
                self.containers.append((value, _items(value)))
                waiting += that_matter(value.flat)
            elif value.flags.writeable and not value.dtype.hasobject:
                self.arrays.append(value)
        return objects

    def _of(self, objects: list[Any]) -> list[Any]:
        """Record the objects' attributes and slots, and return the values of those that are followed."""
        self.objects += objects
        values: list[Any] = []
        for each in objects:
            of: Any = type(each)
            if has_dict(of):
                attributes = object.__getattribute__(each, "__dict__")
                if isinstance(attributes, dict):
                    self.attributes.append(attributes)
                    if KINDS[of] is ValueKind.PLAIN:
                        values += attributes.values()
            if KINDS[of] is ValueKind.PLAIN:
                slots = [(each, slot, _in_slot(each, slot)) for slot in slots_of(of)]
                self.slots += slots
                values += [value for _, _, value in slots]
        return values


def _items(container: Any) -> Any:
    """Return a shallow copy of a container."""
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else container.copy()


def _has_items(container: Any, items: Any) -> bool:
    """Return whether a container has these items, compared by identity (those of a set: by equality)."""
    if len(container) != len(items):
        return False
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, numpy.ndarray):
        return container.shape == items.shape and all(map(operator.is_, container.flat, items.flat))
    if isinstance(container, dict) and not all(map(operator.is_, container.values(), items.values())):
        return False
    return all(map(operator.is_, container, items))


def _set_items(container: Any, items: Any) -> None:
    """Replace a container's items in place."""
    if isinstance(container, numpy.ndarray):
        container[...] = items
        return
    container.clear()
    container.extend(items) if isinstance(container, list | deque) else container.update(items)


def _bytes(each: Any) -> bytes:
    return bytes(each) if isinstance(each, bytearray) else each.tobytes()


def _set_bytes(each: Any, values: bytes) -> None:
    """Set an array's contents in place. Raises ValuesAreGone for a NumPy array whose size has changed."""
    if isinstance(each, bytearray):
        each[:] = values
    elif isinstance(each, array.array):
        each[:] = array.array(each.typecode, values)
    elif each.nbytes == len(values):
        each[...] = numpy.frombuffer(values, each.dtype).reshape(each.shape)
    else:
        raise ValuesAreGone(f"of {_words(each)}")


def _in_slot(owner: Any, slot: types.MemberDescriptorType) -> Any:
    """Return the value in an object's slot, or _ABSENT."""
    try:
        return slot.__get__(owner, type(owner))
    except AttributeError:
        return _ABSENT


def _set_slot(owner: Any, slot: types.MemberDescriptorType, value: Any) -> None:
    """Set an object's slot, or clear it for _ABSENT."""
    if value is _ABSENT:
        slot.__delete__(owner)
    else:
        slot.__set__(owner, value)


def _equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    return tensor.shape == values.shape and torch.equal(tensor, values)


def _set(owner: dict[str, Any], key: str, value: Any) -> None:
    """Set an attribute, or remove it for _ABSENT."""
    if value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def _version(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place changes; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _words(each: Any) -> str:
    if isinstance(each, torch.Tensor | numpy.ndarray):
        return f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}"
    return f"{type(each).__name__} of {len(each)}"


@contextmanager
def undisturbed(modules: list[nn.Module], entry: ModuleState) -> Iterator[None]:
    """Return a context in which everything that `entry` records is as in that snapshot. On exit, that and the modules'
    state are as on entry. Raises ValuesAreGone."""
    # A pass that drew no random numbers draws none when it is repeated.
    before = ModuleState(modules, generators=entry.has_drawn, also=entry.referred_to)
    try:
        entry.restore()
        yield
    finally:
        before.restore()

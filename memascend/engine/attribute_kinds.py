"""How `ModuleState` tracks a value that a module's attributes refer to, by the type of the value."""

from __future__ import annotations

import array
import enum
import functools
import io
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import compress
from typing import Any

import numpy
import torch


class ValueKind(enum.Enum):
    """How a value in an attribute or a container is tracked."""

    NOTHING = enum.auto()  # by its reference alone
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    GENERATOR = enum.auto()
    ITERATOR = enum.auto()
    CONTAINER = enum.auto()
    TUPLE = enum.auto()
    PLAIN = enum.auto()  # an object that holds values, such as a namespace; its attributes are followed
    INERT = enum.auto()  # an object whose attributes are compared by reference and not followed


CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)


_ARRAYS = (numpy.ndarray, bytearray, array.array)


_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


# Modules of the standard library with classes that hold other code's values, or are bases of such classes.
_OPEN = frozenset({"builtins", "types", "argparse", "collections", "abc", "typing", "dataclasses"})


def _kind_of(of: Any) -> ValueKind:
    """Return how values of this type are tracked."""
    if issubclass(of, torch.Tensor):
        return ValueKind.TENSOR
    if issubclass(of, _GENERATORS) and not issubclass(of, random.SystemRandom):  # which has no state
        return ValueKind.GENERATOR
    if hasattr(of, "__next__") and not issubclass(of, io.IOBase):
        return ValueKind.ITERATOR
    if of in CONTAINERS:
        return ValueKind.CONTAINER
    if of in _ARRAYS:
        return ValueKind.ARRAY
    if of is tuple:
        return ValueKind.TUPLE
    if issubclass(of, types.ModuleType) or any("__call__" in vars(each) for each in of.__mro__):
        return ValueKind.NOTHING
    if any(map(_is_inert, of.__mro__)):
        return ValueKind.INERT if has_dict(of) else ValueKind.NOTHING
    return ValueKind.PLAIN if has_dict(of) or slots_of(of) else ValueKind.NOTHING


def _is_inert(of: type) -> bool:
    """Return whether the attributes of a class's objects are not followed.

    Threads, files, loggers and optimizers refer to internals that other threads may use. Each block of a transformers
    model has a configuration, which takes long to walk through.
    """
    module = str(of.__module__)
    package = module.partition(".")[0]
    if package == "transformers":
        return "configuration" in module
    return package in ("torch", "memascend") or (package in sys.stdlib_module_names and package not in _OPEN)


@functools.lru_cache(maxsize=4096)
def has_dict(of: type) -> bool:
    """Return whether objects of this type have an attribute dict that no property named `__dict__` hides."""
    found = [vars(each)["__dict__"] for each in of.__mro__ if "__dict__" in vars(each)]
    known = types.GetSetDescriptorType | types.MemberDescriptorType  # not a property named `__dict__`
    return bool(found) and all(isinstance(each, known) for each in found)


@functools.lru_cache(maxsize=4096)
def slots_of(of: type) -> tuple[types.MemberDescriptorType, ...]:
    """Return the descriptors of all slots that a type and its bases define."""
    bases = [vars(each) for each in of.__mro__ if "__slots__" in vars(each)]
    return tuple(each for base in bases for each in base.values() if isinstance(each, types.MemberDescriptorType))


class _OfTypes(dict[type, Any]):
    """Cache of a function's results by type, so that a look-up is a plain dict access."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __missing__(self, of: type) -> Any:
        if len(self) >= 4096:
            self.clear()
        self[of] = answer = self._answer(of)
        return answer


KINDS = _OfTypes(_kind_of)


_MATTERS = _OfTypes(lambda of: KINDS[of] is not ValueKind.NOTHING)


def that_matter(values: Iterable[Any]) -> list[Any]:
    """Return those values that are tracked by more than their reference, in order."""
    values = list(values)
    return list(compress(values, map(_MATTERS.__getitem__, map(type, values))))

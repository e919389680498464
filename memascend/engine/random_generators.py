"""Random number generators whose state can be compared and restored: Python's, NumPy's, and those in attributes."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from typing import Any

import numpy
import torch


class RandomGenerator:
    """A random number generator, and its state at the creation of this object."""

    def __init__(self) -> None:
        self._then = self.state()

    def state(self) -> Any:
        """Return the generator's current state; two states can be compared with `==`."""
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        """Set the generator to a state that `state` has returned."""
        raise NotImplementedError

    def has_drawn(self) -> bool:
        """Return whether the generator's state has changed since this object was created."""
        return bool(self.state() != self._then)

    def restore(self) -> None:
        """Restore the state that the generator had when this object was created."""
        if self.has_drawn():
            self.set_state(self._then)


class PythonGenerator(RandomGenerator):
    """The global generator of Python's `random` module."""

    def state(self) -> Any:
        return random.getstate()

    def set_state(self, state: Any) -> None:
        random.setstate(state)


class NumpyGenerator(RandomGenerator):
    """NumPy's global generator (`numpy.random.get_state`)."""

    # The last memory contents of the generator, and the state that they stand for: get_state() takes 40 us, 60 times as
    # long as reading the memory. The memory has the whole state except a cached normal number, if there is one. (So a
    # loop that restores a state which differs from the known one only in such a number is not detected.)
    _known: tuple[bytes, Any] = b"", None

    def state(self) -> Any:
        memory = _memory_of_numpy_generator()
        known, state = NumpyGenerator._known
        if known and memory == known:
            return state
        now: Any = numpy.random.get_state()
        name, key, position, *normal = now
        state = name, key.tobytes(), position, *normal
        holds_all = memory == state[1] + position.to_bytes(4, sys.byteorder) and not normal[0]
        NumpyGenerator._known = (memory, state) if holds_all else (b"", None)
        return state

    def set_state(self, state: Any) -> None:
        name, key, *rest = state
        NumpyGenerator._known = b"", None
        numpy.random.set_state((name, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


def _memory_of_numpy_generator() -> bytes:
    """Return the generator's 624 words and its position as bytes; empty if NumPy's default MT19937 was replaced."""
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not numpy.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


class _TorchGenerator(RandomGenerator):
    """A `torch.Generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        super().__init__()

    def state(self) -> Any:
        return self._generator.get_state().numpy().tobytes()

    def set_state(self, state: Any) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _GeneratorInAttribute(RandomGenerator):
    """A `random.Random`, NumPy `Generator` or NumPy `RandomState`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        super().__init__()

    def state(self) -> Any:
        if isinstance(self._generator, random.Random):
            return self._generator.getstate()
        numbers = self._generator
        return pickle.dumps(
            numbers.get_state(legacy=False)
            if isinstance(numbers, numpy.random.RandomState)
            else numbers.bit_generator.state
        )

    def set_state(self, state: Any) -> None:
        if isinstance(self._generator, random.Random):
            self._generator.setstate(state)
        elif isinstance(self._generator, numpy.random.RandomState):
            self._generator.set_state(pickle.loads(state))
        else:
            self._generator.bit_generator.state = pickle.loads(state)


def generator_of(of: Any) -> RandomGenerator:
    """Return the wrapper of a torch, NumPy or Python generator object."""
    return _TorchGenerator(of) if isinstance(of, torch.Generator) else _GeneratorInAttribute(of)

"""Inputs of blocks between forward and backward: on a tier, through a few slots, so that depth costs no memory.

Backward needs them in reverse order (for micro-batches side by side block by block, each in the order of the
micro-batches), and the next ones are read ahead. The slots are as large as the largest input so far, and of one dtype.
A larger input that comes while others are on the tier, as the first one of a decoder may, waits in memory once; the
next pass has slots for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memascend.engine.buffer_table import StreamOptions
from memascend.engine.buffers import EngineBuffers
from memascend.engine.device import Copies
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import padded
from memascend.engine.protocols import Storage
from memascend.engine.weights import WeightStream
from memascend.storage.interrupts import whole


class KeptInputs:
    """The block inputs of one model. `tier()` creates the storage when it is first needed. Not thread-safe."""

    def __init__(
        self, buffers: EngineBuffers, tier: Callable[[], Storage], wait_s: float, copies: Copies | None = None
    ) -> None:
        self._buffers, self._tier, self._wait_s, self._copies = buffers, tier, wait_s, copies
        self._stream: WeightStream | None = None
        self._coming: tuple[str, torch.Tensor, int, Any] | None = None  # key, input, version, event of its copy
        self._kept: list[weakref.ref[KeptInput]] = []
        self._next = 0
        self._groups: list[list[int]] = []  # numbers of micro-batches' inputs, by block
        self._follows: dict[int, list[int]] = {}
        self._largest: dict[torch.dtype, int] = {}  # elements, by dtype

    def begin_group(self) -> None:
        """Begin a group: the inputs that follow are those of one block."""
        self._groups.append([])

    @whole
    def keep(self, tensor: torch.Tensor) -> KeptInput | None:
        """Write a copy to the tier. Return None, and write nothing, if the input has to wait in memory."""
        if (stream := self._stream_for(tensor)) is None:
            return None
        number = self._next
        key = _key(number)
        stream.register(key, padded(tensor.numel(), tensor.dtype))
        slot = stream.put(key)[: tensor.numel()].as_strided(tensor.shape, tensor.stride())
        if self._copies is None:
            slot.copy_(tensor)
            self._write(key)
        else:  # the device goes on computing: the next `keep` or `read` writes the copy
            self._write_what_came()
            copied = self._copies.to_host(tensor.detach(), slot, self._copies.mark())
            self._coming = key, tensor, _version(tensor), copied
        self._next += 1
        kept = KeptInput(self, number, tensor)
        self._kept.append(weakref.ref(kept))
        if self._groups:
            self._groups[-1].append(number)
        return kept

    def _are_held(self) -> bool:
        """Return whether a graph still refers to any of them. They are not counted in a destructor, where Ctrl-C is
        lost and would leave the count wrong."""
        while self._kept and self._kept[-1]() is None:  # backward releases the last ones first
            self._kept.pop()
        return bool(self._kept)

    def _write(self, key: str) -> None:
        """Start writing a filled buffer, and end its use."""
        self._stream.write(key)
        self._stream.release(key)

    def _write_what_came(self) -> None:
        """Write the input whose copy to the host was started last, after that copy. Raises NotStreamable if the input
        was changed in place meanwhile."""
        if self._coming is not None:
            (key, tensor, version, copied), self._coming = self._coming, None
            copied.synchronize()
            if _version(tensor) != version:  # possibly during the copy
                raise NotStreamable(
                    "the input of a block was changed in place while it was copied to host memory: use the "
                    "out-of-place operation, or checkpoints='device'"
                )
            self._write(key)

    def _stream_for(self, tensor: torch.Tensor) -> WeightStream | None:
        """Return a stream with slots for such an input, with a new pool if necessary; None if its present slots do not
        fit but are in use."""
        largest = self._largest[tensor.dtype] = max(tensor.numel(), self._largest.get(tensor.dtype, 0))
        pool = self._buffers.checkpoints
        if self._are_held():  # in slots that cannot be replaced now
            fits = pool.dtype == tensor.dtype and pool.largest_numel >= tensor.numel()
            return self._stream if fits else None
        self._next, self._follows = 0, {}  # the keys start again from zero, too
        self._groups = [group for group in self._groups[-1:] if not group]  # a group that has just begun stays
        if self._stream is None or pool.dtype != tensor.dtype or pool.largest_numel < largest:
            self.give_back()
            pool = self._buffers.need_checkpoints(largest, tensor.dtype)
            self._stream = WeightStream(self._tier(), pool=pool, options=StreamOptions(wait_s=self._wait_s))
        return self._stream

    @whole
    def read(self, number: int, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """Return an input in memory of its own, and start reading the two that come next."""
        self._write_what_came()
        (slot,) = self._stream.fetch([_key(number)])
        values = slot[: shape.numel()].as_strided(shape, stride)
        if self._copies is None:
            out = values.clone()
        else:
            out = torch.empty_strided(shape, stride, dtype=values.dtype, device=self._copies.device)
            self._stream.copying(_key(number), self._copies.to_device(values, out, self._copies.mark()))
        self._stream.release(_key(number))
        self._stream.prefetch([_key(each) for each in self._after(number)])
        return out

    def _after(self, number: int) -> list[int]:
        """Return the numbers of the inputs that backward needs after `number`: two, or fewer at the end."""
        if not self._groups:
            return [before for before in (number - 1, number - 2) if before >= 0]
        if number not in self._follows:
            order = [each for group in reversed(self._groups) for each in group]
            self._follows = {each: order[place + 1 : place + 3] for place, each in enumerate(order)}
        return self._follows.get(number, [])

    def give_back(self) -> None:
        """Free all slots, whatever is in them. Raises the first failed write."""
        if self._coming is not None:
            self._coming[3].synchronize()
            self._coming = None
        if self._stream is not None:
            self._stream.close()

    def drop(self) -> None:
        """Release the memory of the slots for good. Idempotent."""
        for name in ("_buffers", "_stream"):
            vars(self).pop(name, None)


class KeptInput:
    """One block input with its original strides. Its graph keeps this object alive."""

    def __init__(self, inputs: KeptInputs, number: int, tensor: torch.Tensor) -> None:
        self._inputs, self._number, self._shape, self._stride = inputs, number, tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Return the input in memory of its own, with its original strides."""
        return self._inputs.read(self._number, self._shape, self._stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory, each once, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: (each[1], each[0])):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _key(number: int) -> str:
    return f"input {number}"

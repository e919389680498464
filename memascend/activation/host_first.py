"""A tier that keeps the first tensors in host memory, up to a limit, and the others on a tier below (LoHan, IV-D)."""

from __future__ import annotations

import torch

from memascend.memory.pinned import Allocator
from memascend.storage.byte_views import flat_bytes
from memascend.storage.completion import Completion, Promise
from memascend.storage.tier import Tier, Transferred
from memascend.storage.tier_base import TierBase, require_memory

OWNER = "swapped_activations"


class HostFirst(TierBase):
    """Up to `host_bytes` of `allocator`'s memory on top of the tier `below`, which it takes over.

    Buffers are allocated on first use and reused for tensors of the same size. `transferred` counts the traffic of the
    tier below. Writes of parts of tensors are not supported.
    """

    def __init__(self, below: Tier, host_bytes: int, allocator: Allocator) -> None:
        super().__init__("host memory")
        self._below, self._free_host_bytes, self._allocator = below, host_bytes, allocator
        self._here: dict[str, torch.Tensor] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        if offset:
            raise ValueError(f"write to a part of '{key}': a tier of whole tensors")
        with self._lock:
            self._require_open()
            self._let_go(key)
            buffer = self._buffer(tensor.nbytes)
            if buffer is None:
                return self._below.write(key, tensor, priority=priority)
            self._here[key], self._sizes[key] = buffer, tensor.nbytes
        buffer.copy_(flat_bytes(tensor))
        return _ended(f"write of {key}")

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        with self._lock:
            self._require_open()
            buffer = self._here.get(key)
            if buffer is None:
                return self._below.read(key, tensor, offset=offset, priority=priority)
            self._require_readable(key, tensor.nbytes, offset)
        flat_bytes(tensor).copy_(buffer[offset : offset + tensor.nbytes])
        return _ended(f"read of {key}")

    def erase(self, key: str) -> bool:
        with self._lock:
            return self._let_go(key) or self._below.erase(key)

    def size_of(self, key: str) -> int | None:
        size = self._sizes.get(key)
        return self._below.size_of(key) if size is None else size

    def wait(self, timeout_s: float | None = None) -> None:
        self._below.wait(timeout_s)

    def reserve(self, more_bytes: int) -> None:
        self._below.reserve(max(0, more_bytes - self._free_host_bytes))

    def register(self, tensor: torch.Tensor) -> bool:
        return self._below.register(tensor)

    def unregister(self, tensor: torch.Tensor) -> None:
        self._below.unregister(tensor)

    @property
    def free_bytes(self) -> int:
        return self._free_host_bytes + self._below.free_bytes

    @property
    def transferred(self) -> Transferred:
        return self._below.transferred

    def _let_go(self, key: str) -> bool:
        """Keep a tensor's buffer for reuse; return False if the tensor is not in host memory. Requires `_lock`."""
        buffer = self._here.pop(key, None)
        if buffer is None:
            return False
        del self._sizes[key]
        self._spare.setdefault(buffer.numel(), []).append(buffer)
        return True

    def _buffer(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer of `nbytes`, or None if it would exceed the limit. Requires `_lock`."""
        spare = self._spare.get(nbytes)
        if spare:
            return spare.pop()
        reserved = self._allocator.reserved_bytes(nbytes)
        if reserved > self._free_host_bytes:
            return None
        self._free_host_bytes -= reserved
        return self._allocator.allocate(nbytes, torch.uint8, name="activations", owner=OWNER)

    def _release(self) -> None:
        self._here.clear()
        self._spare.clear()
        self._below.close()


def _ended(what: str) -> Completion:
    """Return a completion that has ended successfully."""
    promise = Promise(what)
    promise.set_result(None)
    return promise

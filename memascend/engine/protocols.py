"""Interfaces that a stream of weights requires of its storage, its device and its runtime."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Protocol

import torch


class Completion(Protocol):
    """A transfer in flight. All methods may be called from any thread and repeatedly."""

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not. Never waits."""

    def wait(self) -> object:
        """Wait until the transfer has ended. Raises its error, on every call."""

    def add_done_callback(self, function: Callable[[Completion], None]) -> object:
        """Call `function(self)` when the transfer has ended, in any thread, and possibly at once if it already has. The
        function must not block."""


class Storage(Protocol):
    """A storage of tensors by key, such as a `memascend.storage.tier.Tier`. Requests are submitted without waiting,
    from any thread; they need not be executed in order.

    `tensor` is contiguous, on the CPU, and owned by the request until the completion has ended. Among waiting requests,
    those with the larger `priority` go first. A request that cannot be submitted raises at once.
    """

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion: ...

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion: ...


class Event(Protocol):
    """A point in a device's work, like torch.cuda.Event: it has passed when all work submitted before it is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...


class Use(Enum):
    """How a runtime uses a tensor in host memory."""

    IDLE = "idle"  # read ahead or kept for a later visit, and not in use
    NEEDED = "needed"  # the buffer is being read or filled, and must stay
    COPIED = "copied"  # the device has its copy, or will when the event has passed: the buffer may be reused


class Owner(Protocol):
    """A runtime that keeps track of the uses of its tensors by itself.

    Both methods are called while the stream has its lock: they must neither wait nor call back into the stream.
    """

    def use_of(self, key: Hashable) -> Use: ...

    def dropped(self, key: Hashable, use: Use) -> None:
        """Note that the tensor has lost its buffer to another one; `use` is its use until then, IDLE or COPIED."""

"""What a stream of weights asks of the things around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Protocol

import torch


class Completion(Protocol):
    """A transfer in flight. Any thread may ask, as often as it likes."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""

    def wait(self) -> object:
        """Until it has ended. Raises its failure, each time it is asked."""

    def add_done_callback(self, function: Callable[[Completion], None]) -> object:
        """Call `function(self)` when it has ended, in any thread; at once, maybe, where it has. It does not block."""


class Storage(Protocol):
    """Tensors by key, such as a `memascend.storage.tier.Tier`. Requests are submitted without waiting, from any thread;
    none needs to be ordered after another.

    `tensor` is contiguous, on the CPU, and belongs to the request until the completion has ended. Of requests that
    wait, those with the larger `priority` go first. A request that cannot even be submitted raises.
    """

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion: ...

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion: ...


class Event(Protocol):
    """A point in a device's work, as torch.cuda.Event: passed when all that was submitted before it has been done."""

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...


class Use(Enum):
    """What a tensor in host memory is to its runtime."""

    IDLE = "idle"  # read ahead, or kept for a later visit: nobody works with it
    NEEDED = "needed"  # somebody reads or fills the buffer: it stays
    COPIED = "copied"  # the device has its copy (or will, when the event has passed): the buffer may be taken


class Owner(Protocol):
    """A runtime that knows by itself what its tensors are used for.

    Both are called with the stream's lock held: they must not wait, and not call back into the stream.
    """

    def use_of(self, key: Hashable) -> Use: ...

    def dropped(self, key: Hashable, use: Use) -> None:
        """The tensor has lost its buffer to another one; `use` is what it was until then, IDLE or COPIED."""

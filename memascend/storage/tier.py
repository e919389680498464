"""Tiers: where tensors wait under a name until they are needed again. One protocol, whatever keeps them.

    tier = DirectTier.in_file("/mnt/nvme", owner="run 7")
    tier.write("layer.3", weights).wait()
    tier.read("layer.3", buffer, priority=1).then(lambda _: on_device.copy_(buffer))

The contract, which tests/unit/test_tier.py holds for every implementation:

- **Ownership.** A tier keeps tensors in flight alive. Until the completion has ended, a tensor that is written must not
  change and one that is read into must not be used.
- **Threads.** Any thread may call anything at any time. Completions say where callbacks run.
- **Order.** Transfers of one key run in the order in which they were submitted, reads side by side: a read gives what
  the last write before it has written, without a wait between. Transfers of different keys are not ordered; those of
  higher priority begin first where the tier can choose.
- **Errors.** What cannot be right (an unknown key, a range outside the tensor, memory that is not the CPU's) raises
  ValueError and what finds no room raises StorageError (ENOSPC), before anything has begun. Everything later is the
  completion's StorageError. After a write that failed or was cancelled midway the tensor is neither the old nor the
  new one: reads fail until all of it is written again (a durable store keeps the old one).
- **End.** `close` ends what was submitted, then releases memory, threads, descriptors and files. Afterwards every call
  but `close` raises RuntimeError. Open tiers are closed at interpreter exit. Not usable in a forked child.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from memascend.storage.completion import Completion

__all__ = ["Tier", "Transferred"]


@dataclass(frozen=True)
class Transferred:
    """Bytes that were moved, and the seconds in which at least one transfer of that direction was in flight.

    Of the difference of two, the rates are those of the time between.
    """

    bytes_read: int
    bytes_written: int
    reading_s: float
    writing_s: float

    def __sub__(self, earlier: Transferred) -> Transferred:
        return Transferred(
            self.bytes_read - earlier.bytes_read,
            self.bytes_written - earlier.bytes_written,
            self.reading_s - earlier.reading_s,
            self.writing_s - earlier.writing_s,
        )

    @property
    def read_bytes_per_s(self) -> float | None:
        """None: nothing was read."""
        return self.bytes_read / self.reading_s if self.bytes_read and self.reading_s else None

    @property
    def write_bytes_per_s(self) -> float | None:
        """None: nothing was written."""
        return self.bytes_written / self.writing_s if self.bytes_written and self.writing_s else None


@runtime_checkable
class Tier(Protocol):
    """See the module for ownership, threads, order, errors and end."""

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Write the contiguous CPU `tensor` under `key`, in the place of what is there, which may have another size.

        With an `offset`, over the bytes of a tensor that is there from `offset` on; both ends are multiples of 4096, or
        the tensor's end. Higher priorities first.
        """

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Fill the contiguous CPU `tensor` from byte `offset` of `key` on."""

    def erase(self, key: str) -> bool:
        """Forget a tensor and free its room, after the transfers of it that were submitted. False: there is none."""

    def size_of(self, key: str) -> int | None:
        """Bytes of the last tensor submitted under `key`; None: there is none."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all that was submitted has ended; then raise the first error that nobody has asked for yet.

        TimeoutError when the time is up.
        """

    def reserve(self, more_bytes: int) -> None:
        """Make ready for `more_bytes` of tensors to come, so that a full disk is found now. Raises StorageError."""

    def register(self, tensor: torch.Tensor) -> bool:
        """Pin a long-lived buffer for transfers from and to it and its views; kept alive until `unregister` or `close`.

        Best effort. False: not possible here (another engine, locked memory limit); transfers work all the same.
        """

    def unregister(self, tensor: torch.Tensor) -> None:
        """Let go of a buffer that `register` took, before it is to be freed. One that was not taken is no error."""

    def stage(self, key: str, target: Path) -> str | None:
        """Make `target`, a path that is not there, a file of the tensor's bytes without moving them.

        `reflink` or `link` says how; None: this tier, or the file system of `target`, cannot, and nothing was made.
        Transfers of the key must have ended. What is written later does not change `target`, which outlives the tier;
        the room that they share is then taken once more. OSError where `target` cannot be made.
        """

    def share(self, key: str, handle: int, at: int) -> bool:
        """As `stage` by reflinks, from byte `at` (a multiple of 4096) of the file open as `handle`, which ends there.

        False: this tier, or the file system of `handle`, cannot; what is in `handle` from there on says nothing.
        """

    @property
    def free_bytes(self) -> int:
        """Room for more tensors, as far as it is known."""

    @property
    def transferred(self) -> Transferred:
        """What transfers that have ended have moved, since the tier was made."""

    def close(self) -> None:
        """See the module. Idempotent."""

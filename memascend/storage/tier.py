"""Tiers: stores that keep named tensors until they are needed again, behind one protocol.

    tier = DirectTier.in_file("/mnt/nvme", owner="run 7")
    tier.write("layer.3", weights).wait()
    tier.read("layer.3", buffer, priority=1).then(lambda _: on_device.copy_(buffer))

The contract, which tests/unit/test_tier.py checks for every implementation:

- **Ownership.** A tier keeps tensors in flight alive. Until the completion has ended, a tensor that is written must not
  change and one that is read into must not be used.
- **Threads.** Any thread may call anything at any time. See `memascend.storage.completion` for where callbacks run.
- **Order.** Transfers of one key run in submission order, with reads in parallel: a read returns what the last write
  before it has written, without a wait in between. Transfers of different keys are not ordered; those of higher
  priority begin first if the tier can choose.
- **Errors.** Invalid arguments (an unknown key, a range outside the tensor, memory that is not on the CPU) raise
  ValueError, and lack of space raises StorageError (ENOSPC), before anything has begun. Any later error is the
  completion's StorageError. After a write that failed or was cancelled midway, the tensor is neither the old nor the
  new one: reads fail until all of it is written again (a durable store keeps the old one).
- **End.** `close` waits for what was submitted, then releases memory, threads, descriptors and files. Afterwards every
  call but `close` raises RuntimeError. Open tiers are closed at interpreter exit. Not usable in a forked child.
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
    """Bytes moved, and the seconds in which at least one transfer of that direction was in flight.

    The difference of two gives the rates of the time between them.
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
        """Bytes read per second in which a read was in flight; None if nothing was read."""
        return self.bytes_read / self.reading_s if self.bytes_read and self.reading_s else None

    @property
    def write_bytes_per_s(self) -> float | None:
        """Bytes written per second in which a write was in flight; None if nothing was written."""
        return self.bytes_written / self.writing_s if self.bytes_written and self.writing_s else None


@runtime_checkable
class Tier(Protocol):
    """The protocol of all tiers. See the module for ownership, threads, order, errors and end."""

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Write the contiguous CPU `tensor` under `key`, replacing a stored tensor, which may have another size.

        With an `offset`, overwrite the bytes of a stored tensor from `offset` on; the range begins at a multiple of
        4096, and ends at one or at the tensor's end. Higher priorities go first.
        """

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        """Fill the contiguous CPU `tensor` from byte `offset` of `key` on."""

    def erase(self, key: str) -> bool:
        """Remove a tensor and free its space, after its submitted transfers; return False if there is none."""

    def size_of(self, key: str) -> int | None:
        """Return the bytes of the last tensor submitted under `key`, or None if there is none."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all submitted transfers have ended; then raise the first error that nobody has asked for yet.

        Raises TimeoutError after `timeout_s` seconds.
        """

    def reserve(self, more_bytes: int) -> None:
        """Reserve space for `more_bytes` of tensors, so that a full disk is detected now. Raises StorageError."""

    def register(self, tensor: torch.Tensor) -> bool:
        """Pin a long-lived buffer for transfers from and to it and its views; kept alive until `unregister` or `close`.

        Returns False where that is not possible (another engine, locked memory limit); transfers still work.
        """

    def unregister(self, tensor: torch.Tensor) -> None:
        """Release a buffer that `register` accepted, before it is freed. For any other buffer this is a no-op."""

    def stage(self, key: str, target: Path) -> str | None:
        """Create `target`, a path that does not exist yet, as a file of the tensor's bytes without copying them.

        Returns how (`reflink` or `link`), or None if this tier or the file system of `target` cannot; then nothing was
        created. Transfers of the key must have ended. Later writes do not change `target`, which outlives the tier, but
        then need new space for what both shared. Raises OSError if `target` cannot be created.
        """

    def share(self, key: str, handle: int, at: int) -> bool:
        """Share the tensor's blocks by reflink, as `stage` does, with the file open as descriptor `handle`.

        They go to byte `at` (a multiple of 4096), where that file ends. Returns False if this tier or the file system
        cannot share them; the content of the file from `at` on is then undefined.
        """

    @property
    def free_bytes(self) -> int:
        """Bytes available for more tensors, as far as known."""

    @property
    def transferred(self) -> Transferred:
        """Totals of the transfers that have ended since the tier was created."""

    def close(self) -> None:
        """Wait for all transfers and release everything (see the module). Idempotent."""

"""State that every tier has: its tensors' sizes, the transfers in flight, and whether it is open."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Self

import torch

from memascend.storage import completion as completions
from memascend.storage import leaving
from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.errors import StorageError
from memascend.storage.interrupts import whole

_open_tiers: list[weakref.ref[TierBase]] = []  # in the order in which they were opened


@atexit.register
def _close_all() -> None:
    """Close the open tiers at interpreter exit, in reverse order; a StorageError is not raised here."""
    leaving.begin_if_asked()
    for reference in list(reversed(_open_tiers)):  # a tier built on others is closed before them
        tier = reference()
        if tier is not None:
            with contextlib.suppress(StorageError):
                tier.close()


class TierBase:
    """Implements waiting, reporting of unobserved errors, and closing for tiers (`memascend.storage.tier`).

    A subclass implements the rest of the protocol, and `_release`. Its `write` and `read` call `require_memory`; then,
    under `_lock`, they call `_require_open` and `_require_part` or `_require_readable`, record the size in `_sizes`,
    and add the completion to `_pending`. When a transfer ends, the subclass calls `_ended` under the lock, then settles
    it. It also keeps the order per key (`memascend.storage.key_queue`) and knows the keys whose last write has failed:
    reads of those raise StorageError. `erase`, `reserve`, `free_bytes` and `transferred` call `_require_open`, too.
    """

    def __init__(self, place: str) -> None:
        """Create an open tier without tensors. `place` names it in messages."""
        self._place = place
        self._lock = threading.RLock()  # guards the attributes below
        self._sizes: dict[str, int] = {}  # as last submitted
        self._pending: set[Completion] = set()
        self._failed: list[Completion] = []
        self._closed = False
        self._left: StorageError | None = None  # set when given up; transfers that hung may still be in flight
        self._pid = os.getpid()
        leaving.register(self)
        _open_tiers.append(weakref.ref(self, _open_tiers.remove))

    def size_of(self, key: str) -> int | None:
        return self._sizes.get(key)

    def stage(self, key: str, target: Path) -> str | None:
        self._require_open()
        return None

    def share(self, key: str, handle: int, at: int) -> bool:
        self._require_open()
        return False

    @whole
    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            pending = list(self._pending)
        for transfer in pending:
            if not transfer._done:
                transfer._block(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with self._lock:
            failed, self._failed = self._failed, []
        errors = [error for transfer in failed if not transfer._observed and (error := transfer.error()) is not None]
        if errors:
            raise errors[0]

    @whole
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        interrupt = None if completions.in_dispatcher() else self._await_transfers()
        self._release()
        if interrupt is not None:
            raise interrupt

    def _await_transfers(self) -> BaseException | None:
        """Wait for all transfers, queued ones included, and return what a signal handler raised meanwhile.

        After one Ctrl-C, transfers that hang are given up after `leaving.PATIENCE_S`; after another one, at once.
        """
        interrupt: BaseException | None = None
        for transfer in list(self._pending):
            while not transfer._done:
                try:
                    transfer._block(None)
                except Exception:
                    raise
                except BaseException as raised:
                    leaving.begin(leaving.PATIENCE_S if interrupt is None else 0.0)
                    interrupt = interrupt or raised
        return interrupt

    def _release(self) -> None:
        """Release memory, threads, descriptors and files; called once, after all transfers ended or were given up."""
        raise NotImplementedError

    # -- giving up transfers that hang (`memascend.storage.leaving`) ---------------------------------------------------

    @property
    def left(self) -> StorageError | None:
        """The error with which the tier was given up, or None. Its transfers may still be in flight on the device."""
        return self._left

    @property
    def place(self) -> str:
        """The tier's name in messages."""
        return self._place

    def in_flight(self) -> int:
        """Return the number of transfers in flight of this tier itself, without those of tiers below it."""
        return len(self._pending) if self._pid == os.getpid() else 0

    def progress(self) -> object:
        return len(self._pending)

    def give_up(self, error: StorageError) -> None:
        """End every transfer with `error`, which later calls on the tier also raise.

        The memory of these transfers must not be used again. Takes no lock, since its holder may hang. Any thread may
        call this.
        """
        self._left = self._left or error
        self._leave()
        for transfer in list(self._pending):
            transfer._give_up(error)
        self._pending.clear()

    def _leave(self) -> None:
        """Keep everything that the transfers use allocated from here on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended(self, transfer: Completion, error: BaseException | None) -> None:
        """Remove an ended transfer and keep its error for `wait`, unless it is asked for before. Requires `_lock`."""
        self._pending.discard(transfer)
        if error is not None and not isinstance(error, RequestCancelled):
            self._failed = [each for each in self._failed if not each._observed] + [transfer]

    def _require_open(self) -> None:
        """Raise RuntimeError for a closed or inherited tier, and its error for one that was given up."""
        if self._closed:
            raise RuntimeError(f"the tier in {self._place} is closed")
        if self._left is not None:
            raise self._left
        if self._pid != os.getpid():
            raise RuntimeError(f"the tier in {self._place} was opened before the fork: open one in each process")

    def _require_part(self, key: str, nbytes: int, offset: int) -> None:
        """Raise ValueError unless a write of `nbytes` at `offset` is within the tensor and aligned."""
        there = self._sizes.get(key)
        if there is None:
            raise ValueError(f"write to a part of '{key}': no such tensor in {self._place}: write all of it first")
        end = offset + nbytes
        if offset < 0 or offset % 4096 or end > there or (end % 4096 and end != there):
            raise ValueError(
                f"write to bytes {offset} to {end} of '{key}', a tensor of {there}: start and end at multiples of 4096 "
                "bytes, or at the tensor's end"
            )

    def _require_readable(self, key: str, nbytes: int, offset: int) -> None:
        """Raise ValueError unless the tensor is stored and has `nbytes` from `offset` on."""
        there = self._sizes.get(key)
        if there is None:
            raise ValueError(f"read of '{key}': no such tensor in {self._place}: write it first")
        if offset < 0 or offset + nbytes > there:
            raise ValueError(
                f"read of bytes {offset} to {offset + nbytes} of '{key}', a tensor of {there}: "
                "give a buffer of the tensor's size"
            )


def require_memory(key: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        kind = "not contiguous" if tensor.device.type == "cpu" else f"on {tensor.device}"
        raise ValueError(f"'{key}': give a contiguous CPU tensor (got one that is {kind})")

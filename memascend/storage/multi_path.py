"""One tier over several paths, without RAID: drives, folders, network mounts (MLP-Offload 3.2 and 3.3).

    nvme, pfs = DirectTier.in_file("/mnt/a", "run 7"), FileTier("/mnt/b", "run 7")
    tier = MultiPathTier([StoragePath("nvme", nvme), StoragePath("pfs", pfs)])

Whole groups of tensors (a sub-group's master weights and moments) lie on one path each, as many as its rates allow, and
neighbours on different paths. A tensor is written to where its group belongs at that time, so that a pass over the
groups brings them to their new paths and moves not one byte more.

Beyond the contract of `memascend.storage.tier`:

- **A path that fails** is taken out: nothing is written there as long as there is another one. A write that failed on
  it is done again, from the tensor that is still in memory, on another path, and its completion ends well. What lies
  there is read as long as that works, and is on another path after its next write. A read that fails twice is the
  completion's StorageError, which names the tensor and the path: what was only there is lost.
- **A full path** (ENOSPC) gets nothing that it has no room for.
- **A path too slow for any group, taken out or full** is tried again now and then, beside the training
  (`path_probing`). One that was taken out comes back when what is written there is read back, no request of before is
  in flight, and every tensor that it held has been written elsewhere; a full one when a group has room.
- **A path that hangs**, on which something is in flight and nothing has ended for `hang_s`, is taken out too; its
  writes are done elsewhere, its reads end with ETIMEDOUT. The memory of such a read must not be used again: the device
  may still write to it.
- **Other processes** on the machine: where `exclusive`, one process at a time transfers on a path (`path_lock`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

import torch

from memascend.storage import completion as completions
from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.errors import StorageError
from memascend.storage.group_placement import GroupPlacement
from memascend.storage.key_queue import KeyQueue
from memascend.storage.path_attempts import PathAttempts, PathTransfer
from memascend.storage.path_failures import HANG_S, PathFailures
from memascend.storage.path_probing import PathProber
from memascend.storage.placement import Rates
from memascend.storage.space_reservation import reserve
from memascend.storage.storage_path import (
    Busy,
    PathReport,
    StoragePath,
    no_path_takes,
    observe,
    with_key,
)
from memascend.storage.tier import Transferred
from memascend.storage.tier_base import TierBase, require_memory

__all__ = ["MultiPathTier", "PathReport", "StoragePath"]


class MultiPathTier(TierBase):
    """See the module, and `memascend.storage.tier.Tier` for the protocol."""

    def __init__(
        self,
        paths: Sequence[StoragePath],
        *,
        placement: str | Sequence[float] = "balanced",
        rehome: bool = True,
        group_of: Callable[[str], str] = lambda key: key,
        hang_s: float = HANG_S,
    ) -> None:
        """
        Args:
            paths: each with a name of its own; taken over, their tiers and locks are closed with this one.
            placement: `balanced`, `as_published` (Eq. 1), or shares of the paths by hand.
            rehome: groups follow the rates as they are observed, pass by pass.
            group_of: a key's group: what lies together.
            hang_s: seconds with work in progress on a path and no end there, after which it is taken out, writes go
                elsewhere and reads end with ETIMEDOUT. After Ctrl-C three seconds are enough.

        Raises:
            ValueError: no paths, two of one name, or a placement that is none.
        """
        if not paths or len({path.name for path in paths}) < len(paths):
            raise ValueError(f"a tier needs paths, each named once, got {[path.name for path in paths]}")
        super().__init__(", ".join(path.name for path in paths))
        self._paths = list(paths)
        for path in self._paths:
            path.seen = path.tier.transferred
        self._rehome, self._group_of = rehome, group_of
        self._groups = GroupPlacement(self._paths, placement, group_of)
        self._queue = KeyQueue()
        self._holders: dict[str, list[StoragePath]] = {}  # the one that has it is the last
        self._broken: dict[str, BaseException] = {}
        self._busy = Busy()
        self._written_in_pass = 0
        self._failures = PathFailures(self._paths, self._groups, self._busy, self._lock, hang_s)
        self._attempts = PathAttempts(self._failures, self._busy, self._lock)
        self._idle = PathProber(self._measured_again, hang_s)
        self.moves = 0  # tensors that were written to another path than before

    # -- the protocol --------------------------------------------------------------------------------------------------

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        with self._lock:
            self._require_open()
            before = self._sizes.get(key)
            if offset:
                self._require_part(key, tensor.nbytes, offset)
            else:
                self._note_size(key, tensor.nbytes)
            try:
                return self._begin("write", key, tensor, offset, priority)
            except BaseException:
                if not offset:
                    self._note_size(key, before)
                raise

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        with self._lock:
            self._require_open()
            self._require_readable(key, tensor.nbytes, offset)
            return self._begin("read", key, tensor, offset, priority)

    def erase(self, key: str) -> bool:
        with self._lock:
            self._require_open()
            if key not in self._sizes:
                return False
            self._note_size(key, None)

            def forget() -> None:
                with self._lock:
                    holders = self._holders.pop(key, [])
                    self._broken.pop(key, None)
                for path in holders:
                    self._erase_on(path, key)
                self._queue.leave(key, turn)

            turn = self._queue.enter(key, True, forget)
        if turn.begun:
            forget()
        return True

    def reserve(self, more_bytes: int) -> None:
        """On each path its share, and what finds no room there on the others."""
        with self._lock:
            self._require_open()
            usable = [path for path in self._paths if path.usable]
            shares = self._groups.weights(usable)
        reserve(dict(zip(usable, shares, strict=True)), more_bytes, self._place)

    def register(self, tensor: torch.Tensor) -> bool:
        self._require_open()
        taken = [path.tier.register(tensor) for path in self._paths]
        return any(taken)

    def unregister(self, tensor: torch.Tensor) -> None:
        if not self._closed and self._pid == os.getpid():
            for path in self._paths:
                path.tier.unregister(tensor)

    def stage(self, key: str, target: pathlib.Path) -> str | None:
        with self._lock:
            self._require_open()
            holders = self._holders.get(key)
        if not holders or key in self._broken:
            return None
        return holders[-1].tier.stage(key, target)

    def share(self, key: str, handle: int, at: int) -> bool:
        with self._lock:
            self._require_open()
            holders = self._holders.get(key)
        if not holders or key in self._broken:
            return False
        return holders[-1].tier.share(key, handle, at)

    @property
    def free_bytes(self) -> int:
        self._require_open()
        return sum(path.tier.free_bytes for path in self._paths if path.usable)

    @property
    def transferred(self) -> Transferred:
        with self._lock:
            self._require_open()
            return self._busy.transferred()

    def _release(self) -> None:
        if not completions.in_dispatcher():
            self._idle.stop()
        self._failures.stop()
        for path in self._paths:
            path.lock.close()
            if path.hanging or self._idle.measuring(path):  # which may take for ever
                closing = threading.Thread(target=self._close_late, args=(path,), daemon=True)
                closing.name = f"memascend-close-{path.name}"
                closing.start()
            else:
                path.tier.close()

    def under_way(self) -> int:
        """Where nothing is in flight on a path: those that wait for their turn there."""
        return 0 if any(path.under_way for path in self._paths) else super().under_way()

    def _close_late(self, path: StoragePath) -> None:
        """Not in the engine's code as long as it hangs: an interpreter that ends meanwhile would be aborted there."""
        while path.under_way or self._idle.measuring(path):
            time.sleep(0.1)
        path.tier.close()

    # -- what its users can know ---------------------------------------------------------------------------------------

    @property
    def paths(self) -> list[str]:
        """Files, folders and devices of all paths."""
        return [place for path in self._paths for place in getattr(path.tier, "paths", [path.name])]

    @property
    def direct(self) -> bool:
        return all(getattr(path.tier, "direct", True) for path in self._paths)

    @property
    def used_bytes(self) -> int:
        return sum(getattr(path.tier, "used_bytes", 0) for path in self._paths)

    @property
    def bounce_buffers(self) -> list[tuple[int, int]]:
        """(address, bytes) of each engine's, where it has any."""
        engines = [getattr(path.tier, "engine", None) for path in self._paths]
        return [buffer for engine in engines if engine is not None for buffer in engine.bounce_buffers]

    def path_of(self, key: str) -> str | None:
        """The name of the path that has the tensor; None: none has it (yet)."""
        with self._lock:
            holders = self._holders.get(key)
            return holders[-1].name if holders else None

    def report(self) -> list[PathReport]:
        """Of each path, in their order."""
        with self._lock:
            held: dict[StoragePath, dict[str, int]] = {path: {} for path in self._paths}
            for key, holders in self._holders.items():
                group = self._group_of(key)
                there = held[holders[-1]]
                there[group] = there.get(group, 0) + self._sizes.get(key, 0)
            rates = self._groups.rates()
            self._require_open()
            moved = [path.tier.transferred for path in self._paths]
        return [
            PathReport(
                name=path.name,
                rates=rate,
                groups=len(held[path]),
                bytes=sum(held[path].values()),
                bytes_read=m.bytes_read,
                bytes_written=m.bytes_written,
                turns=path.lock.turns,
                failure=None if path.failure is None else str(path.failure),
            )
            for path, rate, m in zip(self._paths, rates, moved, strict=True)
        ]

    def observe(self) -> bool:
        """Take what the paths did since the last time for their rates, and plan anew. True: groups will move.

        Called by itself when about as much was written as there is (a pass); a user who knows when a step ends may
        call it then.
        """
        with self._lock:
            self._require_open()
            self._written_in_pass = 0
            for path in self._paths:
                if path.usable:
                    observe(path)
            moves = self._rehome and self._groups.plan()
            idle = dict.fromkeys(self._groups.idle() if self._rehome else [], 0)
            self._idle.pass_over(idle | self._failures.to_try(self._current()))
            return moves

    def _measured_again(self, path: StoragePath, rates: Rates) -> None:
        """A path without groups, or one that was out or full: its rates of before say nothing any more."""
        with self._lock:
            out = path.full or not path.usable
            if self._closed or (out and not self._failures.try_succeeded(path, self._current())):
                return
            path.rates, path.seen = rates, path.tier.transferred
            if self._rehome:
                self._groups.plan()

    def _current(self) -> set[StoragePath]:
        """With the lock held: paths that have the last write of a tensor."""
        return {holders[-1] for holders in self._holders.values()}

    def _note_size(self, key: str, nbytes: int | None) -> None:
        self._groups.note(key, self._sizes.pop(key, 0), nbytes)
        if nbytes is not None:
            self._sizes[key] = nbytes

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _begin(self, verb: str, key: str, tensor: torch.Tensor, offset: int, priority: int) -> Completion:
        """With the lock held. Raises StorageError where a write is the key's next and finds no room on any path."""
        transfer = PathTransfer(f"{verb} of '{key}'", self._cancel)
        write = verb == "write"
        refused: list[BaseException] = []

        def begin(in_call: bool = False) -> None:
            if transfer._cancelled:
                end(RequestCancelled(f"{transfer._what} was cancelled"))
            elif write:
                self._write_once(transfer, key, tensor, offset, priority, {}, refused if in_call else None, end)
            else:
                self._read_once(transfer, key, tensor, offset, priority, 2, end)

        def end(error: BaseException | None) -> None:
            with self._lock:
                self._ended(transfer, error)
                if write and error is not None and not isinstance(error, ValueError):
                    self._broken[key] = error
                elif write:
                    self._broken.pop(key, None)
                again = write and not offset and error is None and self._pass_is_over(tensor.nbytes)
            transfer._settle(error=error)
            self._queue.leave(key, turn)
            if again:
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self.observe()

        self._pending.add(transfer)
        turn = self._queue.enter(key, write, begin)
        if turn.begun:
            begin(in_call=True)
            if refused:
                self._pending.discard(transfer)
                self._queue.leave(key, turn)
                raise refused[0]
        return transfer

    def _pass_is_over(self, written: int) -> bool:
        self._written_in_pass += written
        return self._written_in_pass >= 0.9 * sum(self._groups.group_bytes.values())

    def _write_once(
        self,
        transfer: PathTransfer,
        key: str,
        tensor: torch.Tensor,
        offset: int,
        priority: int,
        tried: dict[StoragePath, StorageError],
        refused: list[BaseException] | None,
        end: Callable[[BaseException | None], None],
    ) -> None:
        """On the path where it belongs, then on the others; `refused` takes an error that is known within the call."""
        with self._lock:
            if offset:
                holders = self._holders.get(key)
                path = holders[-1] if holders and holders[-1] not in tried else None
            else:
                path = self._groups.choose(key, tensor.nbytes, tried)
        if path is None:
            error = no_path_takes(key, tensor.nbytes, self._place, self._paths, tried)
            if refused is None:
                end(error)
            else:
                refused.append(error)
            return

        def submit() -> Completion:
            return path.tier.write(key, tensor, offset=offset, priority=priority)

        def ended(error: BaseException | None) -> None:
            if error is None:
                self._written(key, path, offset)
                end(None)
            elif isinstance(error, StorageError) and not transfer._cancelled:
                self._failures.take_out(path, error, of_write=True)
                if offset:  # the rest of the tensor is only there
                    end(error)
                else:
                    self._write_once(transfer, key, tensor, 0, priority, {**tried, path: error}, None, end)
            else:
                end(error)

        try:
            self._attempts.begin(transfer, path, True, tensor.nbytes, submit, ended, now=refused is not None)
        except StorageError as error:  # no room, within the call
            self._failures.take_out(path, error, of_write=True)
            self._write_once(transfer, key, tensor, offset, priority, {**tried, path: error}, refused, end)
        except (RuntimeError, ValueError) as error:
            if refused is None:
                end(error)
            else:
                refused.append(error)

    def _read_once(
        self,
        transfer: PathTransfer,
        key: str,
        tensor: torch.Tensor,
        offset: int,
        priority: int,
        attempts: int,
        end: Callable[[BaseException | None], None],
    ) -> None:
        with self._lock:
            broken = self._broken.get(key)
            holders = self._holders.get(key)
        if broken is not None or not holders:
            reason = "the last write of this tensor failed or was cancelled: write all of it again"
            end(StorageError("read", self._place, offset, tensor.nbytes, 0, None, reason, key=key))
            return
        path = holders[-1]

        def submit() -> Completion:
            return path.tier.read(key, tensor, offset=offset, priority=priority)

        def ended(error: BaseException | None) -> None:
            hung = isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT
            if error is None or not isinstance(error, StorageError) or transfer._cancelled:
                end(error)
            elif attempts > 1 and not hung:
                self._read_once(transfer, key, tensor, offset, priority, attempts - 1, end)
            else:
                self._failures.take_out(path, error, of_write=False)
                end(with_key(error, key))

        try:
            self._attempts.begin(transfer, path, False, tensor.nbytes, submit, ended, now=False)
        except (StorageError, RuntimeError, ValueError) as error:
            end(error)

    def _written(self, key: str, path: StoragePath, offset: int) -> None:
        """In the key's turn: `path` has it, and who had it before gives its room back."""
        with self._lock:
            self._failures.written(path)
            if offset:
                return
            old = [holder for holder in self._holders.get(key, []) if holder is not path]
            if old and self._holders[key][-1] is not path:
                self.moves += 1
            self._holders[key] = [*(holder for holder in old if holder.hanging), path]  # those are asked next time
        for holder in old:
            if not holder.hanging:
                self._erase_on(holder, key)

    @staticmethod
    def _erase_on(path: StoragePath, key: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # a path that is gone keeps what it has
            path.tier.erase(key)

    def _cancel(self, transfer: PathTransfer) -> bool:
        attempt = transfer._attempt
        if attempt is None or attempt.inner is None:
            return True  # before its turn: it ends when that comes
        return attempt.inner.cancel()

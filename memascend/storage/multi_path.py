"""One tier over several paths, without RAID: drives, folders, network mounts (MLP-Offload 3.2 and 3.3).

    nvme, pfs = DirectTier.in_file("/mnt/a", "run 7"), FileTier("/mnt/b", "run 7")
    tier = MultiPathTier([StoragePath("nvme", nvme), StoragePath("pfs", pfs)])

Each group of tensors (the master weights and moments of a sub-group) is stored as a whole on one path. A path gets as
many groups as its rates allow, and neighbouring groups are on different paths. A tensor is written to wherever its
group belongs at that time, so a pass over the groups moves them to their new paths without any extra traffic.

Beyond the contract of `memascend.storage.tier`:

- **A path that fails** is taken out: nothing is written to it while another path is usable. A failed write is repeated
  on another path from the tensor that is still in memory, and its completion ends well. Data on the failed path is read
  as long as that works, and moves to another path with its next write. A read that fails twice is the completion's
  StorageError, which names the tensor and the path: data that was only on that path is lost.
- **A full path** (ENOSPC) gets nothing that does not fit.
- **A path that is too slow for any group, taken out or full** is probed now and then during training (`path_probing`).
  One that was taken out returns when test data is read back correctly, none of its old requests is in flight, and every
  tensor that it had has been written elsewhere; a full one, when a group fits.
- **A path that hangs**, with transfers in flight of which none has ended for `hang_s`, is taken out too; its writes are
  repeated elsewhere, its reads end with ETIMEDOUT. The memory of such a read must not be used again: the device may
  still write to it.
- **Other processes** on the machine: with `exclusive` (`open_paths`), one process at a time uses a path (`path_lock`).
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
    """A tier that distributes groups of tensors over several paths. See the module, and `Tier` for the protocol."""

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
            paths: each with a distinct name. This tier takes them over: it closes their tiers and locks.
            placement: `balanced`, `as_published` (Eq. 1), or a user-given share for each path.
            rehome: whether groups follow the observed rates, pass by pass.
            group_of: maps a key to its group; the tensors of a group stay together.
            hang_s: seconds with transfers in flight on a path and no completion, after which it is taken out, writes go
                elsewhere and reads end with ETIMEDOUT. After Ctrl-C, three seconds suffice.

        Raises:
            ValueError: no paths, two of the same name, or an invalid placement.
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
        self._holders: dict[str, list[StoragePath]] = {}  # the last one has the current version
        self._broken: dict[str, BaseException] = {}
        self._busy = Busy()
        self._written_in_pass = 0
        self._failures = PathFailures(self._paths, self._groups, self._busy, self._lock, hang_s)
        self._attempts = PathAttempts(self._failures, self._busy, self._lock)
        self._idle = PathProber(self._measured_again, hang_s)
        self.moves = 0  # tensors written to another path than before

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
        """Reserve each path's share; what does not fit on one goes to the others. Raises StorageError (ENOSPC)."""
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
        return sum(path.free_bytes for path in self._paths if path.usable)

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
            if path.hanging or self._idle.measuring(path):  # closing it may never return
                closing = threading.Thread(target=self._close_late, args=(path,), daemon=True)
                closing.name = f"memascend-close-{path.name}"
                closing.start()
            else:
                path.tier.close()

    def in_flight(self) -> int:
        """Return the number of queued transfers; 0 while a path has transfers, which its own tier reports."""
        return 0 if any(path.in_flight for path in self._paths) else super().in_flight()

    def _close_late(self, path: StoragePath) -> None:
        """Close a path's tier once nothing hangs on it, since an exiting interpreter aborts threads in engine code."""
        while path.in_flight or self._idle.measuring(path):
            time.sleep(0.1)
        path.tier.close()

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> list[str]:
        """Files, folders and devices of all paths."""
        return [place for path in self._paths for place in getattr(path.tier, "paths", [path.name])]

    @property
    def direct(self) -> bool:
        """Whether transfers on all paths bypass the page cache."""
        return all(getattr(path.tier, "direct", False) for path in self._paths)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors on all paths, rounded up to their allocation units."""
        return sum(getattr(path.tier, "used_bytes", 0) for path in self._paths)

    @property
    def bounce_buffers(self) -> list[tuple[int, int]]:
        """Bounce buffers of all engines that have any, as (address, bytes)."""
        engines = [getattr(path.tier, "engine", None) for path in self._paths]
        return [buffer for engine in engines if engine is not None for buffer in engine.bounce_buffers]

    def path_of(self, key: str) -> str | None:
        """Return the name of the path that has the tensor, or None if no path has it (yet)."""
        with self._lock:
            holders = self._holders.get(key)
            return holders[-1].name if holders else None

    def report(self) -> list[PathReport]:
        """Return the state of each path, in their order."""
        with self._lock:
            sizes: dict[StoragePath, dict[str, int]] = {path: {} for path in self._paths}
            for key, holders in self._holders.items():
                group = self._group_of(key)
                groups = sizes[holders[-1]]
                groups[group] = groups.get(group, 0) + self._sizes.get(key, 0)
            rates = self._groups.rates()
            self._require_open()
            moved = [path.tier.transferred for path in self._paths]
        return [
            PathReport(
                name=path.name,
                rates=rate,
                groups=len(sizes[path]),
                bytes=sum(sizes[path].values()),
                bytes_read=m.bytes_read,
                bytes_written=m.bytes_written,
                turns=path.lock.turns,
                failure=None if path.failure is None else str(path.failure),
            )
            for path, rate, m in zip(self._paths, rates, moved, strict=True)
        ]

    def observe(self) -> bool:
        """Update the paths' rates from transfers since the last call, and plan again; return whether groups move.

        Called automatically once about as much was written as is stored (a pass). A caller that knows when a step ends
        may call it then.
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
        """Take new rates for a path that had no groups, failed or was full; its previous rates are discarded."""
        with self._lock:
            out = path.full or not path.usable
            if self._closed or (out and not self._failures.try_succeeded(path, self._current())):
                return
            path.rates, path.seen = rates, path.tier.transferred
            if self._rehome:
                self._groups.plan()

    def _current(self) -> set[StoragePath]:
        """Return the paths that have the last write of any tensor. Requires `_lock`."""
        return {holders[-1] for holders in self._holders.values()}

    def _note_size(self, key: str, nbytes: int | None) -> None:
        """Record a tensor's new size, or with None its removal. Requires `_lock`."""
        self._groups.note(key, self._sizes.pop(key, 0), nbytes)
        if nbytes is not None:
            self._sizes[key] = nbytes

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _begin(self, verb: str, key: str, tensor: torch.Tensor, offset: int, priority: int) -> Completion:
        """Begin or queue a transfer. Requires `_lock`. Raises StorageError if no path has space for a write now."""
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
                elif write and not offset:
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
            try:
                begin(in_call=True)
            except BaseException as error:  # such as Ctrl-C while the transfer is submitted
                if transfer.submitted or transfer._done:
                    raise
                refused.append(error)
            if refused:
                self._pending.discard(transfer)
                self._queue.leave(key, turn)
                raise refused[0]
        return transfer

    def _pass_is_over(self, written: int) -> bool:
        """Count written bytes, and return whether nearly as much was written as is stored. Requires `_lock`."""
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
        """Write to the group's path, then to others; errors known within the call are appended to `refused`."""
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
                if offset:  # the rest of the tensor is only on this path
                    end(error)
                else:
                    self._write_once(transfer, key, tensor, 0, priority, {**tried, path: error}, None, end)
            else:
                end(error)

        try:
            self._attempts.begin(transfer, path, True, tensor.nbytes, submit, ended, now=refused is not None)
        except StorageError as error:  # no space, found within the call
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
        """Read from the last holder, at most `attempts` times; after that the path is taken out."""
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
        """Record `path` as the key's holder and erase the key on its former paths. Called in the key's turn."""
        with self._lock:
            self._failures.written(path)
            if offset:
                return
            old = [holder for holder in self._holders.get(key, []) if holder is not path]
            if old and self._holders[key][-1] is not path:
                self.moves += 1
            self._holders[key] = [*(holder for holder in old if holder.hanging), path]  # hanging ones are erased later
        for holder in old:
            if not holder.hanging:
                self._erase_on(holder, key)

    @staticmethod
    def _erase_on(path: StoragePath, key: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # a failed path keeps its copy
            path.tier.erase(key)

    def _cancel(self, transfer: PathTransfer) -> bool:
        """Cancel the current attempt of a transfer. One that is queued ends when its turn comes."""
        attempt = transfer._attempt
        if attempt is None or attempt.inner is None:
            return True  # it ends once its turn comes
        return attempt.inner.cancel()

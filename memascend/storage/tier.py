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
  completion's StorageError. After a write that failed or was cancelled under way the tensor is neither the old nor the
  new one: reads fail until all of it is written again (a durable store keeps the old one).
- **End.** `close` ends what was submitted, then releases memory, threads, descriptors and files. Afterwards every call
  but `close` raises RuntimeError. Open tiers are closed at interpreter exit. Not usable in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable
from urllib.parse import quote

import torch

from memascend import _C
from memascend.storage import completion as completions
from memascend.storage.completion import Completion, RequestCancelled
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig, room_for
from memascend.storage.engine import StorageEngine
from memascend.storage.errors import StorageError
from memascend.storage.file_engine import FileEngine
from memascend.storage.scratch import collect_scratch_files, create_scratch_folder
from memascend.storage.shared_memory import CONTROL_FOLDER

__all__ = ["Completion", "DirectTier", "FileTier", "Tier", "Transferred"]

# A file that has to grow while tensors come takes an eighth more than they need, so that it does not grow with each of
# them; where the volume has not that much, it takes just what they need.
_GROWTH, _LEAST_GROWTH_BYTES, _MOST_GROWTH_BYTES = 0.125, 1 << 20, 1 << 30
_NAME_BYTES = 200  # of a file's name; file systems take 255


@dataclass(frozen=True)
class Transferred:
    """Bytes that were moved, and the seconds in which at least one transfer of that direction was under way.

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

    @property
    def free_bytes(self) -> int:
        """Room for more tensors, as far as it is known."""

    @property
    def transferred(self) -> Transferred:
        """What transfers that have ended have moved, since the tier was made."""

    def close(self) -> None:
        """See the module. Idempotent."""


_open_tiers: weakref.WeakSet[_EngineTier] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for tier in list(_open_tiers):
        with contextlib.suppress(StorageError):
            tier.close()


class _Transfer(Completion):
    """A request of an engine; before its turn on its key it has no number."""

    def __init__(self, what: str, requests: _Requests, at_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(what)
        self._requests = requests
        self._at_end: Callable[[BaseException | None], None] | None = at_end
        self._number: int | None = None
        self._cancelled = False

    def begin(self, submit: Callable[[], int]) -> None:
        """In its turn, later than the call that made it: what `submit` raises is its end."""
        try:
            if self._cancelled:
                raise RequestCancelled(f"{self._what} was cancelled")
            self._requests.submit(self, submit)
        except (OSError, RuntimeError, ValueError) as error:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        at_end, self._at_end = self._at_end, None  # which holds this transfer and its tier
        at_end(error)  # first: whoever waits sees what it has changed
        self._settle(error=error)

    def done(self) -> bool:
        if not self._done and self._number is not None and self._pid == os.getpid():
            self._requests.collect()
        return self._done

    def cancel(self) -> bool:
        self._cancelled = True
        return not self._done and (self._number is None or self._requests.cancel(self._number))

    def _watched(self) -> None:
        self._requests.watch()

    def _block(self, timeout_s: float | None) -> None:
        """Without the dispatcher, as long as nobody needs it: then no other thread has to run for this one's end."""
        own = self._number is not None and self._pid == os.getpid() and not completions.in_dispatcher()
        if not own or not self._requests.wait_for(self._number, timeout_s, self._what):
            super()._block(timeout_s)


class _Requests:
    """The transfers of one engine by number. Their outcomes come from whoever waits, or from the dispatcher."""

    _MANY = 1024  # outcomes that nobody has asked for are collected every so many submissions

    def __init__(self, engine: StorageEngine) -> None:
        self.engine: StorageEngine | None = engine
        self._lock = threading.Lock()
        self._live: dict[int, _Transfer] = {}
        self._fd = -1
        self._submitted = 0
        self._closed = False

    def submit(self, transfer: _Transfer, submit: Callable[[], int]) -> None:
        with self._lock:  # so that nobody takes the outcome before its transfer is known
            if self._closed:
                raise RuntimeError(f"{transfer._what}: the tier is closed")
            transfer._number = number = submit()
            self._live[number] = transfer
            self._submitted += 1
            collect = self._fd < 0 and self._submitted % self._MANY == 0
        if collect:
            self.take()

    def watch(self) -> None:
        """From now on the dispatcher takes what ends."""
        with self._lock:
            if self._fd < 0 and not self._closed:
                self._fd = self.engine.completion_fd
                completions.watch(self._fd, self.take)

    def cancel(self, number: int) -> bool:
        with self._lock:
            return number in self._live and not self._closed and self.engine.cancel(number)

    def wait_for(self, number: int, timeout_s: float | None, what: str) -> bool:
        """Block until the request has ended, and report it. False: somebody else is about to."""
        error: BaseException | None = None
        try:
            self.engine.wait(number, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{what} has not ended after {timeout_s} s") from None
        except (StorageError, RequestCancelled) as caught:
            error = caught
        except (ValueError, AttributeError):  # its outcome was taken; or the engine has been closed meanwhile
            return False
        self._ended(number, error)
        return True

    def collect(self) -> None:
        """Report what has ended, where the dispatcher does not. Does not block."""
        with self._lock:
            needed = self._fd < 0 and not self._closed
        if needed:
            self.take()

    def take(self) -> None:
        for outcome in self.engine.take_ended():
            error: BaseException | None = outcome.failure
            if error is None and outcome.cancelled:
                error = RequestCancelled(f"request {outcome.request} was cancelled")
            self._ended(outcome.request, error)

    def _ended(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            transfer = self._live.pop(number)
        transfer.end(error)

    def close(self) -> None:
        """End the requests, then the engine."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, -1
        if fd >= 0:
            completions.unwatch(fd)
        self.engine.end()
        self.take()
        self.engine.close()
        self.engine = None  # with its descriptor


@dataclass(eq=False)
class _Turn:
    exclusive: bool
    begin: Callable[[], None]
    begun: bool


class _KeyQueue:
    """Turns on keys, for engines that know of no order: reads side by side, everything else alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, list[_Turn]] = {}

    def enter(self, key: str, exclusive: bool, begin: Callable[[], None]) -> _Turn:
        """Its turn has come where `begun` says so; else `begin` is called in the dispatcher thread when it has."""
        with self._lock:
            before = self._turns.setdefault(key, [])
            turn = _Turn(exclusive, begin, not before or not (exclusive or any(each.exclusive for each in before)))
            before.append(turn)
            return turn

    def leave(self, key: str, turn: _Turn) -> None:
        with self._lock:
            turns = self._turns[key]
            turns.remove(turn)
            if not turns:
                del self._turns[key]
            next_ones = []
            for number, each in enumerate(turns):
                if each.exclusive and number > 0:
                    break
                if not each.begun:
                    each.begun = True
                    next_ones.append(each)
                if each.exclusive:
                    break
        for each in next_ones:
            completions.call(each.begin)


class _EngineTier:
    """What tiers over the engines have in common."""

    def __init__(self, place: str, engines: Sequence[StorageEngine], *, ordered: bool) -> None:
        """`place` for messages; `ordered`: the engine orders the transfers of a key itself."""
        self._place = place
        self._all = [_Requests(engine) for engine in engines]
        self._queue = None if ordered else _KeyQueue()
        self._lock = threading.RLock()  # of what follows
        self._sizes: dict[str, int] = {}
        self._pending: set[_Transfer] = set()
        self._failed: list[_Transfer] = []
        self._closed = False
        self._pid = os.getpid()
        _open_tiers.add(self)

    # -- what an engine does -------------------------------------------------------------------------------------------

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        raise NotImplementedError

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        raise NotImplementedError

    def _forget(self, key: str) -> None:
        raise NotImplementedError

    def _make_room(self, key: str, nbytes: int, before: int | None) -> None:
        """With the lock held, before a tensor of `nbytes` takes the place of one of `before`. Raises StorageError."""

    def _free_room(self, nbytes: int) -> None:
        """With the lock held, after a tensor is gone."""

    def _release(self) -> None:
        """After the engines are closed."""

    # -- the protocol --------------------------------------------------------------------------------------------------

    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        _require_memory(key, tensor)
        with self._lock:
            self._require_open()
            if offset:
                self._require_part(key, tensor.nbytes, offset)
            before = self._sizes.get(key)
            if not offset and before != tensor.nbytes:
                self._make_room(key, tensor.nbytes, before)
                self._sizes[key] = tensor.nbytes
            try:
                return self._begin("write", key, lambda: self._submit_write(key, tensor, offset, priority))
            except BaseException:
                if not offset:
                    self._forget_size(key)
                raise

    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        _require_memory(key, tensor)
        with self._lock:
            self._require_open()
            there = self._sizes.get(key)
            if there is None:
                raise ValueError(f"read of '{key}': no such tensor in {self._place}: write it first")
            if offset < 0 or offset + tensor.nbytes > there:
                raise ValueError(
                    f"read of bytes {offset} to {offset + tensor.nbytes} of '{key}', a tensor of {there}: "
                    "give a buffer of the tensor's size"
                )
            return self._begin("read", key, lambda: self._submit_read(key, tensor, offset, priority))

    def erase(self, key: str) -> bool:
        with self._lock:
            self._require_open()
            if key not in self._sizes:
                return False
            self._forget_size(key)
            if self._queue is None:
                self._forget(key)
                return True

            def forget() -> None:
                try:
                    self._forget(key)
                finally:
                    self._queue.leave(key, turn)

            turn = self._queue.enter(key, True, forget)
        if turn.begun:
            forget()
        else:
            self._watch()
        return True

    def size_of(self, key: str) -> int | None:
        return self._sizes.get(key)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            pending = list(self._pending)
        for transfer in pending:
            if not transfer._done:
                transfer._block(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with self._lock:
            failed, self._failed = self._failed, []
        errors = [transfer.error() for transfer in failed if not transfer._observed]
        if errors:
            raise errors[0]

    def reserve(self, more_bytes: int) -> None:
        self._require_open()

    def register(self, tensor: torch.Tensor) -> bool:
        return False

    def unregister(self, tensor: torch.Tensor) -> None:
        pass

    @property
    def free_bytes(self) -> int:
        raise NotImplementedError

    @property
    def transferred(self) -> Transferred:
        self._require_open()
        counted = [requests.engine.statistics for requests in self._all]
        return Transferred(
            sum(each.bytes_read for each in counted),
            sum(each.bytes_written for each in counted),
            sum(each.reading_s for each in counted),
            sum(each.writing_s for each in counted),
        )

    @property
    def used_bytes(self) -> int:
        """Of the tensors, rounded up to the units that they take."""
        with self._lock:
            return sum(room_for([size]) for size in self._sizes.values())

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        if not completions.in_dispatcher():  # transfers that wait for their turn, too
            for transfer in list(self._pending):
                if not transfer._done:
                    transfer._block(None)
        for requests in self._all:
            requests.close()
        self._release()
        _open_tiers.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the tier in {self._place} is closed")
        if self._pid != os.getpid():
            raise RuntimeError(f"the tier in {self._place} was opened before the fork: open one in each process")

    def _require_part(self, key: str, nbytes: int, offset: int) -> None:
        there = self._sizes.get(key)
        if there is None:
            raise ValueError(f"write to a part of '{key}': no such tensor in {self._place}: write all of it first")
        end = offset + nbytes
        if offset < 0 or offset % 4096 or end > there or (end % 4096 and end != there):
            raise ValueError(
                f"write to bytes {offset} to {end} of '{key}', a tensor of {there}: begin and end at multiples of 4096 "
                "bytes, or at the tensor's end"
            )

    def _forget_size(self, key: str) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self._free_room(size)

    def _requests_for(self, verb: str) -> _Requests:
        return self._all[0]

    def _begin(self, verb: str, key: str, submit: Callable[[], int]) -> Completion:
        """With the lock held. Raises what `submit` raises, where the key is free."""
        turn: _Turn | None = None

        def at_end(error: BaseException | None) -> None:
            self._at_end(verb, key, transfer, error)
            if turn is not None:
                self._queue.leave(key, turn)

        requests = self._requests_for(verb)
        transfer = _Transfer(f"{verb} of '{key}'", requests, at_end)
        if self._queue is not None:
            turn = self._queue.enter(key, verb == "write", lambda: transfer.begin(submit))
        self._pending.add(transfer)
        if turn is not None and not turn.begun:
            self._watch()
            return transfer
        try:
            requests.submit(transfer, submit)
        except BaseException:
            self._pending.discard(transfer)
            if turn is not None:
                self._queue.leave(key, turn)
            raise
        return transfer

    def _at_end(self, verb: str, key: str, transfer: _Transfer, error: BaseException | None) -> None:
        with self._lock:
            self._pending.discard(transfer)
            if error is not None and not isinstance(error, RequestCancelled):
                self._failed = [each for each in self._failed if not each._observed] + [transfer]

    def _watch(self) -> None:
        for requests in self._all:
            requests.watch()


def _require_memory(key: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        kind = "not contiguous" if tensor.device.type == "cpu" else f"on {tensor.device}"
        raise ValueError(f"'{key}': give a contiguous CPU tensor (got one that is {kind})")


class DirectTier(_EngineTier):
    """Over the direct engine: in a file of its own, or on the devices of a store; past the page cache.

    `volatile` (files always): tensors are gone with the tier. Else they are the store's: `commit` makes what was waited
    for outlast the process.
    """

    def __init__(self, engine: DirectEngine) -> None:
        """Takes the engine over, and closes it."""
        self.engine = engine
        self._in_file = engine._scratch is not None
        super().__init__(", ".join(engine.paths), [engine], ordered=engine.config.volatile)
        self._sizes = {key: stored.bytes for key, stored in engine.items()}
        self._used_bytes = room_for(self._sizes.values())
        self._grown_bytes = 0

    @classmethod
    def in_file(
        cls,
        folder: str | os.PathLike[str],
        owner: str,
        config: DirectEngineConfig | None = None,
        faults: _C.FaultLayer | None = None,
    ) -> DirectTier:
        """In a new file in `folder`, which grows with its tensors and is removed at the end. Raises StorageError."""
        return cls(DirectEngine.create_file_store(folder, 0, owner, config, faults=faults))

    @classmethod
    def on_devices(
        cls,
        devices: Sequence[str | os.PathLike[str]],
        owner: str,
        config: DirectEngineConfig | None = None,
        faults: _C.FaultLayer | None = None,
    ) -> DirectTier:
        """On all devices of a formatted store. Raises as DirectEngine does."""
        return cls(DirectEngine(devices, owner, config, faults))

    @property
    def direct(self) -> bool:
        """False where a file system refuses O_DIRECT: tensors go through the page cache."""
        self._require_open()
        return self.engine.direct

    @property
    def paths(self) -> list[str]:
        """The file or the devices."""
        return [] if self._closed else self.engine.paths

    def commit(self) -> int:
        """Make what was waited for durable; returns the number of changes. Raises StorageError, RuntimeError."""
        self._require_open()
        return self.engine.commit()

    def reserve(self, more_bytes: int) -> None:
        with self._lock:
            self._require_open()
            self._grow(self._used_bytes + more_bytes)

    def register(self, tensor: torch.Tensor) -> bool:
        self._require_open()
        return self.engine.register_buffer(tensor)

    def unregister(self, tensor: torch.Tensor) -> None:
        if not self._closed and self._pid == os.getpid():
            self.engine.unregister_buffer(tensor)

    @property
    def free_bytes(self) -> int:
        """In a file: also what the file system has left for it to grow."""
        self._require_open()
        free = self.engine.space().free_bytes
        if self._in_file:
            volume = os.statvfs(self.engine.paths[0])
            free += volume.f_bavail * volume.f_frsize
        return free

    def _make_room(self, key: str, nbytes: int, before: int | None) -> None:
        """Space on devices is what it is: a write for which there is none fails."""
        used = self._used_bytes + room_for([nbytes]) - (0 if before is None else room_for([before]))
        if self._in_file and used > self._grown_bytes:
            more = min(max(int(used * _GROWTH), _LEAST_GROWTH_BYTES), _MOST_GROWTH_BYTES)
            try:
                self._grow(used + more)
            except StorageError:  # not that much: then just what is needed
                self._grow(used)
        self._used_bytes = used

    def _grow(self, size_bytes: int) -> None:
        if self._in_file and size_bytes > self._grown_bytes:
            self.engine.grow(size_bytes)
            self._grown_bytes = size_bytes

    def _free_room(self, nbytes: int) -> None:
        self._used_bytes -= room_for([nbytes])

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        if offset:
            return self.engine.write_part(key, tensor, offset, priority)
        return self.engine.write(key, tensor, priority)

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        return self.engine.read(key, tensor, offset, priority)

    def _forget(self, key: str) -> None:
        self.engine.erase(key)


class FileTier(_EngineTier):
    """Over the file engine: a file for each tensor, in a folder of its own that is removed at the end.

    Reads and writes have threads of their own, so that no read waits behind writes; else there are no priorities.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        owner: str,
        *,
        threads: int = 4,
        block_bytes: int = 1 << 20,
        faults: _C.FaultLayer | None = None,
        require_direct: bool = False,
    ) -> None:
        """`threads` in each direction; `owner` is named to whoever finds the folder. Raises StorageError, ValueError.

        What killed processes have left in `folder` is removed first. With `require_direct`, transfers fail where the
        file system refuses O_DIRECT. `faults` is for tests.
        """
        collect_scratch_files(folder, CONTROL_FOLDER)
        self._scratch = create_scratch_folder(folder, owner)
        try:
            self._reading = FileEngine(threads, block_bytes, faults, require_direct)
            self._writing = FileEngine(threads, block_bytes, faults, require_direct)
        except BaseException:
            self._scratch.remove()
            raise
        super().__init__(str(folder), [self._reading, self._writing], ordered=False)
        self._finalizer = weakref.finalize(self, self._scratch.remove)
        self._broken: set[str] = set()  # the last write failed or was cancelled

    @property
    def free_bytes(self) -> int:
        self._require_open()
        volume = os.statvfs(self._scratch.path)
        return volume.f_bavail * volume.f_frsize

    @property
    def direct(self) -> bool:
        """False where the file system refuses O_DIRECT: tensors go through the page cache."""
        self._require_open()
        return bool(_C.direct_limits(self._scratch.owner_file)[0])

    @property
    def paths(self) -> list[str]:
        """The folder of the files."""
        return [self._scratch.path]

    def reserve(self, more_bytes: int) -> None:
        self._require_open()
        if more_bytes > self.free_bytes:
            reason = "the file system has not that much free"
            raise StorageError("allocation", self._scratch.path, 0, more_bytes, self.free_bytes, errno.ENOSPC, reason)

    def _file(self, key: str) -> str:
        name = quote(key, safe="")
        if len(name) > _NAME_BYTES or name in (".", ".."):
            name = f"{hashlib.sha256(key.encode()).hexdigest()}-{name[-_NAME_BYTES // 2 :]}"
        return os.path.join(self._scratch.path, name)

    def _requests_for(self, verb: str) -> _Requests:
        return self._all[verb == "write"]

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        path = self._file(key)
        if not offset:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_size > tensor.nbytes:
                    os.truncate(path, tensor.nbytes)
        return self._writing.async_write(tensor, path, offset)

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        path = self._file(key)
        if key in self._broken and tensor.nbytes:
            reason = "the last write of this tensor failed or was cancelled under way: write all of it again"
            raise StorageError("read", path, offset, tensor.nbytes, 0, None, reason, key=key)
        return self._reading.async_read(tensor, path, offset)

    def _forget(self, key: str) -> None:
        self._broken.discard(key)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(key))

    def _at_end(self, verb: str, key: str, transfer: _Transfer, error: BaseException | None) -> None:
        if verb == "write":
            if error is not None:
                self._broken.add(key)
            else:
                self._broken.discard(key)
        super()._at_end(verb, key, transfer, error)

    def _release(self) -> None:
        del self._reading, self._writing
        self._finalizer()

"""The tiers over the two engines (see `memascend.storage.tier` for the contract)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from memascend import _C
from memascend.storage.completion import Completion, Promise
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig, space_for
from memascend.storage.engine_requests import Requests
from memascend.storage.engine_tier_base import EngineTier
from memascend.storage.errors import StorageError
from memascend.storage.file_engine import FileEngine
from memascend.storage.interrupts import whole
from memascend.storage.reflink import LINK, REFLINK, detach, hard_linked, reflinked, shared
from memascend.storage.scratch import UNIT_BYTES, collect_scratch_files, create_scratch_folder
from memascend.storage.shared_memory import CONTROL_FOLDER, control_file_bytes

__all__ = ["DirectTier", "FileTier"]

# When a file must grow for new tensors, it grows by an eighth more than they need, so that it does not grow with each
# of them. If the volume does not have that much, it grows by exactly what they need.
_GROWTH, _LEAST_GROWTH_BYTES, _MOST_GROWTH_BYTES = 0.125, 1 << 20, 1 << 30
_INDEX_BYTES = (1 << 20) + (8 << 10)  # before the tensors: superblocks, and a log that stays empty
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME_BYTES = 200  # limit for file names; file systems allow 255


def scratch_file_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of the file of `DirectTier.in_file` and its control file after tensors of these sizes.

    The tensors are written in this order, and the volume had space for the spare part of each growth.
    """
    used = grown = 0
    for size in sizes:
        used += space_for([size])
        grown = grown if used <= grown else _with_spare(used)
    return grown + _INDEX_BYTES + control_file_bytes(grown, UNIT_BYTES)


def _file_system(path: Path) -> os.statvfs_result:
    """Return statvfs of `path`, or of the nearest existing parent if the open file was removed."""
    for place in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            return os.statvfs(place)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _with_spare(used_bytes: int) -> int:
    """Return the size to which a file grows for tensors of `used_bytes`."""
    return used_bytes + min(max(int(used_bytes * _GROWTH), _LEAST_GROWTH_BYTES), _MOST_GROWTH_BYTES)


class DirectTier(EngineTier):
    """Tier over the direct engine: in its own file or on the devices of a store, bypassing the page cache.

    `volatile` (always so for files): tensors are lost when the tier closes. Otherwise they belong to the store:
    `commit` makes what was waited for persistent.
    """

    def __init__(self, engine: DirectEngine) -> None:
        """
        Args:
            engine: owned and closed by the tier. A volatile engine orders the transfers of a key itself; with another
                one, the tier orders them, and tensors that an earlier process has committed are available.
        """
        self.engine = engine
        self._in_file = engine._scratch is not None
        super().__init__(", ".join(engine.paths), [engine], ordered=engine.config.volatile)
        self._sizes = {key: stored.bytes for key, stored in engine.items()}
        self._used_bytes = space_for(self._sizes.values())
        self._grown_bytes = 0

    @classmethod
    def in_file(
        cls,
        folder: str | os.PathLike[str],
        owner: str,
        config: DirectEngineConfig | None = None,
        faults: _C.FaultLayer | None = None,
    ) -> DirectTier:
        """Return a tier in a new file, which grows with its tensors and is removed on close.

        Args:
            folder: an existing folder on the SSD; files that killed processes have left in it are removed first.
            owner: identifies the file's owner to whoever finds it, in 1 to 256 bytes.
            config: default: a volatile engine with one worker.
            faults: for tests.

        Raises:
            StorageError: no space (ENOSPC), no such folder, or a file system without file locks.
        """
        return cls(DirectEngine.create_file_store(folder, 0, owner, config, faults=faults))

    @classmethod
    def on_devices(
        cls,
        devices: Sequence[str | os.PathLike[str]],
        owner: str,
        config: DirectEngineConfig | None = None,
        faults: _C.FaultLayer | None = None,
    ) -> DirectTier:
        """Return a tier on a formatted store.

        Args:
            devices: all of its devices, in any order.
            owner: the owner given when it was formatted.
            config: default: one worker; tensors persist once they are committed.
            faults: for tests.

        Raises:
            ValueError, StorageError, DeviceRefused: a device that cannot be opened or belongs to someone else.
            RuntimeError: a foreign, incomplete or damaged store.
        """
        return cls(DirectEngine(devices, owner, config, faults))

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache; False if the file system refuses O_DIRECT."""
        self._require_open()
        return self.engine.direct

    @property
    def paths(self) -> list[str]:
        """The tier's file, or its devices."""
        return [] if self._closed else self.engine.paths

    def commit(self) -> int:
        """Make what was waited for durable; return the number of changes. Raises StorageError, RuntimeError.

        In the main thread, Ctrl-C ends the wait for a device that hangs. Whether the commit succeeded is only known
        after the tier has then been closed and opened again.
        """
        self._require_open()
        return int(self._run_interruptible(f"commit of {self._place}", self.engine.commit))

    @whole
    def _run_interruptible(self, what: str, function: Callable[[], Any]) -> Any:
        """Run a call that may hang with the device; the main thread waits for it as for a transfer (Ctrl-C works)."""
        if threading.current_thread() is not threading.main_thread():
            return function()
        done = Promise(what)

        def run() -> None:
            value, failure = None, None
            try:
                value = function()
            except BaseException as error:
                failure = error
            done._settle(value, failure)
            self._pending.discard(done)

        self._pending.add(done)
        threading.Thread(target=run, name="memascend-beside", daemon=True).start()
        return done.wait()

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

    def stage(self, key: str, target: Path) -> str | None:
        self._require_open()
        if not self._in_file or key not in self._sizes or key in self._broken:
            return None
        return REFLINK if reflinked(*self._ranges(key), target, self._sizes[key]) else None

    def share(self, key: str, handle: int, at: int) -> bool:
        self._require_open()
        if not self._in_file or key not in self._sizes or key in self._broken:
            return False
        return shared(*self._ranges(key), handle, at)

    def _ranges(self, key: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the engine's file, and (offset, bytes) of the tensor's extents in it."""
        return self.engine.paths[0], [(offset, length) for _, offset, length in self.engine.info(key).extents]

    @property
    def free_bytes(self) -> int:
        """Bytes available; for a file this includes the space by which its file system allows it to grow."""
        self._require_open()
        free = self.engine.space().free_bytes
        if self._in_file:
            volume = _file_system(Path(self.engine.paths[0]))
            free += volume.f_bavail * volume.f_frsize
        return free

    def _make_space(self, key: str, nbytes: int, before: int | None) -> None:
        """Grow the file if necessary. The space on devices is fixed: a write that does not fit fails in the engine."""
        used = self._used_bytes + space_for([nbytes]) - (0 if before is None else space_for([before]))
        if self._in_file and used > self._grown_bytes:
            try:
                self._grow(_with_spare(used))
            except StorageError as error:
                if error.errno not in _NO_SPACE:
                    raise
                self._grow(used)  # not enough for the spare part

    def _grow(self, size_bytes: int) -> None:
        """Grow the file to `size_bytes` of tensors, if it is smaller; no effect on devices. Raises StorageError."""
        if self._in_file and size_bytes > self._grown_bytes:
            self._run_interruptible(f"growth of {self._place}", lambda: self.engine.grow(size_bytes))
            self._grown_bytes = size_bytes

    def _count_space(self, before: int | None, nbytes: int | None) -> None:
        for size, sign in ((before, -1), (nbytes, 1)):
            self._used_bytes += 0 if size is None else sign * space_for([size])

    def _begin(self, verb: str, key: str, submit: Callable[[], int], part: bool = False) -> Completion:
        try:
            return super()._begin(verb, key, submit, part)
        except StorageError as error:
            if verb != "write" or not self._in_file or error.errno not in _NO_SPACE:
                raise
        # A tensor of another size that is still being read keeps its space beside the new one.
        self._grow(self._grown_bytes + space_for([self._sizes[key]]) - self.engine.space().free_bytes)
        return super()._begin(verb, key, submit, part)

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        if offset:
            return self.engine.write_part(key, tensor, offset, priority)
        return self.engine.write(key, tensor, priority)

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        return self.engine.read(key, tensor, offset, priority)

    def _forget(self, key: str) -> None:
        self.engine.erase(key)


class FileTier(EngineTier):
    """Tier over the file engine: one file per tensor, in its own folder that is removed on close.

    Reads and writes have separate threads, so that no read waits behind writes. Priorities are otherwise ignored.
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
        """Create the folder and the engines. Files that killed processes have left in `folder` are removed first.

        Args:
            folder: an existing folder on the SSD; the tier creates its own folder in it.
            owner: identifies the owner to whoever finds that folder.
            threads: native threads per direction (1 to 256), so 2 * threads in total; also the number of concurrent
                transfers per direction.
            block_bytes: bytes per system call; a multiple of 4096.
            faults: for tests.
            require_direct: transfers fail if the file system refuses O_DIRECT; otherwise they use the page cache.

        Raises:
            StorageError: the folder cannot be created, or its file system has no file locks.
            ValueError: invalid `threads` or `block_bytes`.
            RuntimeError: the system has no more threads.
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

    @property
    def free_bytes(self) -> int:
        self._require_open()
        volume = os.statvfs(self._scratch.path)
        return volume.f_bavail * volume.f_frsize

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache; False if the file system refuses O_DIRECT."""
        self._require_open()
        return bool(_C.direct_limits(self._scratch.owner_file)[0])

    @property
    def paths(self) -> list[str]:
        """The folder of the tensors' files."""
        return [self._scratch.path]

    def stage(self, key: str, target: Path) -> str | None:
        self._require_open()
        size = self._sizes.get(key)
        if size is None or key in self._broken:
            return None
        path = self._file(key)
        if hard_linked(path, target):
            return LINK
        return REFLINK if reflinked(path, [(0, size)], target, size) else None

    def share(self, key: str, handle: int, at: int) -> bool:
        self._require_open()
        size = self._sizes.get(key)
        return size is not None and key not in self._broken and shared(self._file(key), [(0, size)], handle, at)

    def reserve(self, more_bytes: int) -> None:
        self._require_open()
        if more_bytes > self.free_bytes:
            reason = "the file system has not that much free"
            raise StorageError("allocation", self._scratch.path, 0, more_bytes, self.free_bytes, errno.ENOSPC, reason)

    def _file(self, key: str) -> str:
        """Return the path of a tensor's file: its key in percent-encoding.

        A hash is put before it if it is long, or if it would be that of a folder or of the scratch folder's own file.
        """
        name = quote(key, safe="")
        if len(name) > _NAME_BYTES or name in (".", "..", os.path.basename(self._scratch.owner_file)):
            name = f"{hashlib.sha256(key.encode()).hexdigest()}-{name[-_NAME_BYTES // 2 :]}"
        return os.path.join(self._scratch.path, name)

    def _requests_for(self, verb: str) -> Requests:
        return self._all[verb == "write"]

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        path = self._file(key)
        try:
            detach(path, keep_content=bool(offset))
            if not offset:
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path).st_size > tensor.nbytes:
                        os.truncate(path, tensor.nbytes)
            return self._writing.async_write(tensor, path, offset)
        except BaseException:
            if not offset:  # the previous tensor's file may be gone, or shorter
                self._broken.add(key)
            raise

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        path = self._file(key)
        if key in self._broken and tensor.nbytes:
            reason = "the last write of this tensor failed or was cancelled: write all of it again"
            raise StorageError("read", path, offset, tensor.nbytes, 0, None, reason, key=key)
        return self._reading.async_read(tensor, path, offset)

    def _forget(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(key))

    def _release(self) -> None:
        super()._release()
        del self._reading, self._writing
        if self._left is None:
            self._finalizer()

    def _leave(self) -> None:
        super()._leave()
        self._finalizer.detach()  # the next process that uses the parent folder removes it

"""Named tensors on raw devices: asynchronous I/O that bypasses the file system, and an index that survives crashes.

    engine = DirectEngine(["/dev/nvme1n1", "/dev/nvme2n1"], owner="qwen2.5-7b")
    engine.write("layer.3.weight", tensor)
    engine.wait()
    engine.commit()                      # from here on it survives `kill -9` and a power cut

For swapping, where nothing has to survive, an engine is `volatile`. It can create a file that is removed on close:

    engine = DirectEngine.create_file_store("/mnt/nvme", space_for(sizes), owner="run 7")

Source: MemAscend, section IV-E (direct NVMe engine).
"""

from __future__ import annotations

import csv
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memascend import _C
from memascend.storage.devices import require_usable
from memascend.storage.engine import EngineStatistics, RequestCancelled, StorageEngine, quantile_us
from memascend.storage.errors import StorageError
from memascend.storage.leaving import end_engine
from memascend.storage.scratch import (
    ScratchFile,
    collect_scratch_files,
    create_scratch_file,
    require_space,
    space_for,
)
from memascend.storage.shared_memory import CONTROL_FOLDER

__all__ = [
    "DirectEngine",
    "DirectEngineConfig",
    "EngineStatistics",
    "RequestCancelled",
    "StoreSpace",
    "StoredTensor",
    "quantile_us",
    "space_for",
    "swapping_config",
]

_READS = 100
# Bounce buffers per worker: one sector per command, and a few of up to one block (direct_worker.h).
_SECTOR_BYTES, _LARGE_BOUNCES, _LARGE_BOUNCE_BYTES = 4096, 4, 65536
TRACE_COLUMNS = ("request", "op", "key", "bytes", "priority", "submitted_ns", "started_ns", "ended_ns", "status")


@dataclass(frozen=True, kw_only=True)
class DirectEngineConfig:
    """Options of a `DirectEngine`, which validates them.

    `depth` is the number of commands per worker in the kernel; `backend` is auto (io_uring if the kernel offers it),
    io_uring or libaio; `checksums`: off, write (kept in the index, compared by verify), full (also compared on whole
    reads) or auto (full, but off in a volatile engine); tensors of `stripe_bytes` or more are striped over all devices;
    `check_devices` asks the kernel whether anyone else uses them. `volatile`: see `DirectEngine`. `require_direct`
    raises RuntimeError if the file system refuses O_DIRECT; otherwise the engine logs it and uses the page cache.
    """

    workers: int = 1
    block_bytes: int = 1 << 20
    depth: int = 16
    backend: str = "auto"
    checksums: str = "auto"
    volatile: bool = False
    trace: bool = False
    stripe_bytes: int = 1 << 20
    control_folder: str = CONTROL_FOLDER
    check_devices: bool = True
    require_direct: bool = False

    @property
    def bounce_bytes(self) -> int:
        """Bytes of bounce buffers per worker (see `DirectEngine`)."""
        return self.depth * _SECTOR_BYTES + _LARGE_BOUNCES * min(self.block_bytes, _LARGE_BOUNCE_BYTES)


def swapping_config(workers: int, block_bytes: int, depth: int) -> DirectEngineConfig:
    """Return the config for DeepSpeed's swapped tensors; one worker replaces two of the threads of DeepNVMe."""
    return DirectEngineConfig(workers=max(1, workers // 2), block_bytes=block_bytes, depth=depth, volatile=True)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's index entry. `extents` are (device number, offset, bytes) in the order of the data."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None
    generation: int
    extents: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class StoreSpace:
    """Space of a store in bytes. `reserved_bytes` belongs to uncommitted writes of all processes on the store."""

    data_bytes: int
    free_bytes: int
    reserved_bytes: int
    log_bytes: int
    log_used_bytes: int
    processes: int


class DirectEngine(StorageEngine):
    """Asynchronous reads and writes of named tensors on a store. Submit from any thread, then wait.

    Requests are not ordered among each other; of two writes to one key the later one wins. The engine keeps tensors in
    flight alive; their contents must not be changed (or, for reads, used) before the wait. Later reads of this process
    see a write once it has been waited for; other processes, and this one after a crash, once it is committed. Not
    usable in a forked child.

    A *volatile* engine is for swapping, where nothing needs to survive. Its tensors are private (no other engine sees
    them, and it sees no others) and are lost when it closes or dies; nothing is committed. A write of unchanged size
    overwrites the tensor in place: no second version, no index record. A write of another size first frees the old
    space. So the space in use is that of the tensors, rounded up to units (4096 bytes in a file of this class), and the
    engine needs about 500 bytes of memory per tensor, plus the 2 to 3 MiB that a store's processes share.
    Requests on one key run in submission order, with reads in parallel, so that a read sees the last write before it;
    requests on different keys run by priority. A write that fails or is cancelled in flight leaves neither version:
    reads raise StorageError until the whole tensor is written again. (In an engine that is not volatile, a write that
    fails or is cancelled changes nothing.)

    Tensors may have any address and any length. What O_DIRECT does not accept (memory that is not aligned as the device
    demands, to 512 bytes at least; the last partial sector) is copied through bounce buffers, which are allocated with
    the engine: `DirectEngineConfig.bounce_bytes` per worker, see `bounce_buffers`.
    """

    _native: _C.DirectEngine

    def __init__(
        self,
        devices: Sequence[str | os.PathLike[str]],
        owner: str,
        config: DirectEngineConfig | None = None,
        faults: _C.FaultLayer | None = None,
    ) -> None:
        """Open a formatted store: all of its `devices`, in any order, and the `owner` given when it was formatted.

        `faults` is for tests: a layer between the engine and the kernel that injects faults.

        Raises ValueError, RuntimeError (foreign, incomplete or damaged store), StorageError, DeviceRefused.
        """
        self.config = config or DirectEngineConfig()
        paths = [os.fspath(device) for device in devices]
        checksums = self.config.checksums
        if checksums == "auto":
            checksums = "off" if self.config.volatile else "full"
        if self.config.check_devices:
            for path in paths:
                require_usable(path)
        self._store = _C.Store(
            paths,
            owner,
            self.config.control_folder,
            self.config.stripe_bytes,
            False,
            self.config.require_direct,
            faults,
        )
        self._native = _C.DirectEngine(
            self._store,
            self.config.workers,
            self.config.block_bytes,
            self.config.depth,
            self.config.backend,
            checksums,
            self.config.trace,
            self.config.volatile,
            faults,
        )
        self._tell_if_buffered()
        self._scratch: ScratchFile | None = None
        self._pid = os.getpid()
        # Also runs at interpreter exit: submitted requests complete; uncommitted changes are discarded.
        self._finalizer = weakref.finalize(self, _end, self._native, self._store, self._pid, None)

    @classmethod
    def create_file_store(
        cls,
        folder: str | os.PathLike[str],
        size_bytes: int,
        owner: str,
        config: DirectEngineConfig | None = None,
        preallocate: bool = True,
        faults: _C.FaultLayer | None = None,
    ) -> DirectEngine:
        """Return a volatile engine on a new file in `folder`, with space for `size_bytes` of tensors (`space_for`).

        The file is removed when the engine closes. Files that killed processes have left in the folder are removed
        first. `preallocate` allocates the space on the file system now, so that no write fails for lack of it; without
        it the file is sparse and grows as it is written. Raises StorageError: no space (ENOSPC), no such folder.
        """
        config = replace(config or DirectEngineConfig(), volatile=True, check_devices=False)
        collect_scratch_files(folder, config.control_folder)
        scratch = create_scratch_file(folder, size_bytes, owner)
        try:
            engine = cls([scratch.path], owner, config, faults)
        except BaseException:
            scratch.remove()
            raise
        engine._finalizer.detach()
        engine._finalizer = weakref.finalize(engine, _end, engine._native, engine._store, engine._pid, scratch)
        engine._scratch = scratch
        try:
            engine.grow(size_bytes, preallocate)
        except BaseException:
            engine.close()
            raise
        return engine

    def grow(self, size_bytes: int, preallocate: bool = True) -> None:
        """Grow the file of `create_file_store` to `size_bytes` of tensors in total; it never shrinks.

        Must not be called while another process uses the file. Raises StorageError (ENOSPC), RuntimeError.
        """
        if self._scratch is None:
            raise RuntimeError("grow: only an engine made by create_file_store can grow")
        if preallocate:
            status = os.fstat(self._scratch.fd)
            require_space(self._scratch.path, size_bytes - status.st_blocks * 512)
        self._store.grow(size_bytes, preallocate)

    def write(self, key: str, tensor: torch.Tensor, priority: int = 0) -> int:
        """Write the contiguous CPU `tensor` under `key`; higher priorities go first. Return the request's number.

        Raises ValueError, and StorageError (ENOSPC) if there is no space for another version (volatile: for another
        size); `key` then keeps its previous content.
        """
        return self._native.write(key, tensor, str(tensor.dtype).removeprefix("torch."), priority)

    def write_part(self, key: str, tensor: torch.Tensor, offset: int, priority: int = 0) -> int:
        """Overwrite a stored tensor from byte `offset` on; volatile engines only. Return the request's number.

        The part begins at a multiple of 4096 bytes, and ends at one or at the tensor's end. Raises ValueError.
        """
        return self._native.write_part(key, tensor, offset, priority)

    def read(self, key: str, tensor: torch.Tensor, offset: int = 0, priority: int = 0) -> int:
        """Fill the contiguous CPU `tensor` from byte `offset` of `key` on. Return the request's number.

        Raises ValueError if there is no such tensor or range.
        """
        return self._native.read(key, tensor, offset, priority)

    def read_new(self, key: str, priority: int = 0) -> torch.Tensor:
        """Read the tensor stored under `key` into new memory, and wait for it.

        The result is one consistent version, even while others write. Raises KeyError, StorageError, and TimeoutError
        if `key` is overwritten faster than it can be read.
        """
        for _ in range(_READS):
            stored = self.info(key)
            out = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            try:
                self.wait(self.read(key, out, priority=priority))
            except (StorageError, ValueError):  # the tensor may have become smaller meanwhile
                if self.info(key).generation == stored.generation:
                    raise
            # Another generation may have another size or dtype, so the data read may be only a part of it.
            if self.info(key).generation == stored.generation:
                return out
        raise TimeoutError(f"'{key}' is being overwritten faster than it can be read")

    def commit(self) -> int:
        """Make all changes that were waited for durable, atomically, and visible to other processes.

        Returns their number. Raises StorageError; after a failed flush the store accepts nothing more: close it in all
        processes, open it again and verify. Raises RuntimeError in a volatile engine.
        """
        if self.config.volatile:
            raise RuntimeError("commit: a volatile engine persists nothing: open the store without `volatile`")
        return self._store.commit()

    def erase(self, key: str) -> bool:
        """Remove a tensor, permanently with the next commit (volatile: at once); return False if there is none."""
        return self._native.erase(key)

    def info(self, key: str) -> StoredTensor:
        """Return the index entry of a tensor. Raises KeyError if there is none."""
        found = self._native.find(key)
        if found is None:
            raise KeyError(key)
        return StoredTensor(**found)

    def __contains__(self, key: str) -> bool:
        return self._native.find(key) is not None

    def items(self) -> list[tuple[str, StoredTensor]]:
        """Return all tensors by key, uncommitted ones included."""
        return [(key, StoredTensor(**found)) for key, found in self._native.list()]

    def verify(self, keys: Iterable[str] | None = None) -> dict[str, str]:
        """Read tensors from the devices and return the problem of each damaged one by key; empty if all are intact."""
        names = [key for key, _ in self.items()] if keys is None else list(keys)
        checked = ((key, self._native.verify(key)) for key in names)
        # A listed tensor that another process has erased by now is not damaged.
        return {key: problem for key, problem in checked if problem and (keys is not None or key in self)}

    def register_buffer(self, tensor: torch.Tensor) -> bool:
        """Register the tensor's memory with the io_uring rings, so that transfers need no page look-up.

        This applies to transfers to and from the tensor and its views. It is meant for long-lived buffers: each worker
        pins them, which counts against the locked memory limit. Until `unregister_buffer` or `close` the engine keeps
        the memory alive, and forked children do not get it. Returns False if that is not possible (libaio, locked
        memory limit, 256 pieces of up to 1 GiB are registered); transfers work all the same.
        """
        return self._native.register_buffer(tensor)

    def unregister_buffer(self, tensor: torch.Tensor) -> bool:
        """Undo `register_buffer` of this tensor (by its address); the memory can be freed when this returns.

        Requests in flight are not affected. Returns False if the tensor was not registered.
        """
        return self._native.unregister_buffer(tensor)

    @property
    def uncommitted(self) -> int:
        """Number of changes that `commit` would make durable."""
        return self._store.uncommitted()

    def space(self) -> StoreSpace:
        """Return the store's space as it is now."""
        return StoreSpace(**self._store.space())

    def collect(self) -> int:
        """Compact the log to its live records and free dead processes' reservations; return how many were freed."""
        return self._store.collect()

    def write_trace(self, path: str | os.PathLike[str]) -> int:
        """Append the requests that ended since the last call to a CSV (TRACE_COLUMNS); return their number.

        Times are in nanoseconds of CLOCK_MONOTONIC.
        """
        rows = self._native.drain_trace()
        target = Path(path)
        fresh = not target.exists() or target.stat().st_size == 0
        with target.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(TRACE_COLUMNS)
            writer.writerows(rows)
        return len(rows)

    def close(self) -> None:
        """End all requests and the threads, and leave the store. Uncommitted changes are discarded. Idempotent.

        After Ctrl-C, requests that hang are left until the process ends, with a warning that names the device or file:
        the memory of their transfers must not be used again.
        """
        self._finalizer()
        self._native = self._store = None  # type: ignore[assignment]  # later calls are AttributeErrors

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def paths(self) -> list[str]:
        """The devices, in the order of their numbers in the store."""
        return list(self._store.paths())

    def _where(self) -> str:
        return f": {', '.join(self.paths)}"

    def _place(self) -> str:
        return ", ".join(self.paths)

    @property
    def backend(self) -> str:
        """Either io_uring or libaio."""
        return self._native.backend

    @property
    def bounce_buffers(self) -> list[tuple[int, int]]:
        """Host memory for transfers that O_DIRECT does not accept as they are: (address, bytes), one per worker.

        Pageable and resident, with this size from the engine's start to its end.
        """
        return self._native.bounce_buffers


def _end(native: Any, store: Any, pid: int, scratch: ScratchFile | None) -> None:
    """Finalizer: end a native engine, and remove its scratch file unless the engine was given up."""
    if end_engine(native, lambda: ", ".join(store.paths()), pid) and scratch is not None:
        scratch.remove()

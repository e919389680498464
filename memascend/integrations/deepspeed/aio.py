"""Replacements of the asynchronous I/O module that DeepSpeed's swappers load (``OpBuilder._loaded_ops["async_io"]``).

:class:`AioModule` is our own, with the engines of ``memascend.storage`` and the allocator of ``memascend.memory``.
:class:`MeteredAioModule` is DeepNVMe with counters and ledger entries, and with one repair, without which a twin trains
wrongly: reads whose address or length is not 512-aligned go through an aligned buffer.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memascend.memory.ledger import Ledger
from memascend.memory.pinned import is_pinned
from memascend.memory.run_buffers import owned
from memascend.planner.derived_sizes import IoSettings
from memascend.simulator.recorder import READ, WRITE, Recorder
from memascend.storage.file_engine import FileEngine

from .accelerator import SWAP_BUFFERS, PinnedAllocator, calling_owner
from .swap_store import PARAMETER_READ, SwapStore

if TYPE_CHECKING:
    from memascend.storage.completion import Completion

_DIRECT_IO_ALIGNMENT = 512  # bytes; alignment that O_DIRECT requires of address, length and offset
_PADDING_A_THREAD = 1024  # bytes; DeepSpeed's AIO_ALIGNED_BYTES


def _path(filename: str | int | None, fd: int | None = None) -> str:
    """Return the path of a file, given as DeepNVMe takes it: by name, or by descriptor as the name or as ``fd``."""
    if (filename is None) == (fd is None):
        raise TypeError("one of filename and fd must be given")
    descriptor = filename if fd is None else fd
    return f"/proc/self/fd/{descriptor}" if isinstance(descriptor, int) else str(descriptor)


def _named(path: str) -> str:
    """Return a readable name of a swap file: its file name without the suffix."""
    return PurePath(path).name.removesuffix(".tensor.swp")


@dataclass
class IoCounters:
    """Transfers of the swappers since the last reset, and their bytes; one instance per process."""

    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    realigned_reads: int = 0
    recorder: ClassVar[Recorder | None] = None  # set on the instance while a step is traced

    def begun(self, transfer: Completion, *, read: bool, path: str, nbytes: int) -> None:
        """Record `transfer` from now until its end, if a recorder is set."""
        recorder = self.recorder
        if recorder is not None:
            begin, phase = recorder.now(), recorder.current_phase
            resource, name = (READ if read else WRITE), _named(path)
            transfer.add_done_callback(recorder.transfer(name, resource, begin, nbytes, phase))

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a thread waits for transfers; it records the wait if a recorder is set."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.wait()

    def count(self, *, read: bool, nbytes: int) -> None:
        """Count one transfer of ``nbytes`` as it is submitted."""
        if read:
            self.bytes_read += nbytes
            self.reads += 1
        else:
            self.bytes_written += nbytes
            self.writes += 1

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_read = self.bytes_written = self.reads = self.writes = self.realigned_reads = 0


class AioModule:
    """Replacement of the compiled ``async_io`` module; its ``aio_handle`` makes handles on our engines.

    With a ``store`` the swappers' tensors go there and all other data to files; without one everything goes to files.
    """

    def __init__(
        self, allocator: PinnedAllocator, counters: IoCounters, io: IoSettings, store: SwapStore | None = None
    ) -> None:
        self._allocator, self._counters, self._io, self.store = allocator, counters, io, store

    def aio_handle(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> AioHandle:
        """Return a handle. It reports DeepNVMe's arguments back, but the engines use the settings of this module."""
        asked = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        return AioHandle(self._allocator, self._counters, self._io, self.store, asked)


class PinModule:
    """Replacement of DeepSpeed's compiled ``pin_memory`` module (0.19.4 and later)."""

    def __init__(self, allocator: PinnedAllocator) -> None:
        self._allocator = allocator

    def pin_handle(self) -> PinHandle:
        return PinHandle(self._allocator)


class PinHandle:
    """DeepSpeed's handle for page-locked memory. Each handle recognises the buffers of all handles, and their views.

    Ownership: tensors from ``new_cpu_locked_tensor`` live until their last view is gone, whatever is called.
    """

    def __init__(self, allocator: PinnedAllocator) -> None:
        self._allocator = allocator

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a page-locked tensor of ``num_elem`` elements (1-D, the dtype of ``example_tensor``). The ledger names
        the DeepSpeed function that requests it as its owner; swap buffers are also registered."""
        if num_elem == 0:  # the swapper's own pool, which our pool replaces
            return torch.empty(0, dtype=example_tensor.dtype)
        owner = calling_owner()
        tensor = owned(self._allocator, num_elem, example_tensor.dtype, owner)
        if owner in SWAP_BUFFERS:
            self.register(tensor)
        return tensor

    def register(self, tensor: torch.Tensor) -> None:
        """Do nothing: a handle without transfers needs no registration."""

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is one of our buffers. Its memory is freed with its last view, not here."""
        return is_pinned(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether ``buffer`` is in memory that our allocators have pinned, views included."""
        return is_pinned(buffer)


class AioHandle(PinHandle):
    """DeepNVMe's handle interface over our engines: any address and length, every completion checked.

    The swappers' own buffers are registered with the store, which keeps them alive until ``free_cpu_locked_tensor``,
    ``end_training`` or ``close``. All others live until their last view is gone.

    ``wait`` raises :class:`memascend.storage.errors.StorageError`; a failed write is never reported as done.
    """

    def __init__(
        self,
        allocator: PinnedAllocator,
        counters: IoCounters,
        io: IoSettings,
        store: SwapStore | None,
        asked: tuple[int, int, bool, bool, int],
    ) -> None:
        super().__init__(allocator)
        self._counters, self._io, self._store = counters, io, store
        self._asked = asked
        self.read_priority = PARAMETER_READ  # for reads from the store; the optimizer's handles get a lower one
        self._files: FileEngine | None = None
        self._in_store: list[Completion] = []  # this handle's store transfers since the last wait
        self._user = None if store is None else store.attach()
        self._finalizer = None if store is None else weakref.finalize(self, store.lose, self._user)
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def close(self) -> None:
        """End the handle with its training: erase what it wrote to the store and stop its threads. Idempotent."""
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self._store.detach(self._user)

    def end_training(self) -> None:
        """Mark the training as over; what the handle wrote can be read until ``memascend.disable()``."""
        if self._store is not None:
            self._store.end_training(self._user)

    @property
    def memory_alignment_bytes(self) -> int:
        """Alignment of buffers, in bytes, at which they are transferred without a copy."""
        return _DIRECT_IO_ALIGNMENT if self._store is None else self._store.memory_alignment_bytes

    def register(self, tensor: torch.Tensor) -> None:
        """Pin a long-lived buffer for the store's transfers (:meth:`SwapStore.register`)."""
        if self._store is not None:
            self._store.register(tensor, self._user)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister ``tensor`` from the store, which kept it alive; return whether it is one of our buffers."""
        if self._store is not None:
            self._store.unregister(tensor)
        return super().free_cpu_locked_tensor(tensor)

    def get_block_size(self) -> int:
        return self._asked[0]

    def get_queue_depth(self) -> int:
        return self._asked[1]

    def get_single_submit(self) -> bool:
        return self._asked[2]

    def get_overlap_events(self) -> bool:
        return self._asked[3]

    def get_intra_op_parallelism(self) -> int:
        return self._asked[4]

    def get_alignment(self) -> int:
        """Return DeepNVMe's alignment in bytes, to which DeepSpeed pads its tensors; our engines need none."""
        return self._asked[4] * _DIRECT_IO_ALIGNMENT

    def async_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start to fill ``buffer`` (contiguous, on the CPU) from byte ``file_offset`` of a file or a tensor of the
        store. Returns 0; an error of the transfer is raised by :meth:`wait`."""
        self._counters.count(read=True, nbytes=buffer.nbytes)
        path = _path(filename)
        if self._store is not None and self._store.holds(path):
            padding = self._asked[4] * _PADDING_A_THREAD
            transfer = self._store.read(path, buffer, file_offset, padding, priority=self.read_priority)
            self._counters.begun(transfer, read=True, path=path, nbytes=buffer.nbytes)
            self._in_store.append(transfer)
        else:
            self._file_engine().async_read(buffer, path, file_offset)
        return 0

    def async_pwrite(
        self, buffer: torch.Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start to write ``buffer`` (contiguous, on the CPU) at byte ``file_offset``; the file is named or given as
        ``fd``. The buffer must stay unchanged until :meth:`wait`. Returns 0."""
        path = _path(filename, fd)
        self._counters.count(read=False, nbytes=buffer.nbytes)
        if self._store is not None and self._store.holds(path):
            transfer = self._store.write(path, buffer, file_offset, user=self._user)
            self._counters.begun(transfer, read=False, path=path, nbytes=buffer.nbytes)
            self._in_store.append(transfer)
        else:
            self._file_engine().async_write(buffer, path, file_offset)
        return 0

    def stage(self, path: str, target: Path) -> str | None:
        """Make ``target`` a file of the store's tensor ``path`` without moving its bytes (:meth:`SwapStore.stage`)."""
        return None if self._store is None else self._store.stage(path, target)

    def share(self, path: str, nbytes: int, handle: int, at: int) -> bool:
        """Have an open file share the bytes of the store's tensor ``path`` (:meth:`SwapStore.share`)."""
        return self._store is not None and self._store.share(path, nbytes, handle, at)

    def begin_read(self, buffer: torch.Tensor, path: str) -> Completion:
        """Start to fill ``buffer`` from the store's tensor ``path``; :meth:`wait` does not wait for it."""
        self._counters.count(read=True, nbytes=buffer.nbytes)
        padding = self._asked[4] * _PADDING_A_THREAD
        transfer = self._store.read(path, buffer, 0, padding, priority=self.read_priority)
        self._counters.begun(transfer, read=True, path=path, nbytes=buffer.nbytes)
        return transfer

    def begin_write(self, buffer: torch.Tensor, path: str) -> Completion:
        """Start to write ``buffer`` to the store's tensor ``path``; :meth:`wait` does not wait for it.

        The write has the priority of the reads, because they wait for the memory that it frees, and because a drive can
        read and write at the same time.
        """
        self._counters.count(read=False, nbytes=buffer.nbytes)
        transfer = self._store.write(path, buffer, priority=self.read_priority, user=self._user)
        self._counters.begun(transfer, read=False, path=path, nbytes=buffer.nbytes)
        return transfer

    def wait(self) -> int:
        """Wait for all requests of this handle and return how many have ended since the last call."""
        requests, self._in_store = self._in_store, []
        in_files = 0
        with self._counters.waiting():
            try:
                if self._store is not None:
                    self._store.wait(requests)
            finally:
                if self._files is not None:
                    in_files = self._files.wait()
        return len(requests) + in_files

    def _file_engine(self) -> FileEngine:
        """Return the engine for paths outside of the store; its threads start with the first such request."""
        if self._files is None:
            self._files = FileEngine(threads=self._io.workers, block_bytes=self._io.block_bytes)
        return self._files

    def sync_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Do :meth:`async_pread` and wait for all requests of this handle; return how many have ended."""
        self.async_pread(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Do :meth:`async_pwrite` and wait for all requests of this handle; return how many have ended."""
        self.async_pwrite(buffer, filename, file_offset)
        return self.wait()

    def pread(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """Do :meth:`async_pread` or :meth:`sync_pread`. ``validate`` has no effect, because every completion is
        checked."""
        self.async_pread(buffer, filename, file_offset)
        return 0 if asynchronous else self.wait()

    def pwrite(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """Do :meth:`async_pwrite` or :meth:`sync_pwrite`. ``validate`` has no effect, because every completion is
        checked."""
        self.async_pwrite(buffer, filename, file_offset)
        return 0 if asynchronous else self.wait()

    def read(self, buffer: torch.Tensor, filename: str | int, validate: bool = False, file_offset: int = 0) -> int:
        """Do :meth:`sync_pread` and return 0, as DeepNVMe's ``read`` does."""
        self.sync_pread(buffer, filename, file_offset)
        return 0

    def write(self, buffer: torch.Tensor, filename: str | int, validate: bool = False, file_offset: int = 0) -> int:
        """Do :meth:`sync_pwrite` and return 0, as DeepNVMe's ``write`` does."""
        self.sync_pwrite(buffer, filename, file_offset)
        return 0


class MeteredAioModule:
    """DeepNVMe's own module whose handles have counters, ledger entries and the realignment repair."""

    def __init__(self, stock: Any, ledger: Ledger, counters: IoCounters) -> None:
        self._stock, self._ledger, self._counters = stock, ledger, counters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def aio_handle(self, *args: Any, **kwargs: Any) -> MeteredAioHandle:
        return MeteredAioHandle(self._stock.aio_handle(*args, **kwargs), self._ledger, self._counters)


class MeteredAioHandle:
    """A handle of :class:`MeteredAioModule`. Behaves like the stock handle except for the reads that it realigns."""

    def __init__(self, stock: Any, ledger: Ledger, counters: IoCounters) -> None:
        self._stock, self._ledger, self._counters = stock, ledger, counters
        self._realigned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._entry_by_address: dict[int, int] = {}
        self._traced: list[tuple[str, str, float, int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def _begun(self, resource: str, buffer: torch.Tensor, file: object) -> None:
        """Note a transfer to record when :meth:`wait` returns, as DeepNVMe only reports the end of all transfers."""
        recorder = self._counters.recorder
        if recorder is not None:
            self._traced.append((_named(str(file)), resource, recorder.now(), buffer.nbytes, recorder.current_phase))

    def async_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start DeepNVMe's read, into an aligned buffer first if the address or the length of ``buffer`` is
        unaligned."""
        self._counters.count(read=True, nbytes=buffer.nbytes)
        self._begun(READ, buffer, filename)
        if buffer.data_ptr() % _DIRECT_IO_ALIGNMENT == 0 and buffer.nbytes % _DIRECT_IO_ALIGNMENT == 0:
            return self._stock.async_pread(buffer, filename, file_offset)
        self._counters.realigned_reads += 1
        step = self._stock.get_alignment() // buffer.element_size()
        numel = -(-buffer.numel() // step) * step  # DeepSpeed pads its writes, so the file is long enough
        aligned = self._stock.new_cpu_locked_tensor(numel, buffer)
        self._realigned.append((aligned, buffer))
        return self._stock.async_pread(aligned, filename, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, *file: Any, **options: Any) -> int:
        """Count and start DeepNVMe's write."""
        self._counters.count(read=False, nbytes=buffer.nbytes)
        self._begun(WRITE, buffer, file[0] if file else "")
        return self._stock.async_pwrite(buffer, *file, **options)

    def wait(self) -> int:
        """Wait as DeepNVMe does, then copy realigned reads to their buffers; return how many transfers have ended."""
        with self._counters.waiting():
            count = self._stock.wait()
        traced, self._traced = self._traced, []
        if self._counters.recorder is not None:
            for event in traced:
                self._counters.recorder.add(*event)
        for aligned, target in self._realigned:
            target.copy_(aligned[: target.numel()])
            self._stock.free_cpu_locked_tensor(aligned)
        self._realigned.clear()
        return count

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return DeepNVMe's tensor, recorded in the ledger with the DeepSpeed function that requests it as owner."""
        owner = calling_owner()
        tensor = self._stock.new_cpu_locked_tensor(num_elem, example_tensor)
        self._entry_by_address[tensor.data_ptr()] = self._ledger.record(
            name=owner,
            owner=owner,
            role="host",
            allocator="deepspeed posix_memalign+mlock",
            requested_bytes=tensor.nbytes,
            reserved_bytes=tensor.nbytes,
            address=tensor.data_ptr(),
            locked=True,
        )
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free the tensor as DeepNVMe does and close its entry in the ledger."""
        entry = self._entry_by_address.pop(tensor.data_ptr(), None)
        if entry is not None:
            self._ledger.close(entry)
        return self._stock.free_cpu_locked_tensor(tensor)

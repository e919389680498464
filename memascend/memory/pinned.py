"""Page-locked host memory: exact, in powers of two, or counted only.

`PageAlignedPinnedAllocator` is MemAscend's alignment-free pinned memory: it reserves at most 4095 bytes over the
request. `PowerOfTwoPinnedAllocator` is the papers' baseline: PyTorch's CachingHostAllocator rounds every request up to
the next power of two (`PowerOf2Ceil`, CachingHostAllocator.h), and all of it is resident. `CountingAllocator` applies
either rounding, or that of PyTorch 2.13 with a threshold, and allocates nothing, so that a plan runs the code of a run.

Memory is freed once, after the last view of a tensor has gone; ledger entries close at that moment.

Forked children (DataLoader workers) share what is not registered until somebody writes, as with any memory. What a
CUDA driver or an io_uring ring has registered they do not get, since each would take a copy of its own: one that
touches such a tensor ends by SIGSEGV. Give workers tensors that are not registered, or a copy.

Huge pages are an option of the real allocators. `"transparent"`: a block starts on a huge page and the kernel backs it
with huge pages as far as it has them; the end that fills none stays on small pages, so nothing more is reserved.
`"reserved"`: pages that the administrator has set aside (`vm.nr_hugepages`), which are never swapped; sizes are then
whole huge pages of 2 MiB, and `reserved_bytes` says so.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

import torch

from memascend import _C
from memascend.memory import cuda
from memascend.memory.cgroup import HostMemory, host_memory
from memascend.memory.classes import ByClass
from memascend.memory.ledger import HOST, Ledger
from memascend.memory.placement import UNTOUCHED, Placement
from memascend.memory.topology import Topology

PAGE_BYTES: int = _C.PAGE_BYTES
HUGE_PAGE_BYTES: int = _C.HUGE_PAGE_BYTES
PAGES = ("small", "transparent", "reserved")

ROUND_THRESHOLD_BYTES = 1 << 20

_MAX_BYTES = 2**63 - 1


class Allocator(Protocol):
    """What a buffer pool needs of an allocator."""

    name: str
    ledger: Ledger | None

    def reserved_bytes(self, requested: int) -> int: ...

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        name: str,
        owner: str,
        role: str = HOST,
        placement: Placement | None = None,
    ) -> torch.Tensor: ...


def is_pinned(tensor: torch.Tensor) -> bool:
    """True if the tensor's data lies in a live block of ours, or in memory that torch itself pinned.

    By address, so views count. A block whose pages could only be touched, not locked (see `lock`), counts too: callers
    ask this to learn whether a buffer is fit for direct transfers. False for tensors without data.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    if _C.pinned_contains(tensor.data_ptr(), tensor.element_size()):
        return True
    return torch.cuda.is_available() and tensor.is_pinned()


def page_rounded_bytes(requested: int) -> int:
    """The request in whole pages."""
    return -(-_checked(requested) // PAGE_BYTES) * PAGE_BYTES


def power_of_two_bytes(requested: int) -> int:
    """The next power of two of the request, at least a page (which is what the driver locks for less)."""
    return max(PAGE_BYTES, 1 << (_checked(requested) - 1).bit_length())


def thresholded_bytes(requested: int) -> int:
    """What PyTorch reserves with `pinned_max_round_threshold_mb:1`, its smallest value: above it no rounding but the
    driver's, to pages (CachingHostAllocator.h from PyTorch 2.13 on, CUDA alone).
    """
    return (page_rounded_bytes if requested > ROUND_THRESHOLD_BYTES else power_of_two_bytes)(requested)


def _checked(requested: int) -> int:
    if requested <= 0:
        raise ValueError(f"pinned allocation of {requested} bytes: ask for at least one byte")
    return requested


def placement_for(placement: Placement | ByClass | None, owner: str) -> Placement | None:
    """What an allocator's policy says of one owner's memory."""
    return placement.of(owner) if isinstance(placement, ByClass) else placement


class _FreeEvents:
    """Carries frees from the native registry to the ledger that booked the block. One for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._booked: dict[int, tuple[Ledger, int]] = {}

    def book(self, block_id: int, ledger: Ledger, entry_id: int) -> None:
        with self._lock:
            self._booked[block_id] = (ledger, entry_id)
        ledger.attach(self.sync)

    def sync(self) -> None:
        """Close the entries of all blocks that were freed since the last call."""
        with self._lock:
            for event in _C.pinned_events():
                if event["kind"] == "free" and (booked := self._booked.pop(event["id"], None)):
                    ledger, entry_id = booked
                    ledger.close(entry_id, died_s=event["t_ns"] / 1e9)


_free_events = _FreeEvents()
# Nobody else is inside when a process forks: a child's copy of a lock that another thread held would never open.
os.register_at_fork(
    before=_free_events._lock.acquire,
    after_in_parent=_free_events._lock.release,
    after_in_child=_free_events._lock.release,
)


class _Host:
    """Asks the kernel whether there is room before memory is taken: beyond its limits it kills. One for the process.

    Reading /proc and the control groups for each of hundreds of small buffers would cost more than it can save: what is
    left is read again after each 64 MiB, and before anything is refused.
    """

    ASK_EVERY_BYTES = 64 << 20
    # Beside the pages themselves: their page tables, and what the kernel charges ahead (64 pages per core) or the
    # interpreter takes meanwhile.
    PAGE_TABLE_SHARE, MARGIN_BYTES = 512, 4 << 20

    def __init__(self) -> None:  # without a lock: a thread whose change is lost asks a little later
        self._memory: HostMemory | None = None
        self._left_bytes = self._unasked_bytes = 0

    def require(self, name: str, requested: int, reserved: int, *, counts_as_available: bool) -> None:
        """MemoryError, in one line, if `reserved` bytes are more than this process may have, or more than are left.

        Reserved huge pages were taken from what is available when they were set aside: they do not count as such.
        """
        needed = reserved + reserved // self.PAGE_TABLE_SHARE + self.MARGIN_BYTES if counts_as_available else 0
        if self._memory is None or self._unasked_bytes >= self.ASK_EVERY_BYTES or needed > self._left_bytes:
            self._memory = host_memory()
            self._left_bytes, self._unasked_bytes = self._memory.available_bytes, 0
        memory = self._memory
        size = f"pinned buffer {name!r}: {reserved >> 20} MiB ({requested >> 20} MiB requested) is more than the "
        if reserved > min(_MAX_BYTES, memory.limit_bytes):
            where = f"that {memory.limited_by.file} allows" if memory.limited_by else "of RAM"
            fix = "use a smaller model, more ranks or a smaller sub-group"
            raise MemoryError(f"{size}{memory.limit_bytes >> 20} MiB {where}: {fix}")
        if needed > self._left_bytes:
            where = f"that {memory.scarce_in.file} leaves now" if memory.scarce_in else "of RAM that is free now"
            fix = "end other programs or use a smaller model"
            raise MemoryError(f"{size}{memory.available_bytes >> 20} MiB {where}: {fix}")
        if counts_as_available:
            self._left_bytes -= reserved
            self._unasked_bytes += reserved


_host = _Host()


class _PinnedAllocator:
    """Shared by the real allocators; a subclass gives the name and the rounding. Thread-safe."""

    name: str

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        lock: bool = True,
        require_lock: bool = False,
        register_cuda: bool | None = None,
        pages: str = "small",
        placement: Placement | ByClass | None = None,
        topology: Topology | None = None,
    ) -> None:
        """`lock`: page-lock by mlock; where the limit refuses, pages are touched and the entry says `locked=False`,
        unless `require_lock`. `register_cuda`: make the memory known to the driver (default: if there is a device).
        `pages`: small, transparent or reserved, see above. `placement`: NUMA nodes of blocks that are not given any of
        their own, of all or by class of their owner; `topology`: what placements are checked against (default: this
        machine, as it is then).
        """
        if pages not in PAGES:
            raise ValueError(f"unknown pages {pages!r}: use one of {', '.join(PAGES)}")
        if require_lock and not lock:
            raise ValueError("require_lock=True needs lock=True")
        if register_cuda and not cuda.available():
            raise ValueError("register_cuda=True, but torch finds no CUDA device: remove it")
        self.ledger = ledger
        self.lock = lock
        self.require_lock = require_lock
        self.register_cuda = register_cuda
        self.pages = pages
        self.placement = placement
        self.topology = topology

    def reserved_bytes(self, requested: int) -> int:
        """What a request takes: the policy's rounding, in whole huge pages where those are reserved ones."""
        rounded = _POLICIES[self.name](requested)
        return -(-rounded // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if self.pages == "reserved" else rounded

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        name: str,
        owner: str,
        role: str = HOST,
        placement: Placement | None = None,
    ) -> torch.Tensor:
        """A 1-D tensor of exactly `numel` elements, 4096-aligned, zero-filled by the kernel, resident.

        `placement` is set before the first touch (default: the allocator's; without any the kernel's own policy).
        Raises ValueError for a size below one and for nodes that are not there, MemoryError beyond the RAM, the control
        group, a strict node, the ledger's budget, the huge pages that are set aside or (with require_lock) the memlock
        limit.
        """
        requested = numel * dtype.itemsize
        if requested <= 0:
            raise ValueError(f"pinned buffer {name!r} of {numel} elements: ask for at least one")
        reserved = self.reserved_bytes(requested)
        _host.require(name, requested, reserved, counts_as_available=self.pages != "reserved")
        placement = placement or placement_for(self.placement, owner)
        if placement is not None:
            placement.check(Topology.read() if self.topology is None else self.topology, reserved)
        _free_events.sync()  # keeps the native log short in runs that never ask the ledger
        entry = self._book(name, owner, role, requested, reserved)
        try:
            tensor, block = self._take(numel, dtype, name, reserved, placement)
        except BaseException:
            if self.ledger is not None and entry is not None:
                self.ledger.withdraw(entry)
            raise
        if self.ledger is not None and entry is not None:
            self._complete(self.ledger, entry, block, placement)
        return tensor

    def _take(
        self, numel: int, dtype: torch.dtype, name: str, reserved: int, placement: Placement | None
    ) -> tuple[torch.Tensor, dict[str, int]]:
        """The tensor and what the registry says of its block; registered with CUDA where that is wanted."""
        try:
            where = None if placement is None else placement.native()
            tensor, block = _C.pinned_empty(numel, dtype, reserved, self.lock, self.require_lock, self.pages, where)
        except MemoryError as error:
            raise MemoryError(f"pinned buffer {name!r}: {error}") from None
        self._register(block)
        return tensor, block

    def _register(self, block: dict[str, int]) -> None:
        wanted = cuda.available() if self.register_cuda is None else self.register_cuda
        if wanted:
            _C.pinned_set_unregister_callback(cuda.unregister)
            cuda.register(block["address"], block["reserved_bytes"])
            _C.pinned_mark_registered(block["id"])

    def _book(self, name: str, owner: str, role: str, requested: int, reserved: int) -> int | None:
        """The entry, before the memory is taken: a budget refuses here."""
        if self.ledger is None:
            return None
        return self.ledger.record(name, owner, requested, role=role, allocator=self.name, reserved_bytes=reserved)

    def _complete(self, ledger: Ledger, entry: int, block: dict[str, int], placement: Placement | None) -> None:
        locked, born_s, nodes = bool(block["locked"]), block["born_ns"] / 1e9, None
        if placement is not None:  # where it really is: all but strict policies may take other nodes
            nodes = tuple(n for n in _C.pages_by_node(block["address"], block["reserved_bytes"]) if n != UNTOUCHED)
        ledger.amend(entry, address=block["address"], locked=locked, born_s=born_s, nodes=nodes)
        _free_events.book(block["id"], ledger, entry)


class PageAlignedPinnedAllocator(_PinnedAllocator):
    """Reserves the request in whole pages: at most 4095 bytes over it (with reserved huge pages, less than 2 MiB)."""

    name = "page_aligned"


class PowerOfTwoPinnedAllocator(_PinnedAllocator):
    """Reserves, locks and touches the next power of two, as PyTorch's CachingHostAllocator does."""

    name = "power_of_two"


_POLICIES = {
    PageAlignedPinnedAllocator.name: page_rounded_bytes,
    PowerOfTwoPinnedAllocator.name: power_of_two_bytes,
    "round_threshold": thresholded_bytes,
}


class CountingAllocator:
    """Books what an allocator of `policy` would, and allocates nothing.

    Policies: those of the real allocators ("page_aligned", "power_of_two"), and "round_threshold", PyTorch's own with
    its rounding bounded (`thresholded_bytes`), which only CUDA has.

    Tensors are on the meta device; their entries stay open until the ledger is told (`Ledger.close`). Entries have the
    nodes of the placement, which is checked against `topology` where a machine is described.
    """

    def __init__(
        self,
        policy: str,
        ledger: Ledger | None = None,
        *,
        placement: Placement | ByClass | None = None,
        topology: Topology | None = None,
    ) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"unknown allocator policy {policy!r}: use one of {', '.join(_POLICIES)}")
        self.name = policy
        self.ledger = ledger
        self.placement = placement
        self.topology = topology

    def reserved_bytes(self, requested: int) -> int:
        return _POLICIES[self.name](requested)

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        name: str,
        owner: str,
        role: str = HOST,
        placement: Placement | None = None,
    ) -> torch.Tensor:
        """A 1-D meta tensor of `numel` elements, booked as a real one would be. Raises ValueError below one."""
        requested = numel * dtype.itemsize
        if requested > _MAX_BYTES:
            raise ValueError(f"buffer {name!r} of {numel} elements exceeds any memory: check the sizes of the run")
        if requested <= 0:
            raise ValueError(f"pinned buffer {name!r} of {numel} elements: ask for at least one")
        reserved = self.reserved_bytes(requested)
        placement = placement or placement_for(self.placement, owner)
        if placement is not None and self.topology is not None:
            placement.check(self.topology, reserved)
        if self.ledger is not None:
            self.ledger.record(
                name,
                owner,
                requested,
                role=role,
                allocator=self.name,
                reserved_bytes=reserved,
                locked=False,
                nodes=None if placement is None else placement.nodes,
            )
        return torch.empty(numel, dtype=dtype, device="meta")

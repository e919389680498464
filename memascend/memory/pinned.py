"""Page-locked host memory: allocators that round to pages or to powers of two, and one that only counts.

`PageAlignedPinnedAllocator` is MemAscend's alignment-free pinned memory: it reserves at most 4095 bytes more than the
request. `PowerOfTwoPinnedAllocator` is the papers' baseline: PyTorch's CachingHostAllocator rounds every request up to
the next power of two (`PowerOf2Ceil`, CachingHostAllocator.h), all of which is resident. `CountingAllocator` applies
either rounding, or that of PyTorch 2.13 with a threshold, and allocates nothing, so that a plan runs the code of a run.

Memory is freed once, after the last view of a tensor is gone; ledger entries close at that moment.

Forked children (DataLoader workers) share unregistered memory copy-on-write, as usual. Memory that is registered with a
CUDA driver or an io_uring ring is not inherited, since each child would get its own copy: a child that accesses such a
tensor dies of SIGSEGV. Give workers unregistered tensors, or copies.

The real allocators optionally use huge pages. `"transparent"`: a block starts on a huge-page boundary and the kernel
backs it with huge pages as far as available; the rest at its end stays on small pages, so nothing more is reserved.
`"reserved"`: pages that the administrator has set aside (`vm.nr_hugepages`), which are never swapped; sizes are then
multiples of 2 MiB, and `reserved_bytes` accounts for that.
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
    """The interface that buffer pools need of an allocator."""

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
    """Return whether the tensor's data is in a live block of ours, or in memory that torch itself pinned.

    The check is by address, so views count. A block whose pages could only be touched, not locked (see `lock`), counts
    too: callers need to know whether a buffer is suitable for direct transfers. Tensors without data do not count.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    if _C.pinned_contains(tensor.data_ptr(), tensor.element_size()):
        return True
    return torch.cuda.is_available() and tensor.is_pinned()


def page_rounded_bytes(requested: int) -> int:
    """Return the request rounded up to whole pages, in bytes."""
    return -(-_checked(requested) // PAGE_BYTES) * PAGE_BYTES


def power_of_two_bytes(requested: int) -> int:
    """Return the request rounded up to a power of two, and at least to a page, which is what the driver locks."""
    return max(PAGE_BYTES, 1 << (_checked(requested) - 1).bit_length())


def thresholded_bytes(requested: int) -> int:
    """Return what PyTorch reserves with `pinned_max_round_threshold_mb:1`, its smallest value.

    Larger requests are only rounded to pages, by the driver (CachingHostAllocator.h from PyTorch 2.13 on, CUDA only).
    """
    return (page_rounded_bytes if requested > ROUND_THRESHOLD_BYTES else power_of_two_bytes)(requested)


def _checked(requested: int) -> int:
    """Return the requested bytes. Raises ValueError for less than one byte."""
    if requested <= 0:
        raise ValueError(f"pinned allocation of {requested} bytes: ask for at least one byte")
    return requested


def placement_for(placement: Placement | ByClass | None, owner: str) -> Placement | None:
    """Return the placement of an owner's memory under an allocator's placement or placement by class."""
    return placement.of(owner) if isinstance(placement, ByClass) else placement


class _FreeEvents:
    """Forwards frees from the native registry to the ledgers that have the blocks. One instance per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._booked: dict[int, tuple[Ledger, int]] = {}

    def book(self, block_id: int, ledger: Ledger, entry_id: int) -> None:
        """Have the ledger's entry closed when the block is freed."""
        with self._lock:
            self._booked[block_id] = (ledger, entry_id)
        ledger.attach(self.sync)

    def sync(self) -> None:
        """Close the ledger entries of all blocks that were freed since the last call."""
        with self._lock:
            for event in _C.pinned_events():
                if event["kind"] == "free" and (booked := self._booked.pop(event["id"], None)):
                    ledger, entry_id = booked
                    ledger.close(entry_id, died_s=event["t_ns"] / 1e9)


_free_events = _FreeEvents()
# The lock is taken around a fork: a child's copy of a lock that another thread holds would never be released.
os.register_at_fork(
    before=_free_events._lock.acquire,
    after_in_parent=_free_events._lock.release,
    after_in_child=_free_events._lock.release,
)


class _Host:
    """Checks that memory is available before an allocation, since the kernel kills beyond its limits. One per process.

    Reading /proc and the control groups for each of hundreds of small buffers would be too expensive: the remaining
    memory is read again after every 64 MiB, and before anything is refused.
    """

    ASK_EVERY_BYTES = 64 << 20
    # Allowance for page tables, and for what the kernel charges ahead (64 pages per core) or the interpreter allocates
    # meanwhile.
    PAGE_TABLE_SHARE, MARGIN_BYTES = 512, 4 << 20

    def __init__(self) -> None:  # no lock: a lost update only delays the next read
        self._memory: HostMemory | None = None
        self._left_bytes = self._unasked_bytes = 0

    def require(self, name: str, requested: int, reserved: int, *, counts_as_available: bool) -> None:
        """Raise MemoryError if `reserved` bytes exceed what this process may have, or what is left.

        Reserved huge pages left the available memory when they were set aside, so they do not count against it.
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
    """Common base of the real allocators; a subclass sets the name, which selects the rounding. Thread-safe."""

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
        """Create the allocator. `lock`: page-lock with mlock. If the limit refuses, pages are only touched and the
        entry has `locked=False`, unless `require_lock`. `register_cuda`: register the memory with the driver (default:
        if there is a device). `pages`: small, transparent or reserved, see the module. `placement`: NUMA nodes of
        blocks without a placement of their own, for all blocks or by class of their owner; `topology`: the machine that
        placements are checked against (default: this one, read at each allocation).
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
        """Return the bytes that a request takes: the policy's rounding, in whole huge pages if those are reserved."""
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
        """Return a 1-D tensor of exactly `numel` elements: 4096-aligned, zero-filled by the kernel, resident.

        `placement` is applied before the first touch (default: the allocator's, else the kernel's policy). Raises
        ValueError for a size below one and for nodes that do not exist; MemoryError if the request exceeds the RAM, the
        control group, a strict node, the ledger's budget, the reserved huge pages or (with require_lock) the memlock
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
        _free_events.sync()  # keeps the native event log short even if the ledger is never queried
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
        """Return the tensor and its block's registry entry; registered with CUDA if requested."""
        try:
            where = None if placement is None else placement.native()
            tensor, block = _C.pinned_empty(numel, dtype, reserved, self.lock, self.require_lock, self.pages, where)
        except MemoryError as error:
            raise MemoryError(f"pinned buffer {name!r}: {error}") from None
        self._register(block)
        return tensor, block

    def _register(self, block: dict[str, int]) -> None:
        """Register a block with the CUDA driver, if there is one and the allocator was not told otherwise."""
        wanted = cuda.available() if self.register_cuda is None else self.register_cuda
        if wanted:
            _C.pinned_set_unregister_callback(cuda.unregister)
            cuda.register(block["address"], block["reserved_bytes"])
            _C.pinned_mark_registered(block["id"])

    def _book(self, name: str, owner: str, role: str, requested: int, reserved: int) -> int | None:
        """Book the entry before the memory is allocated, so that a budget can refuse it."""
        if self.ledger is None:
            return None
        return self.ledger.record(name, owner, requested, role=role, allocator=self.name, reserved_bytes=reserved)

    def _complete(self, ledger: Ledger, entry: int, block: dict[str, int], placement: Placement | None) -> None:
        """Add what is known after the allocation to the block's ledger entry, and have it closed at the free."""
        locked, born_s, nodes = bool(block["locked"]), block["born_ns"] / 1e9, None
        if placement is not None:  # record the actual nodes: only strict policies guarantee theirs
            nodes = tuple(n for n in _C.pages_by_node(block["address"], block["reserved_bytes"]) if n != UNTOUCHED)
        ledger.amend(entry, address=block["address"], locked=locked, born_s=born_s, nodes=nodes)
        _free_events.book(block["id"], ledger, entry)


class PageAlignedPinnedAllocator(_PinnedAllocator):
    """Rounds up to whole pages: at most 4095 bytes more (with reserved huge pages, less than 2 MiB more)."""

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
    """Books what an allocator with `policy` would reserve, and allocates nothing.

    Policies are those of the real allocators ("page_aligned", "power_of_two") and "round_threshold", PyTorch's own with
    limited rounding (`thresholded_bytes`), which exists for CUDA only.

    Tensors are on the meta device; their entries stay open until `Ledger.close` is called. Entries have the nodes of
    the placement, which is checked against `topology` if one is given.
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
        """Return the bytes that the policy reserves for a request. Raises ValueError below one byte."""
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
        """Return a 1-D meta tensor of `numel` elements, booked like a real one. Raises ValueError for numel < 1."""
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

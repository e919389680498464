"""Page-locked host memory by three policies: exact, power of two, and counted only.

`PageAlignedPinnedAllocator` is MemAscend's alignment-free pinned memory: it reserves at most 4095 bytes over the
request. `PowerOfTwoPinnedAllocator` is the papers' baseline: PyTorch's CachingHostAllocator rounds every request up to
the next power of two (`PowerOf2Ceil`, CachingHostAllocator.h), and all of it is resident. `CountingAllocator` applies
either rounding and allocates nothing, so that a plan runs the code of a run.

Memory is freed once, after the last view of a tensor has gone; ledger entries close at that moment.

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
from memascend.memory.ledger import HOST, Ledger

PAGE_BYTES: int = _C.PAGE_BYTES
HUGE_PAGE_BYTES: int = _C.HUGE_PAGE_BYTES
PAGES = ("small", "transparent", "reserved")

_MAX_BYTES = 2**63 - 1


class Allocator(Protocol):
    """What a buffer pool needs of an allocator."""

    name: str
    ledger: Ledger | None

    def reserved_bytes(self, requested: int) -> int: ...

    def allocate(self, numel: int, dtype: torch.dtype, *, name: str, owner: str, role: str = HOST) -> torch.Tensor: ...


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


def _checked(requested: int) -> int:
    if requested <= 0:
        raise ValueError(f"pinned allocation of {requested} bytes: ask for at least one byte")
    return requested


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
    ) -> None:
        """`lock`: page-lock by mlock; where the limit refuses, pages are touched and the entry says `locked=False`,
        unless `require_lock`. `register_cuda`: make the memory known to the driver (default: if there is a device).
        `pages`: small, transparent or reserved, see above.
        """
        if pages not in PAGES:
            raise ValueError(f"unknown pages {pages!r}: use one of {', '.join(PAGES)}")
        if require_lock and not lock:
            raise ValueError("require_lock=True needs lock=True")
        if register_cuda and not cuda.available():
            raise ValueError("register_cuda=True, but torch finds no CUDA device: leave it out")
        self.ledger = ledger
        self.lock = lock
        self.require_lock = require_lock
        self.register_cuda = register_cuda
        self.pages = pages

    def reserved_bytes(self, requested: int) -> int:
        """What a request takes: the policy's rounding, in whole huge pages where those are reserved ones."""
        rounded = _POLICIES[self.name](requested)
        return -(-rounded // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if self.pages == "reserved" else rounded

    def allocate(self, numel: int, dtype: torch.dtype, *, name: str, owner: str, role: str = HOST) -> torch.Tensor:
        """A 1-D tensor of exactly `numel` elements, 4096-aligned, zero-filled by the kernel, resident.

        Raises ValueError for a size below one, MemoryError beyond the RAM, the huge pages that are set aside or (with
        require_lock) the memlock limit.
        """
        requested = numel * dtype.itemsize
        if requested <= 0:
            raise ValueError(f"pinned buffer {name!r} of {numel} elements: ask for at least one")
        reserved = self.reserved_bytes(requested)
        if reserved > min(_MAX_BYTES, ram := _C.host_memory_bytes()):
            raise MemoryError(
                f"pinned buffer {name!r}: {reserved >> 20} MiB ({requested >> 20} MiB requested) is more than the "
                f"{ram >> 20} MiB of RAM: use a smaller model, more ranks or a smaller sub-group"
            )
        _free_events.sync()  # keeps the native log short in runs that never ask the ledger
        try:
            tensor, block = _C.pinned_empty(numel, dtype, reserved, self.lock, self.require_lock, self.pages)
        except MemoryError as error:
            raise MemoryError(f"pinned buffer {name!r}: {error}") from None
        self._register(block)
        if self.ledger is not None:
            self._book(block, name, owner, role)
        return tensor

    def _register(self, block: dict[str, int]) -> None:
        wanted = cuda.available() if self.register_cuda is None else self.register_cuda
        if wanted:
            _C.pinned_set_unregister_callback(cuda.unregister)
            cuda.register(block["address"], block["reserved_bytes"])
            _C.pinned_mark_registered(block["id"])

    def _book(self, block: dict[str, int], name: str, owner: str, role: str) -> None:
        entry = self.ledger.record(
            name,
            owner,
            block["requested_bytes"],
            role=role,
            allocator=self.name,
            reserved_bytes=block["reserved_bytes"],
            address=block["address"],
            locked=bool(block["locked"]),
            born_s=block["born_ns"] / 1e9,
        )
        _free_events.book(block["id"], self.ledger, entry)


class PageAlignedPinnedAllocator(_PinnedAllocator):
    """Reserves the request in whole pages: at most 4095 bytes over it (with reserved huge pages, less than 2 MiB)."""

    name = "page_aligned"


class PowerOfTwoPinnedAllocator(_PinnedAllocator):
    """Reserves, locks and touches the next power of two, as PyTorch's CachingHostAllocator does."""

    name = "power_of_two"


_POLICIES = {
    PageAlignedPinnedAllocator.name: page_rounded_bytes,
    PowerOfTwoPinnedAllocator.name: power_of_two_bytes,
}


class CountingAllocator:
    """Books what a real allocator of `policy` ("page_aligned" or "power_of_two") would, and allocates nothing.

    Tensors are on the meta device; their entries stay open until the ledger is told (`Ledger.close`).
    """

    def __init__(self, policy: str, ledger: Ledger | None = None) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"unknown allocator policy {policy!r}: use one of {', '.join(_POLICIES)}")
        self.name = policy
        self.ledger = ledger

    def reserved_bytes(self, requested: int) -> int:
        return _POLICIES[self.name](requested)

    def allocate(self, numel: int, dtype: torch.dtype, *, name: str, owner: str, role: str = HOST) -> torch.Tensor:
        """A 1-D meta tensor of `numel` elements, booked as a real one would be. Raises ValueError below one."""
        requested = numel * dtype.itemsize
        if requested > _MAX_BYTES:
            raise ValueError(f"buffer {name!r} of {numel} elements is beyond any memory: check the sizes of the run")
        if requested <= 0:
            raise ValueError(f"pinned buffer {name!r} of {numel} elements: ask for at least one")
        if self.ledger is not None:
            self.ledger.record(
                name,
                owner,
                requested,
                role=role,
                allocator=self.name,
                reserved_bytes=self.reserved_bytes(requested),
                locked=False,
            )
        return torch.empty(numel, dtype=dtype, device="meta")

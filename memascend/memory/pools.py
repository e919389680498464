"""Pools of parameter buffers: one size for all tensors (the baseline), or sizes from the model (MemAscend).

A pool owns page-locked memory divided into slots. A tensor that streams through host memory leases a slot and returns
it. `MonolithicBufferPool` makes every slot as large as the largest tensor, as ZeRO-Infinity does; `AdaptiveBufferPool`
has a class of slots for each size in the model (MemAscend, adaptive buffer pool), as many as are in flight at once.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from memascend.memory.pinned import Allocator

OWNER = "parameter_pool"
# The usual minimum alignment for O_DIRECT; a device may need more. DeepSpeed aligns its swap buffers to 1024 bytes.
DEFAULT_ALIGNMENT_BYTES = 512
# Number of holders named by a timeout, the oldest first: the pool of a whole model has hundreds.
_NAMED_HOLDERS = 8


class PoolTimeoutError(TimeoutError):
    """No buffer became free in time. The message names the holders; `holders` has their leases, the oldest first."""

    def __init__(self, message: str, holders: Sequence[Lease]) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


@dataclass(frozen=True)
class PoolClass:
    """`count` buffers for tensors of `numel` elements."""

    name: str
    numel: int
    count: int

    def __post_init__(self) -> None:
        if self.numel < 1 or self.count < 1:
            raise ValueError(f"pool class {self.name!r}: numel {self.numel}, count {self.count}: both must be positive")


@dataclass(eq=False, slots=True)
class Lease:
    """A slot leased under `key`.

    `tensor` has exactly the requested elements; `slot_tensor` has `slot_numel` elements (or the whole aligned slot),
    for aligned transfers. Both are views of the pool's memory. `since_s` is the time of the lease on the clock of
    time.monotonic(), `holder` the name of the requesting thread. `wasted_bytes` is the unused part of a slot of a
    larger class; 0 if the class is the tensor's own.
    """

    key: Hashable
    numel: int
    slot_tensor: torch.Tensor
    class_name: str
    holder: str
    wasted_bytes: int = 0
    since_s: float = field(default_factory=time.monotonic)

    @property
    def tensor(self) -> torch.Tensor:
        return self.slot_tensor.narrow(0, 0, self.numel)

    def __str__(self) -> str:
        age_s = time.monotonic() - self.since_s
        return (
            f"{self.key!r} ({self.tensor.nbytes} bytes in {self.class_name}, for {age_s:.3g} s, thread {self.holder})"
        )


def adaptive_pool_classes(
    block_numels: Sequence[Sequence[int]], outside_numels: Sequence[int], blocks_in_flight: int = 1
) -> list[PoolClass]:
    """Return the size classes for a model, largest first (MemAscend, adaptive buffer pool).

    `block_numels` has the sizes of the streamed tensors of each transformer block; `outside_numels` the sizes of those
    outside (embeddings, head), with one buffer each. A size gets as many buffers as it occurs at most in one block,
    times `blocks_in_flight`. For a dense model in 16 bits the sum is 2E + N (3 FF + 2 KV + 2 QO).
    """
    if blocks_in_flight < 1:
        raise ValueError(f"blocks in flight: {blocks_in_flight}: use at least one")
    most: Counter[int] = Counter()
    for block in block_numels:
        for numel, multiplicity in Counter(block).items():
            most[numel] = max(most[numel], multiplicity)
    counts = Counter({numel: multiplicity * blocks_in_flight for numel, multiplicity in most.items()})
    counts.update(outside_numels)
    return [PoolClass(f"numel-{numel}", numel, counts[numel]) for numel in sorted(counts, reverse=True)]


class _Slots:
    """The buffers of one class, all of one capacity, handed out last in, first out (likely still in the caches)."""

    def __init__(self, pool_class: PoolClass, buffers: Iterable[torch.Tensor]) -> None:
        self.pool_class = pool_class
        self.free = list(buffers)[::-1]
        self.capacity = self.free[0].numel()


class _Request(NamedTuple):
    """A requested tensor and the indices of classes that may serve it; `home` is its own or the nearest larger one."""

    key: Hashable
    numel: int
    slot_numel: int | None
    home: int
    exact: bool
    candidates: range


@dataclass(frozen=True)
class Fallback:
    """Use of another class: `times` tensors of `numel` elements were in `class_name`, each wasting `wasted_bytes`."""

    numel: int
    class_name: str
    wasted_bytes: int
    times: int


@dataclass(eq=False)
class _Waiter:
    """A request that no free slot fits. A returned slot goes to the first waiter that it fits, so nobody overtakes."""

    request: _Request
    holder: str = field(default_factory=lambda: threading.current_thread().name)
    served: threading.Event = field(default_factory=threading.Event)
    lease: Lease | None = None


class BufferPool:
    """Leasing and return of slots. Thread-safe. Use one of the two subclasses.

    `lease` never waits. `acquire` waits in a queue: a returned buffer goes to the oldest request that it fits.

    Counters: `fallbacks`, leases served by a larger class because the tensor's size has no class, because the aligned
    length does not fit it, or (with `borrow`) because its class was used up (`fallback_report` lists the sizes);
    `denials`, leases refused.
    """

    def __init__(
        self,
        slots: Sequence[_Slots],
        dtype: torch.dtype,
        total_bytes: int,
        any_size: bool,
        arenas: Sequence[torch.Tensor],
    ) -> None:
        """`any_size`: the only class is for tensors of every size, so a smaller tensor is not a fallback. `arenas`: the
        allocations that contain the slots."""
        self.dtype = dtype
        self.arenas = tuple(arenas)
        self.total_bytes = total_bytes
        self.denials = 0
        self._fallbacks: Counter[tuple[int, str, int]] = Counter()
        self._any_size = any_size
        self._slots = sorted(slots, key=lambda s: s.capacity)
        self._capacities = [s.capacity for s in self._slots]
        self._by_numel = {s.pool_class.numel: i for i, s in enumerate(self._slots)}
        self._homes: dict[tuple[int, int | None], tuple[int, bool]] = {}  # cache by requested sizes: a model has few
        self._free = sum(len(s.free) for s in self._slots)
        self._held: dict[Hashable, tuple[Lease, int, torch.Tensor]] = {}
        self._waiting: list[_Waiter] = []
        self._lock = threading.Lock()

    @property
    def classes(self) -> list[PoolClass]:
        """The size classes, smallest first."""
        return [s.pool_class for s in self._slots]

    @property
    def largest_numel(self) -> int:
        """Number of elements of a slot of the largest class."""
        return self._capacities[-1]

    def lease(self, key: Hashable, numel: int, slot_numel: int | None = None, *, borrow: bool = False) -> Lease | None:
        """Lease a slot for `numel` elements under `key`; return None if its class has no free one.

        The class is that of the tensor's size; a size without a class, or an aligned length `slot_numel` beyond it,
        uses the nearest larger class. With `borrow` any larger class may be used if that is exhausted, for callers
        that cannot wait, at the risk of starving larger tensors.
        Raises ValueError for sizes that fit no class, a `slot_numel` below `numel`, and a key that already has a slot.
        """
        with self._lock:
            request = self._request(key, numel, slot_numel, borrow)
            lease = self._try(request, threading.current_thread().name)
            self.denials += lease is None
            return lease

    def acquire(
        self, key: Hashable, numel: int, slot_numel: int | None = None, *, timeout_s: float, borrow: bool = False
    ) -> Lease:
        """Lease a slot as `lease` does, but wait up to `timeout_s` seconds for one to be returned.

        Raises PoolTimeoutError, a TimeoutError that names the holders of the slots in question, their sizes and ages.
        """
        if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"buffer pool: a time-out of {timeout_s} s: use zero to {threading.TIMEOUT_MAX}")
        with self._lock:
            waiter = _Waiter(self._request(key, numel, slot_numel, borrow))
            if lease := self._try(waiter.request, waiter.holder):
                return lease
            self._waiting.append(waiter)
        try:
            waiter.served.wait(timeout_s)
        except BaseException:  # interrupted: pass on a slot that was assigned meanwhile
            with self._lock:
                if waiter.lease is None:
                    self._waiting.remove(waiter)
                else:
                    self._take_back(key)
            raise
        with self._lock:
            if waiter.lease is not None:
                return waiter.lease
            self._waiting.remove(waiter)
            self.denials += 1
            raise self._timed_out(waiter.request, timeout_s)

    def release(self, key: Hashable) -> None:
        """Return a slot, by its key or its Lease.

        Raises ValueError for a key without a slot (already returned, or never leased here), and for a lease that is not
        the current one of its key.
        """
        lease = key if isinstance(key, Lease) else None
        key = lease.key if lease is not None else key
        with self._lock:
            held = self._held.get(key)
            if held is None:
                raise ValueError(f"buffer pool: {key!r} holds no buffer: returned already, or never leased here")
            if lease is not None and held[0] is not lease:
                raise ValueError(
                    f"buffer pool: this lease of {key!r} is stale or belongs to another pool: return the current one"
                )
            self._take_back(key)

    def holders(self) -> dict[Hashable, Lease]:
        """Return the current leases by key."""
        with self._lock:
            return {key: lease for key, (lease, _, _) in self._held.items()}

    @property
    def fallbacks(self) -> int:
        """Number of leases served by a larger class so far."""
        with self._lock:
            return self._fallbacks.total()

    def fallback_report(self) -> list[Fallback]:
        """Return which sizes used a larger class, and what that wastes; the most wasteful first."""
        with self._lock:
            found = [Fallback(*what, times) for what, times in self._fallbacks.items()]
        return sorted(found, key=lambda fallback: fallback.wasted_bytes, reverse=True)

    def waiting(self) -> list[Hashable]:
        """Return the keys that wait for a slot now, in queue order."""
        with self._lock:
            return [waiter.request.key for waiter in self._waiting]

    def free_count(self, numel: int | None = None) -> int:
        """Return the number of free slots in all, or in the class that serves tensors of `numel` elements."""
        with self._lock:
            return self._free if numel is None else len(self._slots[self._home(numel, None)[0]].free)

    def share_a_class(self, numel: int, other: int) -> bool:
        """Return whether one slot may serve tensors of either size. Raises ValueError for a size that fits no class."""
        with self._lock:
            return self._home(numel, None)[0] == self._home(other, None)[0]

    # The methods below are called with the lock held.

    def _request(self, key: Hashable, numel: int, slot_numel: int | None, borrow: bool) -> _Request:
        """Return the request for a tensor. Raises ValueError if it fits no class, or `key` has or awaits a slot."""
        home, exact = self._home(numel, slot_numel)
        if key in self._held:
            raise ValueError(f"buffer pool: {key!r} holds a buffer already: release it before the next lease")
        if self._waiting and any(waiter.request.key == key for waiter in self._waiting):
            raise ValueError(f"buffer pool: {key!r} is already waiting for a buffer in another thread: use another key")
        return _Request(key, numel, slot_numel, home, exact, range(home, len(self._slots) if borrow else home + 1))

    def _try(self, request: _Request, holder: str) -> Lease | None:
        """Lease a free slot of the request's candidates, or return None."""
        for chosen in request.candidates:
            if self._slots[chosen].free:
                break
        else:
            return None
        slots = self._slots[chosen]
        slot = slots.free.pop()
        self._free -= 1
        shown = slot if request.slot_numel is None else slot.narrow(0, 0, request.slot_numel)
        lease = Lease(request.key, request.numel, shown, slots.pool_class.name, holder)
        if not request.exact or chosen != request.home:
            lease.wasted_bytes = (slots.capacity - request.numel) * self.dtype.itemsize
            self._fallbacks[request.numel, lease.class_name, lease.wasted_bytes] += 1
        self._held[request.key] = (lease, chosen, slot)
        return lease

    def _take_back(self, key: Hashable) -> None:
        """Give the slot to the first waiter that it fits, so no waiter could use any slot that is free."""
        _, place, slot = self._held.pop(key)
        self._slots[place].free.append(slot)
        self._free += 1
        for waiter in self._waiting:
            if place in waiter.request.candidates:
                waiter.lease = self._try(waiter.request, waiter.holder)
                self._waiting.remove(waiter)
                waiter.served.set()
                return

    def _timed_out(self, request: _Request, timeout_s: float) -> PoolTimeoutError:
        """Return the error for a request that has waited too long, with the leases of the slots in question."""
        classes = [self._slots[i].pool_class for i in request.candidates]
        names = {c.name for c in classes}
        holders = sorted((h[0] for h in self._held.values() if h[0].class_name in names), key=lambda h: h.since_s)
        shown = "; ".join(str(lease) for lease in holders[:_NAMED_HOLDERS])
        more = f"; and {len(holders) - _NAMED_HOLDERS} more" if len(holders) > _NAMED_HOLDERS else ""
        wanted, count = request.numel * self.dtype.itemsize, sum(c.count for c in classes)
        return PoolTimeoutError(
            f"buffer pool: {request.key!r} waited {timeout_s:g} s for a buffer of {wanted} bytes; "
            f"all {count} that fit ({', '.join(sorted(names))}) are held by {shown}{more}: "
            "release leases sooner, or build the pool with more blocks in flight",
            holders,
        )

    def _home(self, numel: int, slot_numel: int | None) -> tuple[int, bool]:
        """Return the index of the class for such a tensor, and whether it is the tensor's own. Raises ValueError."""
        found = self._homes.get((numel, slot_numel))
        if found is None:
            needed, own = self._needed(numel, slot_numel), self._by_numel.get(numel)
            if own is not None and self._capacities[own] >= needed:
                found = own, True
            else:
                found = bisect.bisect_left(self._capacities, needed), self._any_size
            self._homes[numel, slot_numel] = found
        return found

    def _needed(self, numel: int, slot_numel: int | None) -> int:
        """Return the elements that a slot must have. Raises ValueError if no class has so many."""
        if numel < 1:
            raise ValueError(f"buffer pool: a tensor of {numel} elements needs no buffer")
        if slot_numel is not None and slot_numel < numel:
            raise ValueError(f"buffer pool: aligned length {slot_numel} is less than the tensor's {numel} elements")
        needed = slot_numel or numel
        if needed > self._capacities[-1]:
            raise ValueError(
                f"buffer pool: a tensor of {needed} elements fits no class, the largest holds {self._capacities[-1]}: "
                "size the pool from the model that is trained (adaptive_pool_classes)"
            )
        return needed


def _aligned_numel(numel: int, dtype: torch.dtype, alignment_bytes: int) -> int:
    """Return `numel` rounded up so that the next slot starts aligned."""
    if alignment_bytes < 1 or alignment_bytes % dtype.itemsize:
        raise ValueError(f"alignment of {alignment_bytes} bytes: use a multiple of the {dtype.itemsize}-byte item")
    step = alignment_bytes // dtype.itemsize
    return -(-numel // step) * step


class MonolithicBufferPool(BufferPool):
    """`count` buffers of the largest tensor's size, for all tensors alike (ZeRO-Infinity).

    `separate=True`: each buffer is a separate allocation with its own rounding, which is what the published totals
    describe; `separate=False`: one allocation for all, which is DeepSpeed's actual behaviour.
    """

    def __init__(
        self,
        buffer_numel: int,
        count: int,
        dtype: torch.dtype,
        allocator: Allocator,
        separate: bool,
        alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    ) -> None:
        pool_class = PoolClass("monolithic", buffer_numel, count)
        capacity = _aligned_numel(buffer_numel, dtype, alignment_bytes)
        if separate:
            arenas = [allocator.allocate(capacity, dtype, name=f"pool-{i}", owner=OWNER) for i in range(count)]
            buffers = arenas
        else:
            arenas = [allocator.allocate(capacity * count, dtype, name="pool", owner=OWNER)]
            buffers = [arenas[0].narrow(0, i * capacity, capacity) for i in range(count)]
        total_bytes = capacity * count * dtype.itemsize
        super().__init__([_Slots(pool_class, buffers)], dtype, total_bytes, any_size=True, arenas=arenas)


class AdaptiveBufferPool(BufferPool):
    """Slots by size class in one allocation; its size is the sum over classes of count x aligned size."""

    def __init__(
        self,
        classes: Sequence[PoolClass],
        dtype: torch.dtype,
        allocator: Allocator,
        alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    ) -> None:
        if not classes:
            raise ValueError("adaptive pool without classes: build them by adaptive_pool_classes")
        repeated = [numel for numel, times in Counter(c.numel for c in classes).items() if times > 1]
        if repeated:
            raise ValueError(f"adaptive pool: several classes of {repeated[0]} elements: merge them into one")
        capacities = [_aligned_numel(c.numel, dtype, alignment_bytes) for c in classes]
        total = sum(capacity * c.count for capacity, c in zip(capacities, classes, strict=True))
        arena = allocator.allocate(total, dtype, name="pool", owner=OWNER)
        slots, start = [], 0
        for pool_class, capacity in zip(classes, capacities, strict=True):
            buffers = [arena.narrow(0, start + i * capacity, capacity) for i in range(pool_class.count)]
            start += capacity * pool_class.count
            slots.append(_Slots(pool_class, buffers))
        super().__init__(slots, dtype, total * dtype.itemsize, any_size=False, arenas=[arena])


class OnDemandBuffers:
    """Buffers of any size, each allocated on request: used before a pool exists, or when one is exhausted. Thread-safe.

    With `keep`, the largest returned buffer is kept for the next request that it fits, so that a sequence of tensors,
    one after the other, costs no more than its largest; other buffers are freed with their last view.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        allocator: Allocator,
        *,
        name: str,
        keep: bool = False,
        alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    ) -> None:
        """`name` is the name of the buffers in the ledger."""
        self.dtype = dtype
        self.name = name
        self._allocator, self._keep, self._alignment_bytes = allocator, keep, alignment_bytes
        self._held: dict[Hashable, tuple[Lease, torch.Tensor]] = {}
        self._kept: torch.Tensor | None = None
        self._lock = threading.Lock()

    def lease(self, key: Hashable, numel: int, slot_numel: int | None = None) -> Lease:
        """Lease a buffer like BufferPool.lease, but never return None. Raises ValueError, and as the allocator does."""
        if numel < 1 or (slot_numel is not None and slot_numel < numel):
            raise ValueError(f"{self.name}: no buffer for {numel} elements in a slot of {slot_numel}")
        needed = slot_numel or _aligned_numel(numel, self.dtype, self._alignment_bytes)
        with self._lock:
            if key in self._held:
                raise ValueError(f"{self.name}: {key!r} holds a buffer already: release it before the next lease")
            buffer, self._kept = self._kept, None
            if buffer is None or buffer.numel() < needed:
                buffer = None  # freed before the next one is allocated
                buffer = self._allocator.allocate(needed, self.dtype, name=self.name, owner=OWNER)
            lease = Lease(key, numel, buffer.narrow(0, 0, needed), self.name, threading.current_thread().name)
            self._held[key] = (lease, buffer)
            return lease

    def release(self, key: Hashable) -> None:
        """Return a buffer. Raises ValueError for a key that has none."""
        with self._lock:
            if key not in self._held:
                raise ValueError(f"{self.name}: {key!r} holds no buffer: returned already, or never leased here")
            _, buffer = self._held.pop(key)
            if self._keep and (self._kept is None or self._kept.numel() < buffer.numel()):
                self._kept = buffer

    def forget(self) -> None:
        """Free the kept buffer, and keep none from now on."""
        with self._lock:
            self._kept, self._keep = None, False

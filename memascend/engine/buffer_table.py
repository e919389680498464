"""The table of a stream's host buffers: which tensor has which, what is read ahead, whose buffer may be taken.

It is separate from the stream because everything in it runs under the stream's lock and never waits, so that each
method may rely on what the previous one saw. Waiting for a transfer or a device is up to the stream, without the lock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from threading import Condition, RLock

import torch

from memascend.engine.protocols import Completion, Event, Owner, Storage, Use
from memascend.memory.pools import BufferPool, Lease, OnDemandBuffers
from memascend.storage.interrupts import whole

READ, READ_AHEAD, WRITE = 2, 1, 0  # priorities: a fetch waits; a fetch will follow; only the buffer waits


@dataclass
class StreamStatistics:
    """Counts since the stream was created, and the pool's fallbacks.

    `hits`: fetches that found the tensor in memory or on its way; `misses`: fetches that had to start its read.
    `denied`: read-aheads for which there was no space; `evicted`: tensors that were read ahead and lost their buffer
    unused; `taken`: buffers taken from tensors that the device has a copy of; `extra_buffers`: buffers allocated
    because no slot was available; `fallbacks`: tensors in a slot of a larger class, and `fallback_wasted_bytes` the
    largest waste of one of them.
    """

    hits: int = 0
    misses: int = 0
    read_ahead: int = 0
    denied: int = 0
    evicted: int = 0
    taken: int = 0
    extra_buffers: int = 0
    failed_reads: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    fallbacks: int = 0
    fallback_wasted_bytes: int = 0


@dataclass(eq=False, slots=True)
class StreamEntry:
    """A tensor with a buffer. It is its own key in the pool: `key` may be read anew while its last buffer retires."""

    key: Hashable
    numel: int
    lease: Lease | None = None
    source: BufferPool | OnDemandBuffers | None = None
    filled: bool = False  # the contents are complete
    read: Completion | None = None
    writes: list[Completion] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # copies to the device
    users: int = 0
    spent: bool = False  # copied to the device, and not requested since
    visits: int = 0  # uses in the read-ahead queue, including the current one

    def __repr__(self) -> str:
        return repr(self.key)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor's `numel` elements of the buffer."""
        assert self.lease is not None
        return self.lease.tensor

    @property
    def slot(self) -> torch.Tensor:
        """The whole buffer."""
        assert self.lease is not None
        return self.lease.slot_tensor

    def is_quiet(self) -> bool:
        """Return whether nothing reads or writes the buffer, neither the storage nor the device."""
        if self.read is not None and not self.read.done():
            return False
        return all(write.done() for write in self.writes) and all(event.query() for event in self.events)


def _warn(line: str) -> None:
    logging.getLogger("memascend").warning(line)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of a `WeightStream`.

    `owner`: counts the uses itself; fetches and copies are then no uses, and `drop` replaces `release`.
    `slot_multiple`: transfers are a multiple of this many elements. `read_ahead_bytes`: the most that may be in memory
    unused; by default only the pool limits it. `wait_s`: seconds that a fetch waits for a slot. `describe`: names a key
    in the messages that are passed to `warn` (by default the logger `memascend`). `before_write`: may wait until a
    tensor may be overwritten; it is called without the stream's lock. `in_program_order`: which buffers a prefetch gets
    and how many are free depends on the order of calls alone, as on every rank of a training. A buffer that a transfer
    or a copy still works on then counts as free, and a prefetch waits for it.
    """

    owner: Owner | None = None
    slot_multiple: int = 1
    read_ahead_bytes: int | None = None
    wait_s: float = 60.0
    describe: Callable[[Hashable], str] = repr
    warn: Callable[[str], None] = _warn
    before_write: Callable[[Hashable], None] | None = None
    in_program_order: bool = False


class BufferTable:
    """The buffers of one stream. All methods run under `lock`, except `end_write` and `transfer_ended`, which take it.

    Buffers come from `pool`, from `staging` while there is no pool, and from `extra` where no slot is available.
    """

    def __init__(
        self,
        storage: Storage,
        pool: BufferPool | None,
        staging: OnDemandBuffers | None,
        extra: OnDemandBuffers | None,
        options: StreamOptions,
    ) -> None:
        self.storage, self.pool, self.staging, self.extra = storage, pool, staging, extra
        self._options, self._owner = options, options.owner
        self.numels: dict[Hashable, int] = {}
        self.entries: dict[Hashable, StreamEntry] = {}  # in the order in which they got buffers
        self.retiring: list[StreamEntry] = []  # dropped, but a transfer or a copy still works on the buffer
        self.queue: deque[Hashable] = deque()  # visits to come
        self.failed_writes: dict[Hashable, BaseException] = {}
        self.counts = StreamStatistics()
        self.seeking = 0  # number of fetches that look for a buffer
        self.lock = RLock()
        self.buffer_free = Condition(self.lock)  # or one can be freed
        self._warned_sizes: set[int] = set()
        self._pumping = False

    def use(self, entry: StreamEntry) -> Use:
        """Return how the entry's buffer is used now, according to the owner or to the counted users."""
        if self._owner is not None:
            return self._owner.use_of(entry.key)
        if entry.users:
            return Use.NEEDED
        return Use.COPIED if entry.spent else Use.IDLE

    def require_used(self, key: Hashable, verb: str) -> StreamEntry:
        """Return the entry of a tensor in use (with an owner: of one that has a buffer). Raises ValueError otherwise,
        with the participle `verb` in its message."""
        entry = self.entries.get(key)
        if entry is None or (self._owner is None and not entry.users):
            raise ValueError(f"stream of weights: {key!r} is {verb}, but is not in use: do it once per fetch")
        return entry

    def finish_visit(self, entry: StreamEntry, *, spent: bool) -> None:
        """End one use of a visit. The last one ends the visit: the buffer is retired, unless the queue visits the
        tensor again or the device has a copy (`spent`)."""
        entry.users -= 1
        if entry.users > 0:
            return
        entry.visits = max(0, entry.visits - 1)
        entry.spent = spent and not entry.visits
        if not entry.visits and not spent:
            self.retire(entry)
        elif self.seeking:
            self.buffer_free.notify_all()

    def end_use(self, entry: StreamEntry) -> None:
        """Undo `join` or `admit` after a failed fetch; a buffer without users and visits is retired."""
        entry.users -= 1
        if entry.users == 0 and self._owner is None and self.entries.get(entry.key) is entry and not entry.visits:
            self.retire(entry)

    def join(self, key: Hashable) -> StreamEntry | None:
        """Add a user to a tensor that has a buffer, and return its entry; None if it has no buffer."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.users += 1
            entry.spent = False
            self.counts.hits += 1
        return entry

    def admit(self, entry: StreamEntry | None, reading: bool) -> StreamEntry | None:
        """Enter a tensor that has just got a buffer for a fetch, and start its read if `reading`. None is passed on."""
        if entry is None:
            return None
        entry.users = 1
        if entry.key in self.queue:
            self.queue.remove(entry.key)  # this fetch is that visit
            entry.visits = 1
        self.entries[entry.key] = entry
        if reading:
            self.counts.misses += 1
            if not self._has_writes(entry.key):
                self.start_read(entry, READ)
        else:
            entry.filled = True
        return entry

    def start_read(self, entry: StreamEntry, priority: int) -> None:
        """Submit the read of a tensor into its slot. If that fails, the entry is retired and the error is raised."""
        slot = entry.slot
        try:
            entry.read = self.storage.read(entry.key, slot, priority=priority)
        except BaseException:
            if self.entries.get(entry.key) is entry:
                self.retire(entry)
            raise
        self.counts.bytes_read += slot.nbytes
        entry.read.add_done_callback(self.transfer_ended)

    def _has_writes(self, key: Hashable) -> bool:
        """Return whether a write of the key is in flight, or has failed."""
        there = self.entries.get(key)
        leaving = any(entry.key == key and entry.writes for entry in self.retiring)
        return leaving or key in self.failed_writes or (there is not None and bool(there.writes))

    def start_ahead(self, key: Hashable) -> StreamEntry | None:
        """Start reading a tensor that has no buffer. Return None if no space is left without taking a wanted buffer."""
        if self.seeking or self._has_writes(key):  # a buffer that comes free belongs to the waiting fetch
            return None
        wanted = self.slot_numel(self.numels[key])
        if self._options.read_ahead_bytes is not None:
            idle = [entry.slot for entry in self.entries.values() if self.use(entry) is Use.IDLE]
            dtype = self._source.dtype
            if sum(slot.nbytes for slot in idle) + wanted * dtype.itemsize > self._options.read_ahead_bytes:
                return None
        entry = self.lease(key)
        if entry is None and not self._options.in_program_order:
            self._take_a_copied_one(self.numels[key])
            entry = self.lease(key)
        if entry is not None:
            self.entries[key] = entry
            self.counts.read_ahead += 1
            self.start_read(entry, READ_AHEAD)
        return entry

    @whole
    def transfer_ended(self, _: Completion) -> None:
        """Free retiring buffers and go on reading ahead after a transfer. May run in another thread."""
        if not self.retiring and not self.queue:
            return
        with self.lock:
            self.sweep()
            self.pump()

    def pump(self) -> None:
        """Start the reads of the queue in order, until no buffer is available for the next one."""
        if self._pumping or not self.queue:  # already pumping: a transfer ended while being submitted
            return
        self._pumping = True
        try:
            while self.queue and self._pump_one(self.queue[0]):
                self.queue.popleft()
        finally:
            self._pumping = False

    def _pump_one(self, key: Hashable) -> bool:
        """Count a visit of a tensor, whose read is started if it has no buffer. Return False if it gets none."""
        entry = self.entries.get(key)
        if entry is None:
            try:
                entry = self.start_ahead(key)
            except Exception:  # the fetch that must follow raises the error
                self.counts.failed_reads += 1
        if entry is None:
            return False
        entry.visits, entry.spent = entry.visits + 1, False
        return True

    def slot_numel(self, numel: int) -> int:
        """Return `numel` rounded up to a multiple of `StreamOptions.slot_multiple`."""
        return -(-numel // self._options.slot_multiple) * self._options.slot_multiple

    @property
    def _source(self) -> BufferPool | OnDemandBuffers:
        source = self.staging if self.pool is None else self.pool
        assert source is not None
        return source

    def lease(self, key: Hashable) -> StreamEntry | None:
        """Return an entry with a free buffer for the tensor, or None. Warns once per size that wastes memory."""
        self.sweep()
        numel = self.numels[key]
        slot_numel = self.slot_numel(numel)
        if self.pool is not None and self.extra is not None and slot_numel > self.pool.largest_numel:
            return self.lease_extra(key)
        source = self._source
        entry = StreamEntry(key, numel, source=source)
        entry.lease = source.lease(entry, numel, slot_numel)
        if entry.lease is None:
            return None
        if entry.lease.wasted_bytes and numel not in self._warned_sizes:
            self._warned_sizes.add(numel)
            what = self._options.describe(key)
            self._options.warn(
                f"memascend: {what} ({numel} elements) has no class of its own in the buffer pool: it "
                f"is in {entry.lease.class_name} and wastes {entry.lease.wasted_bytes} bytes there; size the pool "
                "from the model that is trained"
            )
        return entry

    def lease_extra(self, key: Hashable) -> StreamEntry:
        """Return an entry with a buffer outside of the pool. Warns when this happens for the first time."""
        numel, extra = self.numels[key], self.extra
        assert extra is not None
        entry = StreamEntry(key, numel, source=extra)
        entry.lease = extra.lease(entry, numel, self.slot_numel(numel))
        self.counts.extra_buffers += 1
        if self.counts.extra_buffers == 1:
            what = self._options.describe(key)
            self._options.warn(
                f"memascend: no buffer of the pool can be had for {what} ({numel} elements): all that "
                "fit are in use; it gets one of its own for a while, and so will others (more memory than planned; "
                "blocks_in_flight makes the pool larger)"
            )
        return entry

    def _shares_a_class(self, entry: StreamEntry, numel: int) -> bool:
        """Return whether the entry's slot can serve a tensor of `numel` elements."""
        return self.pool is not None and entry.source is self.pool and self.pool.share_a_class(numel, entry.numel)

    def _take_a_copied_one(self, numel: int) -> None:
        """Retire a tensor that the device has a copy of and whose slot fits, if there is one."""
        for entry in self.entries.values():
            if self.use(entry) is Use.COPIED and self._shares_a_class(entry, numel) and entry.is_quiet():
                self._lose(entry, Use.COPIED)
                return

    def free_count(self) -> int:
        """Return how many slots of the pool a fetch or a prefetch would get; 1 while there is no pool."""
        self.sweep()
        if self.pool is None:
            return 1
        leaving = [entry for entry in self.retiring if entry.source is self.pool and self._options.in_program_order]
        return self.pool.free_count() + len(leaving)

    def make_space_ahead(self, numel: int) -> StreamEntry | None:
        """Return what `make_space` does for a prefetch in program order, which takes only what the device has copied,
        the tensor that has had its buffer for longest first."""
        leaving = self._retiring_one(numel)
        if leaving is None and not self.seeking:
            for entry in self.entries.values():
                if self.use(entry) is Use.COPIED and self._shares_a_class(entry, numel):
                    self._lose(entry, Use.COPIED)
                    return entry
        return leaving

    def _retiring_one(self, numel: int) -> StreamEntry | None:
        return next((entry for entry in self.retiring if self._shares_a_class(entry, numel)), None)

    def make_space(self, numel: int, keep: Collection[Hashable]) -> StreamEntry | None:
        """Return a retiring tensor whose slot fits, for the caller to wait for, or None. Retires one if necessary."""
        if (leaving := self._retiring_one(numel)) is not None:
            return leaving
        latest_first = list(reversed(self.entries.values()))
        for use in (Use.COPIED, Use.IDLE):
            for entry in latest_first:
                if entry.key in keep or self.use(entry) is not use or not self._shares_a_class(entry, numel):
                    continue
                self._lose(entry, use)
                return entry
        return None

    def _lose(self, entry: StreamEntry, use: Use) -> None:
        """Retire an entry in favour of another tensor: count it, and notify the owner."""
        if use is Use.COPIED:
            self.counts.taken += 1
        else:
            self.counts.evicted += 1
        self.retire(entry)
        if self._owner is not None:
            self._owner.dropped(entry.key, use)

    def retire(self, entry: StreamEntry) -> None:
        """Take the tensor's buffer away; the buffer goes back once nothing works on it."""
        del self.entries[entry.key]
        if entry.writes or not entry.is_quiet():
            self.retiring.append(entry)
        else:
            self._give_back(entry)
        if self.seeking:
            self.buffer_free.notify_all()

    def sweep(self) -> None:
        """Return retiring buffers on which nothing works any more, and record their failed writes."""
        if not self.retiring:
            return
        for entry in [entry for entry in self.retiring if entry.is_quiet()]:
            for write in list(entry.writes):  # all have ended, so that this does not wait
                self.end_write(entry, write)
            self.hand_back(entry)

    def hand_back(self, entry: StreamEntry) -> None:
        """Return a retiring entry's buffer to its source. Idempotent."""
        if entry in self.retiring:
            self.retiring.remove(entry)
            self._give_back(entry)

    def _give_back(self, entry: StreamEntry) -> None:
        assert entry.source is not None
        entry.source.release(entry)
        entry.lease = None  # breaks a cycle, so that an extra buffer is freed with its last view

    def end_write(self, entry: StreamEntry, write: Completion) -> None:
        """Wait for a write of the entry, remove it from the entry, and record its failure in `failed_writes`."""
        failure: BaseException | None = None
        try:
            write.wait()
        except Exception as error:
            failure = error
        with self.lock:
            if write in entry.writes:
                entry.writes.remove(write)
                if failure is not None:
                    self.failed_writes[entry.key] = failure

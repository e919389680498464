"""Tensors on their way from storage to a device: a lease on a pool's slot each, read ahead, evicted, released.

Source: MemAscend IV-A (the host buffer of a weight that the device has a copy of is done with) and IV-B (the pool).
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace
from threading import Condition, RLock
from time import monotonic

import torch

from memascend.memory.pools import BufferPool, Lease, OnDemandBuffers
from memascend.storage import interrupts
from memascend.storage.interrupts import whole

from .protocols import Completion, Event, Owner, Storage, Use

READ, READ_AHEAD, WRITE = 2, 1, 0  # priorities: somebody waits; somebody will; the buffer alone waits


@dataclass
class StreamStatistics:
    """Counts since the stream was made, and the pool's fallbacks.

    `hits`: fetches that found the tensor in memory or on its way; `misses`: those that had to start its read.
    `denied`: read-ahead for which there was no room; `evicted`: tensors that were read ahead and lost their buffer
    unused; `taken`: buffers taken from tensors that the device has a copy of; `extra_buffers`: buffers made because no
    slot could be had; `fallbacks`: slots of a larger class, `fallback_wasted_bytes` the largest waste of one of them.
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
class _Entry:
    """A tensor with a buffer. It is its own key in the pool: a key may be read anew while its last buffer retires."""

    key: Hashable
    numel: int
    lease: Lease | None = None
    source: BufferPool | OnDemandBuffers | None = None
    filled: bool = False  # the contents are there
    read: Completion | None = None
    writes: list[Completion] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # copies to the device
    users: int = 0
    spent: bool = False  # copied, and wanted by nobody since
    visits: int = 0  # uses that the read-ahead queue foresees, the present one included

    def __repr__(self) -> str:
        return repr(self.key)

    def is_quiet(self) -> bool:
        """Whether nothing reads or writes the buffer: neither the storage nor the device."""
        if self.read is not None and not self.read.done():
            return False
        return all(write.done() for write in self.writes) and all(event.query() for event in self.events)


class WeightStream:
    """Host buffers for tensors that live on a storage. Thread-safe; waits are never made with the lock held.

    A tensor is *fetched* (its contents are there on return), then *released* or *copied*, once for each fetch. What is
    released has no buffer any more; what was copied keeps it until somebody else needs it, so that a fetch in between
    costs nothing. A fetch finds a slot, in this order: a free one; one whose tensor is leaving; that of a copied
    tensor; that of a tensor read ahead (latest first); always one of the class that fits, since no other would help.
    Where there is none it waits for one to come back, or, with `extra`, gets a buffer of its own until its release.

    Tensors returned are views of the pool's memory, valid until the release (or the copy's event). The pool is the
    stream's alone.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        pool: BufferPool | None = None,
        staging: OnDemandBuffers | None = None,
        extra: OnDemandBuffers | None = None,
        owner: Owner | None = None,
        slot_multiple: int = 1,
        read_ahead_bytes: int | None = None,
        wait_s: float = 60.0,
        describe: Callable[[Hashable], str] = repr,
        warn: Callable[[str], None] | None = None,
        before_write: Callable[[Hashable], None] | None = None,
    ) -> None:
        """`staging` serves while there is no pool (see `use_pool`). `owner`: keeps the account of uses; fetches and
        copies are then no uses, and `drop` stands for `release`. `slot_multiple`: elements that transfers are a
        multiple of. `read_ahead_bytes`: at most this much lies in memory unused, by default whatever the pool holds.
        `wait_s`: how long a fetch waits for a slot. `warn` takes the lines that a person should read (by default the
        log `memascend`), `describe` says there what a key stands for. `before_write` may wait until a tensor may be
        overwritten; it is called without the stream's lock.
        """
        if pool is None and staging is None:
            raise ValueError("a stream of weights needs a pool or staging buffers")
        self._storage, self._pool, self._staging, self._extra, self._owner = storage, pool, staging, extra, owner
        self._slot_multiple, self._read_ahead_bytes, self._wait_s = slot_multiple, read_ahead_bytes, wait_s
        self._describe, self._warn = describe, warn or logging.getLogger("memascend").warning
        self._before_write = before_write
        self._numels: dict[Hashable, int] = {}
        self._entries: dict[Hashable, _Entry] = {}  # in the order in which they got their buffers
        self._retiring: list[_Entry] = []  # dropped, but a transfer or a copy still works on the buffer
        self._queue: deque[Hashable] = deque()
        self._failed_writes: dict[Hashable, BaseException] = {}
        self._warned_sizes: set[int] = set()
        self._counts = StreamStatistics()
        self._seeking = 0  # fetches that look for a buffer
        self._pumping = False
        self._lock = RLock()
        self._buffer_free = Condition(self._lock)  # or could be made free

    # -- what there is ----------------------------------------------------------------------------------------------

    @whole
    def register(self, key: Hashable, numel: int) -> None:
        """Announce a tensor, or its new size. Raises ValueError."""
        if numel < 1:
            raise ValueError(f"stream of weights: {key!r} has {numel} elements: a tensor needs at least one")
        with self._lock:
            self._numels[key] = numel

    @whole
    def use_pool(self, pool: BufferPool) -> None:
        """Buffers come from `pool` from now on; those of the staging go as they are released."""
        with self._lock:
            self._pool = pool
            if self._staging is not None:
                self._staging.forget()

    @property
    def pool(self) -> BufferPool | None:
        return self._pool

    def __contains__(self, key: Hashable) -> bool:
        """Whether the tensor has a buffer, filled or on its way."""
        with self._lock:
            return key in self._entries

    def tensor(self, key: Hashable) -> torch.Tensor:
        """The buffer of a tensor that has one: 1-D, on the CPU, of the pool's dtype and the `numel` that was
        registered; a view of the slot, valid until the last use ends. Raises KeyError. Any thread."""
        with self._lock:
            return self._entries[key].lease.tensor

    @whole
    def free_count(self) -> int:
        """Slots of the pool that a fetch or a read-ahead would get at once; 1 while there is no pool."""
        with self._lock:
            self._sweep()
            return 1 if self._pool is None else self._pool.free_count()

    def statistics(self) -> StreamStatistics:
        with self._lock:
            report = [] if self._pool is None else self._pool.fallback_report()
            wasted = max((fallback.wasted_bytes for fallback in report), default=0)
            times = sum(fallback.times for fallback in report)
            return replace(self._counts, fallbacks=times, fallback_wasted_bytes=wasted)

    # -- ahead of need ----------------------------------------------------------------------------------------------

    @whole
    def prefetch(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Start reading those of `keys` for which there is room, and leave the rest; returns what was started.

        What has a buffer already is skipped. Raises KeyError (not registered) and what the storage raises.
        """
        started, used_up = [], set()  # sizes
        with self._lock:
            for key in keys:
                numel = self._numels[key]
                if key in self._entries:
                    continue
                if numel in used_up or self._start_ahead(key) is None:
                    used_up.add(numel)
                    self._counts.denied += 1
                    continue
                started.append(key)
        return started

    @whole
    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Queue visits to come, in their order. Each is read as soon as a slot and the budget allow, never out of turn.

        A tensor that is visited again while it is still in memory stays there. Raises as `prefetch`.
        """
        with self._lock:
            keys = list(keys)
            for key in keys:
                self._numels[key]  # raises before anything is queued
            self._queue.extend(keys)
            self._pump()

    @whole
    def release_idle(self) -> list[Hashable]:
        """Forget the queue and give back every buffer that nobody works with; returns the keys."""
        with self._lock:
            self._queue.clear()
            idle = [entry for entry in self._entries.values() if self._use(entry) is Use.IDLE]
            for entry in idle:
                self._retire(entry)
            return [entry.key for entry in idle]

    # -- use --------------------------------------------------------------------------------------------------------

    @whole
    def fetch(self, keys: Iterable[Hashable]) -> list[torch.Tensor]:
        """The tensors, contents and all; all reads are started before the first is waited for. Any thread.

        Each is 1-D, on the CPU, of the pool's dtype and the `numel` that was registered: a view of the slot, valid
        until the `release` that belongs to this call.

        Raises KeyError (not registered), PoolTimeoutError (no slot in time, no `extra`) and the storage's failure; the
        tensors that were asked for are then as before the call, and a fetch that follows reads again.
        """
        keys = list(dict.fromkeys(keys))
        entered: list[_Entry] = []
        try:
            for key in keys:
                entered.append(self._enter(key, keys, reading=True))
            for entry in entered:
                if not entry.filled:
                    self._await_contents(entry)
        except BaseException:
            with self._lock:
                for entry in entered:
                    self._end_use(entry)
            raise
        with self._lock:
            if self._owner is not None:
                for entry in entered:
                    entry.users -= 1
            tensors = [entry.lease.tensor for entry in entered]
            self._pump()
        return tensors

    @whole
    def put(self, key: Hashable) -> torch.Tensor:
        """A buffer for contents that are made in memory; they are the caller's to fill, then to `write`. Counts as a
        fetch. Raises KeyError and PoolTimeoutError."""
        entry = self._enter(key, (key,), reading=False)
        self._quiesce(entry)
        with self._lock:
            entry.filled, entry.read = True, None
            entry.users -= self._owner is not None
            return entry.lease.tensor

    @whole
    def write(self, key: Hashable) -> Completion:
        """Write a tensor's buffer to the storage. It must not be changed until that has ended; it may be released at
        once. A read of the key that is asked for later gets the new contents. Raises KeyError and the failure of an
        earlier write of this key."""
        with self._lock:
            entry = self._entries[key]
        self._await_writes(key)
        if self._before_write is not None:
            self._before_write(key)
        with self._lock:
            completion = self._storage.write(key, entry.lease.slot_tensor, priority=WRITE)
            self._counts.bytes_written += entry.lease.slot_tensor.nbytes
            entry.writes.append(completion)
        completion.add_done_callback(self._transfer_ended)
        return completion

    @whole
    def wait(self, keys: Iterable[Hashable]) -> None:
        """Until the reads of those of `keys` that are on their way have ended. Raises the first failure."""
        with self._lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
        for entry in entries:
            self._await_contents(entry)

    @whole
    def copied(self, key: Hashable, event: Event | None = None) -> None:
        """The device has its copy when `event` has passed (None: now). Ends a use. Raises ValueError without one."""
        with self._lock:
            entry = self._used(key, "copied")
            entry.events = [pending for pending in entry.events if not pending.query()]
            entry.events += [event] if event is not None else []
            if self._owner is None:
                self._finish_visit(entry, spent=True)
            self._pump()

    @whole
    def copying(self, key: Hashable, event: Event) -> None:
        """The device copies a tensor in use until `event` has passed: its buffer is not given back before."""
        with self._lock:
            entry = self._used(key, "copied")
            entry.events = [*(pending for pending in entry.events if not pending.query()), event]

    def await_copies(self, key: Hashable) -> None:
        """Until the device has all copies of a tensor that were begun: then its buffer may be changed."""
        with self._lock:
            events = list(self._entries[key].events)
        for event in events:
            event.synchronize()

    @whole
    def release(self, key: Hashable) -> None:
        """End a use; with the last one the buffer goes back, unless the queue visits it again. Never waits: what still
        works on the buffer ends first. Raises ValueError if nobody uses the tensor."""
        with self._lock:
            self._finish_visit(self._used(key, "released"), spent=False)
            self._pump()

    @whole
    def drop(self, key: Hashable) -> bool:
        """Give the buffer back whatever it is used for; False if there is none. Never waits, as `release`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._retire(entry)
                self._pump()
            return entry is not None

    @whole
    def flush(self) -> None:
        """Until every write has ended. Raises the first failure; none of them is left for a later step."""
        with self._lock:
            keys = [entry.key for entry in (*self._entries.values(), *self._retiring) if entry.writes]
            keys += list(self._failed_writes)
        failures = []
        for key in dict.fromkeys(keys):
            try:
                self._await_writes(key)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    @whole
    def close(self) -> None:
        """Give all buffers back, when everything on its way has ended. Raises the first failed write."""
        with self._lock:
            self._queue.clear()
            for entry in list(self._entries.values()):
                self._retire(entry)
            leaving = list(self._retiring)
        for entry in leaving:
            self._settle(entry)
        self.flush()

    # -- waiting: called without the lock ---------------------------------------------------------------------------

    def _enter(self, key: Hashable, keep: Collection[Hashable], *, reading: bool) -> _Entry:
        """The tensor's entry with a user more, its read started."""
        with self._lock:
            entry = self._join(key) or self._admitted(self._lease(key), reading)
            if entry is not None:
                return entry
            self._seeking += 1
        deadline = monotonic() + self._wait_s
        try:
            while True:
                with self._lock:
                    entry = self._join(key) or self._admitted(self._lease(key), reading)
                    if entry is not None:
                        return entry
                    leaving = self._make_room(self._numels[key], keep)
                    if leaving is None and self._extra is not None:
                        return self._admitted(self._lease_extra(key), reading)
                    if leaving is None:
                        self._wait_for_a_buffer(key, deadline - monotonic())
                if leaving is not None:
                    self._settle(leaving)
        finally:
            with self._lock:
                self._seeking -= 1

    def _wait_for_a_buffer(self, key: Hashable, timeout_s: float) -> None:
        """Called with the lock held, which is open while it waits. Raises PoolTimeoutError."""
        if timeout_s <= 0:  # the pool knows who holds what
            self._pool.acquire(_Entry(key, 0), self._numels[key], self._slot_numel(self._numels[key]), timeout_s=0)
        interrupts.wait(self._buffer_free.wait, timeout_s)

    def _await_contents(self, entry: _Entry) -> None:
        read = entry.read
        if read is None and not entry.filled:  # an earlier write was in flight when the buffer was leased
            self._await_writes(entry.key)
            with self._lock:
                if entry.read is None and not entry.filled:
                    self._start_read(entry, READ)
                read = entry.read
        try:
            if read is not None:
                read.wait()
        except Exception:
            with self._lock:
                if self._entries.get(entry.key) is entry:
                    self._counts.failed_reads += 1
                    self._retire(entry)
            raise
        with self._lock:
            entry.filled, entry.read = True, None

    def _await_writes(self, key: Hashable) -> None:
        with self._lock:
            entries = [entry for entry in (*self._entries.values(), *self._retiring) if entry.key == key]
            writes = [(entry, write) for entry in entries for write in entry.writes]
        for entry, write in writes:
            self._end_write(entry, write)
        with self._lock:
            self._sweep()
            failure = self._failed_writes.pop(key, None)
        if failure is not None:
            raise failure

    def _end_write(self, entry: _Entry, write: Completion) -> None:
        failure: BaseException | None = None
        try:
            write.wait()
        except Exception as error:
            failure = error
        with self._lock:
            if write in entry.writes:
                entry.writes.remove(write)
                if failure is not None:
                    self._failed_writes[entry.key] = failure

    def _quiesce(self, entry: _Entry) -> None:
        """Until nothing works on the buffer."""
        with self._lock:
            read, writes, events = entry.read, list(entry.writes), list(entry.events)
        for write in writes:
            self._end_write(entry, write)
        if read is not None:
            with contextlib.suppress(Exception):  # of contents that nobody wants
                read.wait()
        for event in events:
            event.synchronize()

    def _settle(self, entry: _Entry) -> None:
        """Until a buffer that is leaving has gone back."""
        self._quiesce(entry)
        with self._lock:
            self._hand_back(entry)

    # -- accounts: called with the lock held ------------------------------------------------------------------------

    def _use(self, entry: _Entry) -> Use:
        if self._owner is not None:
            return self._owner.use_of(entry.key)
        if entry.users:
            return Use.NEEDED
        return Use.COPIED if entry.spent else Use.IDLE

    def _used(self, key: Hashable, verb: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or (self._owner is None and not entry.users):
            raise ValueError(f"stream of weights: {key!r} is {verb}, but is not in use: do it once per fetch")
        return entry

    def _finish_visit(self, entry: _Entry, *, spent: bool) -> None:
        entry.users -= 1
        if entry.users > 0:
            return
        entry.visits = max(0, entry.visits - 1)
        entry.spent = spent and not entry.visits
        if not entry.visits and not spent:
            self._retire(entry)
        elif self._seeking:
            self._buffer_free.notify_all()

    def _end_use(self, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and self._owner is None and self._entries.get(entry.key) is entry and not entry.visits:
            self._retire(entry)

    def _join(self, key: Hashable) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.users += 1
            entry.spent = False
            self._counts.hits += 1
        return entry

    def _admitted(self, entry: _Entry | None, reading: bool) -> _Entry | None:
        """A fetched tensor that had no buffer has one now (None: it has none yet)."""
        if entry is None:
            return None
        entry.users = 1
        if entry.key in self._queue:
            self._queue.remove(entry.key)  # this is the visit that it foresaw
            entry.visits = 1
        self._entries[entry.key] = entry
        if reading:
            self._counts.misses += 1
            if not self._has_writes(entry.key):
                self._start_read(entry, READ)
        else:
            entry.filled = True
        return entry

    def _start_read(self, entry: _Entry, priority: int) -> None:
        slot = entry.lease.slot_tensor
        try:
            entry.read = self._storage.read(entry.key, slot, priority=priority)
        except BaseException:
            if self._entries.get(entry.key) is entry:
                self._retire(entry)
            raise
        self._counts.bytes_read += slot.nbytes
        entry.read.add_done_callback(self._transfer_ended)

    def _has_writes(self, key: Hashable) -> bool:
        there = self._entries.get(key)
        leaving = any(entry.key == key and entry.writes for entry in self._retiring)
        return leaving or key in self._failed_writes or (there is not None and bool(there.writes))

    def _start_ahead(self, key: Hashable) -> _Entry | None:
        """Read a tensor that has no buffer, if there is room without taking anything that is wanted."""
        if self._seeking or self._has_writes(key):  # what comes free belongs to the fetch that waits
            return None
        wanted = self._slot_numel(self._numels[key])
        if self._read_ahead_bytes is not None:
            idle = [entry.lease.slot_tensor for entry in self._entries.values() if self._use(entry) is Use.IDLE]
            dtype = (self._pool or self._staging).dtype
            if sum(slot.nbytes for slot in idle) + wanted * dtype.itemsize > self._read_ahead_bytes:
                return None
        entry = self._lease(key)
        if entry is None:
            self._take_a_copied_one(self._numels[key])
            entry = self._lease(key)
        if entry is not None:
            self._entries[key] = entry
            self._counts.read_ahead += 1
            self._start_read(entry, READ_AHEAD)
        return entry

    @whole
    def _transfer_ended(self, _: Completion) -> None:
        """Maybe in another thread: a buffer that was leaving may have become free."""
        if not self._retiring and not self._queue:
            return
        with self._lock:
            self._sweep()
            self._pump()

    def _pump(self) -> None:
        if self._pumping or not self._queue:  # the former: a transfer ended while it was being submitted
            return
        self._pumping = True
        try:
            while self._queue and self._pump_one(self._queue[0]):
                self._queue.popleft()
        finally:
            self._pumping = False

    def _pump_one(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            try:
                entry = self._start_ahead(key)
            except Exception:  # the fetch of it, which must come, raises what is wrong
                self._counts.failed_reads += 1
        if entry is None:
            return False
        entry.visits, entry.spent = entry.visits + 1, False
        return True

    def _slot_numel(self, numel: int) -> int:
        return -(-numel // self._slot_multiple) * self._slot_multiple

    def _lease(self, key: Hashable) -> _Entry | None:
        self._sweep()
        numel = self._numels[key]
        slot_numel = self._slot_numel(numel)
        source = self._staging if self._pool is None else self._pool
        if source is self._pool and self._extra is not None and slot_numel > self._pool.largest_numel:
            return self._lease_extra(key)
        entry = _Entry(key, numel, source=source)
        entry.lease = source.lease(entry, numel, slot_numel)
        if entry.lease is None:
            return None
        if entry.lease.wasted_bytes and numel not in self._warned_sizes:
            self._warned_sizes.add(numel)
            self._warn(
                f"memascend: {self._describe(key)} ({numel} elements) has no class of its own in the buffer pool: it "
                f"lies in {entry.lease.class_name} and wastes {entry.lease.wasted_bytes} bytes there; size the pool "
                "from the model that is trained"
            )
        return entry

    def _lease_extra(self, key: Hashable) -> _Entry:
        numel = self._numels[key]
        entry = _Entry(key, numel, source=self._extra)
        entry.lease = self._extra.lease(entry, numel, self._slot_numel(numel))
        self._counts.extra_buffers += 1
        if self._counts.extra_buffers == 1:
            self._warn(
                f"memascend: no buffer of the pool can be had for {self._describe(key)} ({numel} elements): all that "
                "fit are in use; it gets one of its own for a while, and so will others (more memory than planned; "
                "blocks_in_flight makes the pool larger)"
            )
        return entry

    def _shares_a_class(self, entry: _Entry, numel: int) -> bool:
        return entry.source is self._pool and self._pool.share_a_class(numel, entry.numel)

    def _take_a_copied_one(self, numel: int) -> None:
        for entry in self._entries.values():
            if self._use(entry) is Use.COPIED and self._shares_a_class(entry, numel) and entry.is_quiet():
                self._lose(entry, Use.COPIED)
                return

    def _make_room(self, numel: int, keep: Collection[Hashable]) -> _Entry | None:
        """A tensor on its way out whose slot will do: to be waited for."""
        for entry in self._retiring:
            if self._shares_a_class(entry, numel):
                return entry
        latest_first = list(reversed(self._entries.values()))
        for use in (Use.COPIED, Use.IDLE):
            for entry in latest_first:
                if entry.key in keep or self._use(entry) is not use or not self._shares_a_class(entry, numel):
                    continue
                self._lose(entry, use)
                return entry
        return None

    def _lose(self, entry: _Entry, use: Use) -> None:
        if use is Use.COPIED:
            self._counts.taken += 1
        else:
            self._counts.evicted += 1
        self._retire(entry)
        if self._owner is not None:
            self._owner.dropped(entry.key, use)

    def _retire(self, entry: _Entry) -> None:
        """The tensor has no buffer any more; the buffer goes back when nothing works on it."""
        del self._entries[entry.key]
        if entry.writes or not entry.is_quiet():
            self._retiring.append(entry)
        else:
            self._give_back(entry)
        if self._seeking:
            self._buffer_free.notify_all()

    def _sweep(self) -> None:
        if not self._retiring:
            return
        for entry in [entry for entry in self._retiring if entry.is_quiet()]:
            for write in list(entry.writes):  # ended: none of these waits
                self._end_write(entry, write)
            self._hand_back(entry)

    def _hand_back(self, entry: _Entry) -> None:
        if entry in self._retiring:
            self._retiring.remove(entry)
            self._give_back(entry)

    def _give_back(self, entry: _Entry) -> None:
        entry.source.release(entry)
        entry.lease = None  # which holds the entry: a buffer of its own goes with its last view, not with a cycle

"""Tensors on their way from storage to a device: a lease on a pool's slot each, read ahead, evicted, released.

Source: MemAscend IV-A (the host buffer of a weight that the device has a copy of is done with) and IV-B (the pool).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from time import monotonic

import torch

from memascend.memory.pools import BufferPool, OnDemandBuffers
from memascend.storage import interrupts
from memascend.storage.interrupts import whole

from .buffer_table import READ, WRITE, BufferTable, StreamEntry, StreamOptions, StreamStatistics
from .protocols import Completion, Event, Storage, Use


class WeightStream:
    """Host buffers for tensors that live on a storage. Thread-safe; waits are never made with the lock held.

    A tensor is *fetched* (its contents are there on return), then *released* or *copied*, once for each fetch. What is
    released has no buffer any more; what was copied keeps it until somebody else needs it, so that a fetch in between
    costs nothing. A fetch finds a slot, in this order: a free one; one whose tensor is leaving; that of a copied
    tensor; that of a tensor read ahead (latest first); always one of the class that fits, since no other would help.
    Where there is none it waits for one to come back, or, with `extra`, gets a buffer of its own until its release.

    Tensors returned are views of the pool's memory, valid until the release (or the copy's event). The pool is the
    stream's alone.

    Why a fetch waits where others would allocate: the pool is the memory that was planned, and host memory is what is
    scarce. Why nothing waits with the lock held: the end of a transfer takes it, in another thread, to free the buffer
    that is waited for. Why a buffer may outlive its key (`retiring`): a write or a copy still reads it, while the same
    tensor may already be fetched anew.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        pool: BufferPool | None = None,
        staging: OnDemandBuffers | None = None,
        extra: OnDemandBuffers | None = None,
        options: StreamOptions | None = None,
    ) -> None:
        """`staging` serves while there is no pool (see `use_pool`); `extra` where no slot of the pool can be had."""
        if pool is None and staging is None:
            raise ValueError("a stream of weights needs a pool or staging buffers")
        self._options = options or StreamOptions()
        self._table = BufferTable(storage, pool, staging, extra, self._options)

    # -- what there is ----------------------------------------------------------------------------------------------

    @whole
    def register(self, key: Hashable, numel: int) -> None:
        """Announce a tensor, or its new size. Raises ValueError."""
        if numel < 1:
            raise ValueError(f"stream of weights: {key!r} has {numel} elements: a tensor needs at least one")
        with self._table.lock:
            self._table.numels[key] = numel

    @whole
    def use_pool(self, pool: BufferPool) -> None:
        """Buffers come from `pool` from now on; those of the staging go as they are released."""
        with self._table.lock:
            self._table.pool = pool
            if self._table.staging is not None:
                self._table.staging.forget()

    @property
    def pool(self) -> BufferPool | None:
        return self._table.pool

    def __contains__(self, key: Hashable) -> bool:
        """Whether the tensor has a buffer, filled or on its way."""
        with self._table.lock:
            return key in self._table.entries

    def tensor(self, key: Hashable) -> torch.Tensor:
        """The buffer of a tensor that has one: 1-D, on the CPU, of the pool's dtype and the `numel` that was
        registered; a view of the slot, valid until the last use ends. Raises KeyError. Any thread."""
        with self._table.lock:
            return self._table.entries[key].tensor

    @whole
    def free_count(self) -> int:
        """Slots of the pool that a fetch or a read-ahead would get at once; 1 while there is no pool."""
        with self._table.lock:
            self._table.sweep()
            return 1 if self._table.pool is None else self._table.pool.free_count()

    def statistics(self) -> StreamStatistics:
        with self._table.lock:
            report = [] if self._table.pool is None else self._table.pool.fallback_report()
            wasted = max((fallback.wasted_bytes for fallback in report), default=0)
            times = sum(fallback.times for fallback in report)
            return replace(self._table.counts, fallbacks=times, fallback_wasted_bytes=wasted)

    # -- ahead of need ----------------------------------------------------------------------------------------------

    @whole
    def prefetch(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Start reading those of `keys` for which there is space, and leave the rest; returns what was started.

        What has a buffer already is skipped. Raises KeyError (not registered) and what the storage raises.
        """
        started, used_up = [], set()  # sizes
        with self._table.lock:
            for key in keys:
                numel = self._table.numels[key]
                if key in self._table.entries:
                    continue
                if numel in used_up or self._table.start_ahead(key) is None:
                    used_up.add(numel)
                    self._table.counts.denied += 1
                    continue
                started.append(key)
        return started

    @whole
    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Queue visits to come, in their order. Each is read as soon as a slot and the budget allow, never out of turn.

        A tensor that is visited again while it is still in memory stays there. Raises as `prefetch`.
        """
        with self._table.lock:
            keys = list(keys)
            for key in keys:
                self._table.numels[key]  # raises before anything is queued
            self._table.queue.extend(keys)
            self._table.pump()

    @whole
    def release_idle(self) -> list[Hashable]:
        """Forget the queue and give back every buffer that nobody works with; returns the keys."""
        with self._table.lock:
            self._table.queue.clear()
            idle = [entry for entry in self._table.entries.values() if self._table.use(entry) is Use.IDLE]
            for entry in idle:
                self._table.retire(entry)
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
        entered: list[StreamEntry] = []
        try:
            for key in keys:
                entered.append(self._enter(key, keys, reading=True))
            for entry in entered:
                if not entry.filled:
                    self._await_contents(entry)
        except BaseException:
            with self._table.lock:
                for entry in entered:
                    self._table.end_use(entry)
            raise
        with self._table.lock:
            if self._options.owner is not None:
                for entry in entered:
                    entry.users -= 1
            tensors = [entry.tensor for entry in entered]
            self._table.pump()
        return tensors

    @whole
    def put(self, key: Hashable) -> torch.Tensor:
        """A buffer for contents that are made in memory; they are the caller's to fill, then to `write`. Counts as a
        fetch. Raises KeyError and PoolTimeoutError."""
        entry = self._enter(key, (key,), reading=False)
        self._quiesce(entry)
        with self._table.lock:
            entry.filled, entry.read = True, None
            entry.users -= self._options.owner is not None
            return entry.tensor

    @whole
    def write(self, key: Hashable) -> Completion:
        """Write a tensor's buffer to the storage. It must not be changed until that has ended; it may be released at
        once. A read of the key that is asked for later gets the new contents. Raises KeyError and the failure of an
        earlier write of this key."""
        with self._table.lock:
            entry = self._table.entries[key]
        self._await_writes(key)
        if self._options.before_write is not None:
            self._options.before_write(key)
        with self._table.lock:
            completion = self._table.storage.write(key, entry.slot, priority=WRITE)
            self._table.counts.bytes_written += entry.slot.nbytes
            entry.writes.append(completion)
        completion.add_done_callback(self._table.transfer_ended)
        return completion

    @whole
    def wait(self, keys: Iterable[Hashable]) -> None:
        """Until the reads of those of `keys` that are on their way have ended. Raises the first failure."""
        with self._table.lock:
            entries = [self._table.entries[key] for key in keys if key in self._table.entries]
        for entry in entries:
            self._await_contents(entry)

    @whole
    def copied(self, key: Hashable, event: Event | None = None) -> None:
        """The device has its copy when `event` has passed (None: now). Ends a use. Raises ValueError without one."""
        with self._table.lock:
            entry = self._table.require_used(key, "copied")
            entry.events = [pending for pending in entry.events if not pending.query()]
            entry.events += [event] if event is not None else []
            if self._options.owner is None:
                self._table.finish_visit(entry, spent=True)
            self._table.pump()

    @whole
    def copying(self, key: Hashable, event: Event) -> None:
        """The device copies a tensor in use until `event` has passed: its buffer is not given back before."""
        with self._table.lock:
            entry = self._table.require_used(key, "copied")
            entry.events = [*(pending for pending in entry.events if not pending.query()), event]

    def await_copies(self, key: Hashable) -> None:
        """Until the device has all copies of a tensor that were begun: then its buffer may be changed."""
        with self._table.lock:
            events = list(self._table.entries[key].events)
        for event in events:
            event.synchronize()

    @whole
    def release(self, key: Hashable) -> None:
        """End a use; with the last one the buffer goes back, unless the queue visits it again. Never waits: what still
        works on the buffer ends first. Raises ValueError if nobody uses the tensor."""
        with self._table.lock:
            self._table.finish_visit(self._table.require_used(key, "released"), spent=False)
            self._table.pump()

    @whole
    def drop(self, key: Hashable) -> bool:
        """Give the buffer back whatever it is used for; False if there is none. Never waits, as `release`."""
        with self._table.lock:
            entry = self._table.entries.get(key)
            if entry is not None:
                self._table.retire(entry)
                self._table.pump()
            return entry is not None

    @whole
    def flush(self) -> None:
        """Until every write has ended. Raises the first failure; none of them is left for a later step."""
        with self._table.lock:
            keys = [entry.key for entry in (*self._table.entries.values(), *self._table.retiring) if entry.writes]
            keys += list(self._table.failed_writes)
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
        with self._table.lock:
            self._table.queue.clear()
            for entry in list(self._table.entries.values()):
                self._table.retire(entry)
            leaving = list(self._table.retiring)
        for entry in leaving:
            self._settle(entry)
        self.flush()

    # -- waiting: called without the lock ---------------------------------------------------------------------------

    def _enter(self, key: Hashable, keep: Collection[Hashable], *, reading: bool) -> StreamEntry:
        """The tensor's entry with a user more, its read started."""
        with self._table.lock:
            entry = self._table.join(key) or self._table.admit(self._table.lease(key), reading)
            if entry is not None:
                return entry
            self._table.seeking += 1
        deadline = monotonic() + self._options.wait_s
        try:
            while True:
                with self._table.lock:
                    entry = self._table.join(key) or self._table.admit(self._table.lease(key), reading)
                    if entry is not None:
                        return entry
                    leaving = self._table.make_space(self._table.numels[key], keep)
                    if leaving is None and self._table.extra is not None:
                        entry = self._table.admit(self._table.lease_extra(key), reading)
                        assert entry is not None
                        return entry
                    if leaving is None:
                        self._wait_for_a_buffer(key, deadline - monotonic())
                if leaving is not None:
                    self._settle(leaving)
        finally:
            with self._table.lock:
                self._table.seeking -= 1

    def _wait_for_a_buffer(self, key: Hashable, timeout_s: float) -> None:
        """Called with the lock held, which is open while it waits. Raises PoolTimeoutError."""
        table, numel = self._table, self._table.numels[key]
        if timeout_s <= 0:  # the pool knows who has what
            assert table.pool is not None  # staging buffers never run out
            table.pool.acquire(StreamEntry(key, 0), numel, table.slot_numel(numel), timeout_s=0)
        interrupts.wait(table.buffer_free.wait, timeout_s)

    def _await_contents(self, entry: StreamEntry) -> None:
        read = entry.read
        if read is None and not entry.filled:  # an earlier write was in flight when the buffer was leased
            self._await_writes(entry.key)
            with self._table.lock:
                if entry.read is None and not entry.filled:
                    self._table.start_read(entry, READ)
                read = entry.read
        try:
            if read is not None:
                read.wait()
        except Exception:
            with self._table.lock:
                if self._table.entries.get(entry.key) is entry:
                    self._table.counts.failed_reads += 1
                    self._table.retire(entry)
            raise
        with self._table.lock:
            entry.filled, entry.read = True, None

    def _await_writes(self, key: Hashable) -> None:
        with self._table.lock:
            entries = [entry for entry in (*self._table.entries.values(), *self._table.retiring) if entry.key == key]
            writes = [(entry, write) for entry in entries for write in entry.writes]
        for entry, write in writes:
            self._table.end_write(entry, write)
        with self._table.lock:
            self._table.sweep()
            failure = self._table.failed_writes.pop(key, None)
        if failure is not None:
            raise failure

    def _quiesce(self, entry: StreamEntry) -> None:
        """Until nothing works on the buffer."""
        with self._table.lock:
            read, writes, events = entry.read, list(entry.writes), list(entry.events)
        for write in writes:
            self._table.end_write(entry, write)
        if read is not None:
            with contextlib.suppress(Exception):  # of contents that nobody wants
                read.wait()
        for event in events:
            event.synchronize()

    def _settle(self, entry: StreamEntry) -> None:
        """Until a buffer that is leaving has gone back."""
        self._quiesce(entry)
        with self._table.lock:
            self._table.hand_back(entry)

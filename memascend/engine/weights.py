"""Host buffers for tensors that stream from storage to a device: each leases a slot of a pool, and is read ahead,
evicted and released.

Source: MemAscend IV-A (the host buffer of a weight is free once the device has its copy) and IV-B (the pool).
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
    """Host buffers for tensors that are kept on a storage. Thread-safe; it never waits while it holds its lock.

    A tensor is *fetched* (its contents are in memory on return), then *released* or *copied*, once per fetch. A
    released tensor gives up its buffer; a copied one keeps it until another tensor needs it, so that a fetch in between
    costs nothing. A fetch looks for a slot in this order: a free one; one whose tensor is being released; that of a
    copied tensor; that of a tensor read ahead (latest first); only slots of the size class that fits are considered.
    Without one it waits until a slot is returned, or, with `extra`, gets a separate buffer until its release.

    Returned tensors are views of the pool's memory, valid until the release (or the copy's event). The stream owns the
    pool: nothing else may use it.

    Why a fetch waits instead of allocating: the pool is the planned memory, and host memory is scarce. Why nothing
    waits while it has the lock: the end of a transfer takes the lock, in another thread, to free the very buffer that
    is waited for. Why a buffer may outlive its key (`retiring`): a write or a copy still reads it, while the same
    tensor may already be fetched again into another buffer.
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
        """`staging` provides buffers while there is no pool (see `use_pool`); `extra` provides them when no slot of the
        pool is available. Raises ValueError without both pool and staging."""
        if pool is None and staging is None:
            raise ValueError("a stream of weights needs a pool or staging buffers")
        self._options = options or StreamOptions()
        self._table = BufferTable(storage, pool, staging, extra, self._options)

    # -- tensors and buffers ----------------------------------------------------------------------------------------

    @whole
    def register(self, key: Hashable, numel: int) -> None:
        """Announce a tensor of `numel` elements, or its new size. Raises ValueError for fewer than one element."""
        if numel < 1:
            raise ValueError(f"stream of weights: {key!r} has {numel} elements: a tensor needs at least one")
        with self._table.lock:
            self._table.numels[key] = numel

    @whole
    def use_pool(self, pool: BufferPool) -> None:
        """Take buffers from `pool` from now on; staging buffers are freed as they are released."""
        with self._table.lock:
            self._table.pool = pool
            if self._table.staging is not None:
                self._table.staging.forget()

    @property
    def pool(self) -> BufferPool | None:
        return self._table.pool

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the tensor has a buffer, filled or being read."""
        with self._table.lock:
            return key in self._table.entries

    def tensor(self, key: Hashable) -> torch.Tensor:
        """Return the buffer of a tensor that has one: 1-D, on the CPU, of the pool's dtype and the registered `numel`;
        a view of the slot, valid until the last use ends. Raises KeyError without a buffer. Any thread."""
        with self._table.lock:
            return self._table.entries[key].tensor

    @whole
    def free_count(self) -> int:
        """Return how many slots of the pool a fetch or a read-ahead would get at once; 1 while there is no pool."""
        with self._table.lock:
            return self._table.free_count()

    def statistics(self) -> StreamStatistics:
        """Return the counts since the stream was created, as a copy. Any thread."""
        with self._table.lock:
            report = [] if self._table.pool is None else self._table.pool.fallback_report()
            wasted = max((fallback.wasted_bytes for fallback in report), default=0)
            times = sum(fallback.times for fallback in report)
            return replace(self._table.counts, fallbacks=times, fallback_wasted_bytes=wasted)

    # -- ahead of need ----------------------------------------------------------------------------------------------

    @whole
    def prefetch(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Start reading those of `keys` for which slots are free, skip the rest, and return the keys that were started.

        Tensors that already have a buffer are skipped. Raises KeyError (not registered) and errors of the storage.
        """
        started, used_up = [], set()  # used_up: sizes (numel) for which no slot is left
        for key in keys:
            with self._table.lock:
                numel = self._table.numels[key]
                if key in self._table.entries:
                    continue
                entry = None if numel in used_up else self._table.start_ahead(key)
            if entry is None and numel not in used_up and self._options.in_program_order:
                entry = self._start_ahead_in_order(key)
            if entry is not None:
                started.append(key)
                continue
            used_up.add(numel)
            with self._table.lock:
                self._table.counts.denied += 1
        return started

    @whole
    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Queue future visits in order. Each tensor is read as soon as a slot and the budget allow, in queue order.

        A tensor that the queue visits again while it is in memory stays there. Raises the same errors as `prefetch`.
        """
        with self._table.lock:
            keys = list(keys)
            for key in keys:
                self._table.numels[key]  # raises before anything is queued
            self._table.queue.extend(keys)
            self._table.pump()

    @whole
    def release_idle(self) -> list[Hashable]:
        """Clear the queue and return every buffer that is not in use to the pool; return the keys of these tensors."""
        with self._table.lock:
            self._table.queue.clear()
            idle = [entry for entry in self._table.entries.values() if self._table.use(entry) is Use.IDLE]
            for entry in idle:
                self._table.retire(entry)
            return [entry.key for entry in idle]

    # -- use --------------------------------------------------------------------------------------------------------

    @whole
    def fetch(self, keys: Iterable[Hashable]) -> list[torch.Tensor]:
        """Return the tensors with their contents; all reads are started before the first one is waited for. Any thread.

        Each tensor is 1-D, on the CPU, of the pool's dtype and the registered `numel`: a view of the slot, valid until
        the `release` that belongs to this call.

        Raises KeyError (not registered), PoolTimeoutError (no slot in time and no `extra`) and errors of the storage;
        the requested tensors are then in the state before the call, and the next fetch reads again.
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
        """Return a buffer for contents that are produced in memory: the caller fills it, then calls `write`. Counts as
        a fetch. Raises KeyError (not registered) and PoolTimeoutError."""
        entry = self._enter(key, (key,), reading=False)
        self._quiesce(entry)
        with self._table.lock:
            entry.filled, entry.read = True, None
            entry.users -= self._options.owner is not None
            return entry.tensor

    @whole
    def write(self, key: Hashable) -> Completion:
        """Start writing a tensor's buffer to the storage, and return the completion. The buffer must not be changed
        until the write has ended; it may be released at once. A later read of the key returns the new contents. Raises
        KeyError without a buffer, and the error of an earlier write of this key."""
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
        """Wait for all reads in flight among `keys`. Raises the first failure."""
        with self._table.lock:
            entries = [self._table.entries[key] for key in keys if key in self._table.entries]
        for entry in entries:
            self._await_contents(entry)

    @whole
    def copied(self, key: Hashable, event: Event | None = None) -> None:
        """End a use: the device has its copy when `event` has passed (None: now). Raises ValueError if the tensor is
        not in use."""
        with self._table.lock:
            entry = self._table.require_used(key, "copied")
            entry.events = [pending for pending in entry.events if not pending.query()]
            entry.events += [event] if event is not None else []
            if self._options.owner is None:
                self._table.finish_visit(entry, spent=True)
            self._table.pump()

    @whole
    def copying(self, key: Hashable, event: Event) -> None:
        """Note that the device copies a tensor in use until `event` has passed: its buffer is not reused before that.
        Raises ValueError if the tensor is not in use."""
        with self._table.lock:
            entry = self._table.require_used(key, "copied")
            entry.events = [*(pending for pending in entry.events if not pending.query()), event]

    def await_copies(self, key: Hashable) -> None:
        """Wait until the device has finished all copies of a tensor, so that its buffer may be changed."""
        with self._table.lock:
            events = list(self._table.entries[key].events)
        for event in events:
            event.synchronize()

    @whole
    def release(self, key: Hashable) -> None:
        """End a use; after the last one the buffer is returned, unless the queue visits the tensor again. Never waits:
        transfers still in flight end before the buffer is reused. Raises ValueError if the tensor is not in use."""
        with self._table.lock:
            self._table.finish_visit(self._table.require_used(key, "released"), spent=False)
            self._table.pump()

    @whole
    def drop(self, key: Hashable) -> bool:
        """Return the buffer to the pool, even if it is in use; return False if there is none. Like `release`, it never
        waits."""
        with self._table.lock:
            entry = self._table.entries.get(key)
            if entry is not None:
                self._table.retire(entry)
                self._table.pump()
            return entry is not None

    @whole
    def flush(self) -> None:
        """Wait until every write has ended. Raises the first failure and clears all of them, so that none is reported
        in a later step."""
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
        """Return all buffers after all transfers have ended. Raises the error of the first failed write."""
        with self._table.lock:
            self._table.queue.clear()
            for entry in list(self._table.entries.values()):
                self._table.retire(entry)
            leaving = list(self._table.retiring)
        for entry in leaving:
            self._settle(entry)
        self.flush()

    # -- waits, entered without the lock ----------------------------------------------------------------------------

    def _start_ahead_in_order(self, key: Hashable) -> StreamEntry | None:
        """Start reading a tensor after waiting for the buffer that it gets in program order; None if it gets none."""
        self._await_writes(key)
        with self._table.lock:
            leaving = self._table.make_space_ahead(self._table.numels[key])
        if leaving is not None:
            self._settle(leaving)
        with self._table.lock:
            return self._table.start_ahead(key)

    def _enter(self, key: Hashable, keep: Collection[Hashable], *, reading: bool) -> StreamEntry:
        """Return the tensor's entry with one more user; with `reading`, its read has been started, unless an earlier
        write of the key is in flight (see `_await_contents`)."""
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
        """Wait until a buffer may be free. Called under the lock, which is released during the wait. Raises
        PoolTimeoutError."""
        table, numel = self._table, self._table.numels[key]
        if timeout_s <= 0:  # the pool raises the error, since it knows who has which slot
            assert table.pool is not None  # staging buffers never run out
            table.pool.acquire(StreamEntry(key, 0), numel, table.slot_numel(numel), timeout_s=0)
        interrupts.wait(table.buffer_free.wait, timeout_s)

    def _await_contents(self, entry: StreamEntry) -> None:
        """Wait until an entry's contents are in memory, after starting its read if earlier writes of the key had to end
        first. Raises errors of the storage."""
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
        """Wait for all writes of a key. Raises the error of a failed one, and clears it."""
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
        """Wait until no transfer reads or writes the buffer."""
        with self._table.lock:
            read, writes, events = entry.read, list(entry.writes), list(entry.events)
        for write in writes:
            self._table.end_write(entry, write)
        if read is not None:
            with contextlib.suppress(Exception):  # these contents are not needed
                read.wait()
        for event in events:
            event.synchronize()

    def _settle(self, entry: StreamEntry) -> None:
        """Wait until a retiring buffer is quiet, and return it to the pool."""
        self._quiesce(entry)
        with self._table.lock:
            self._table.hand_back(entry)

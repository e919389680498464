"""The optimizer swapper for several paths: sub-groups are cached in host memory, each with its own transfers.

DeepSpeed's swappers wait for all transfers of an I/O handle together, read at most one sub-group ahead and write each
one out. With several paths that leaves all but one idle. Here host memory caches as many sub-groups as `buffer_count`
allows, each with its own transfers: as soon as one is written out, the next in the order of the update is read into its
slot (MLP-Offload, Algorithm 1). If the order is reversed with each step, the last sub-groups of an update stay in
memory and are neither written nor read again (3.2, cache-friendly order).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper

from memascend.planner.derived_sizes import STATES, cached_sub_groups_in
from memascend.storage.completion import Completion, all_of


class SubGroupSlot:
    """Buffers for one sub-group in host memory: master weights, two moments, and the gradient if that is swapped."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.gradient = buffers[:STATES], buffers[STATES] if len(buffers) > STATES else None
        self.info: Any = None
        self.dirty = False  # the states have changed since they were last written
        self.gradient_read = False
        self.reading: Completion | None = None
        self.writing: Completion | None = None


class CachedSubGroupSwapper(PartitionedOptimizerSwapper):
    """Optimizer swapper that caches sub-groups, as the module describes.

    Its methods are called by one thread; callbacks of transfers run on the dispatcher's thread.
    """

    swaps_gradients = False
    keeps = True  # keep the last sub-groups of an update in memory

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()  # guards the attributes below
        self._slots: list[SubGroupSlot] = []
        self._free: list[SubGroupSlot] = []
        self._cached: dict[str, SubGroupSlot] = {}  # by parameter id, including slots that are still being read
        self._writing: deque[SubGroupSlot] = deque()
        self._order: list[Any] = []
        self._position = 0
        self._gradient_buffer: torch.Tensor | None = None  # for the current gradient, if slots have no buffer for it
        self._failure: BaseException | None = None

    # -- the order of an update ----------------------------------------------------------------------------------------

    def begin_update(self, parameters: Sequence[Any]) -> None:
        """Set the order in which the swapped sub-groups will be updated and begin to read them."""
        self.flush_gradients()
        with self._lock:
            self._open_slots()
            self._order, self._position = list(parameters), 0
            for slot in self._cached.values():
                slot.gradient_read = False
        self._advance()

    def end_update(self) -> None:
        """End the update's order and raise the first error of a transfer. Writes may still be in flight."""
        with self._lock:
            self._order = []
        self._free_gradient_buffer()
        self._raise_failure()

    def settle(self) -> None:
        """Write out modified sub-groups, drop the others and free the memory of all slots. Idempotent."""
        with self._lock:
            self._order = []
            for slot in list(self._cached.values()):
                if slot.reading is not None:
                    slot.reading.wait()
                    slot.reading = None
                if slot.dirty:
                    self._write(slot)
                else:
                    self._release(slot)
        self.wait_written()
        with self._lock:
            for slot in self._slots:
                buffers = slot.buffers if slot.gradient is None else [*slot.buffers, slot.gradient]
                self.swap_buffer_manager.free(buffers)
            self._slots, self._free = [], []

    def wait_written(self) -> None:
        """Wait for the writes that an update left in flight, which the next forward pass would otherwise hide."""
        with self._lock:
            writing = list(self._writing)
        for slot in writing:
            self._wait_written(slot)
        self._raise_failure()

    # -- DeepSpeed's calls ---------------------------------------------------------------------------------------------

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        """Give ``parameter`` the buffers of its slot, filled with its states and its gradient, and read ahead. Outside
        of an update the gradients still being written out are completed first. Raises StorageError, also that of an
        earlier write."""
        info = self._get_param_swap_info(parameter)
        if info is None:
            return
        self._raise_failure()
        if not self._order:
            self.flush_gradients()
            with self._lock:
                self._open_slots()
        slot = self._slot_of(info, parameter)
        if slot.reading is not None:
            reading, slot.reading = slot.reading, None
            try:
                reading.wait()
            except BaseException:
                self._release(slot)
                raise
        for context, buffer in zip(info.tensors, slot.buffers, strict=False):
            numel = self._io_aligned_numel(info.numel())
            context.set_buffers(
                compute_buffer=buffer.narrow(0, 0, info.numel()), swap_buffer=buffer.narrow(0, 0, numel)
            )
        if info.has_gradients():
            self._bring_gradient(info, parameter, slot)
        with self._lock:
            self._position = self._index(parameter) + 1
        self._advance()

    def moment_buffers(self, info: Any) -> list[torch.Tensor]:
        """Return the buffers for the moments of a sub-group that is swapped in and has none yet."""
        numel = self._io_aligned_numel(info.numel())
        return [buffer.narrow(0, 0, numel) for buffer in self._cached[info.param_id].buffers[1:]]

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        """Mark the sub-group as modified and begin to write it out, unless it is among the last of an update, which
        stay in memory. Outside of an update the write has ended on return."""
        info = self._get_param_swap_info(parameter)
        if info is None:
            return
        self._take_back_gradient(parameter)
        info.release_unswapped_gradients()
        slot = self._cached[info.param_id]
        self._adopt_moments(slot)
        slot.dirty = True
        position = self._index(parameter)
        if self._order and self.keeps and position >= len(self._order) - len(self._slots):
            return
        with self._lock:
            self._write(slot)
        if not self._order:
            self._wait_written(slot)
            self._raise_failure()

    def release_swap_buffers(self, parameter: Any) -> None:
        """Release a sub-group whose states were only read; a modified one stays in host memory."""
        info = self._get_param_swap_info(parameter)
        self._take_back_gradient(parameter)
        slot = None if info is None else self._cached.get(info.param_id)
        if slot is not None and not slot.dirty:
            self._release(slot)

    def writeback_optimizer_state_and_gradients(
        self, parameter: Any, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Store what the caller changed in a sub-group that is swapped in; states that were only read are released."""
        info = self._get_param_swap_info(parameter)
        if info is None:
            return
        if write_gradients and info.has_gradients():
            self._writeback_gradients(info, parameter, self.aio_handle)
        if write_opt_state:
            self.swap_out_optimizer_state(parameter)
        else:
            self.release_swap_buffers(parameter)

    def purge_state(self) -> None:
        """Write out modified sub-groups and free all slots, then do as DeepSpeed."""
        self.settle()
        super().purge_state()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _open_slots(self) -> None:
        """Allocate the slots. The caller holds the lock.

        They take all buffers, except for one through which swapped gradients are written out in backward.
        """
        if self._slots:
            return
        each = STATES + self.swaps_gradients
        manager = self.swap_buffer_manager
        count = cached_sub_groups_in(manager.count, self.swaps_gradients)
        if count < 1:
            raise ValueError(
                f"zero_optimization.offload_optimizer.buffer_count={manager.count} is too small: a sub-group over "
                f"several paths needs {each + self.swaps_gradients} buffers; raise it, or remove the key"
            )
        for _ in range(count):
            buffers = manager.allocate(num_elems=self.largest_numel, count=each, dtype=self.dtype)
            self._slots.append(SubGroupSlot(buffers))
        self._free = list(self._slots)

    def _slot_of(self, info: Any, parameter: Any) -> SubGroupSlot:
        """Return the sub-group's slot, waiting for a free one and beginning to read it if it is not cached."""
        while True:
            with self._lock:
                slot = self._cached.get(info.param_id)
                if slot is None and self._free:
                    slot = self._read(info)
                if slot is not None:
                    return slot
                oldest = self._writing[0] if self._writing else None
                if oldest is None:
                    self._evict()
                    continue
            self._wait_written(oldest)
            self._raise_failure()

    def _evict(self) -> None:
        """Evict the cached sub-group that is needed last. The caller holds the lock."""
        last = max(self._cached.values(), key=lambda slot: self._index_of_id(slot.info.param_id))
        if last.reading is not None:
            last.reading.wait()
            last.reading = None
        if last.dirty:
            self._write(last)
        else:
            self._release(last)

    def _index(self, parameter: Any) -> int:
        """Return the position of ``parameter`` in the order of the update (`_index_of_id`)."""
        return self._index_of_id(self.parameter_id(parameter))

    def _index_of_id(self, identity: Any) -> int:
        """Return the position in the order of the update; sub-groups that are not in it come last."""
        for index, each in enumerate(self._order):
            if self.parameter_id(each) == identity:
                return index
        return len(self._order)

    def _advance(self) -> None:
        """Read ahead in the order of the update while slots are free."""
        with self._lock:
            for parameter in self._order[self._position :]:
                identity = self.parameter_id(parameter)
                if identity in self._cached:
                    self._read_gradient(self._cached[identity])
                    continue
                if not self._free:
                    return
                self._read(self.swap_params_info[identity])

    def _read(self, info: Any) -> SubGroupSlot:
        """Begin to read a sub-group into a free slot. The caller holds the lock."""
        slot = self._free.pop()
        slot.info, slot.dirty = info, False
        self._cached[info.param_id] = slot
        numel = self._io_aligned_numel(info.numel())
        try:
            reads = [
                self.aio_handle.begin_read(buffer.narrow(0, 0, numel), path)
                for buffer, path in zip(slot.buffers, info.get_swap_paths(), strict=False)
            ]
        except BaseException:
            self._release(slot)
            raise
        slot.reading, slot.gradient_read = all_of(reads), False
        self._read_gradient(slot)
        return slot

    def _read_gradient(self, slot: SubGroupSlot) -> None:
        """Read a swapped gradient ahead with the states, once per update. The caller holds the lock."""
        if not self.swaps_gradients or not self._order or slot.gradient_read:
            return
        slot.gradient_read = True
        gradient = slot.gradient.narrow(0, 0, slot.info.numel())
        paths = slot.info.get_swap_gradient_paths()
        pieces = zip(slot.info.get_swap_gradient_buffers(gradient), paths, strict=True)
        reads = [self.aio_handle.begin_read(buffer, path) for buffer, path in pieces]
        slot.reading = all_of(reads if slot.reading is None else [slot.reading, *reads])

    def _write(self, slot: SubGroupSlot) -> None:
        """Begin to write a sub-group out; its slot is free once the writes have ended. The caller holds the lock."""
        info = slot.info
        paths = info.get_swap_paths()
        numel = self._io_aligned_numel(info.numel())
        writes = [
            self.aio_handle.begin_write(buffer.narrow(0, 0, numel), path)
            for buffer, path in zip(slot.buffers, paths, strict=False)
        ]
        info.release_memory()
        del self._cached[info.param_id]
        self._writing.append(slot)
        slot.dirty = False
        slot.writing = all_of(writes)
        slot.writing.add_done_callback(lambda end: self._written(slot, end))

    def _written(self, slot: SubGroupSlot, end: Completion) -> None:
        """Free the slot of a finished write, once, and read ahead into it. Called by any thread; keeps an error for
        later."""
        with self._lock:
            if slot.writing is not end:
                return
            self._writing.remove(slot)
            self._free.append(slot)
            self._failure = self._failure or end.error()
            slot.writing = None
        try:
            self._advance()
        except BaseException as error:  # on the dispatcher's thread: raised later on the training thread
            self._failure = self._failure or error

    def _wait_written(self, slot: SubGroupSlot) -> None:
        """Wait until the write of a slot has ended, without raising its error."""
        writing = slot.writing
        if writing is not None:
            with contextlib.suppress(Exception):  # `_written` keeps it as the failure
                writing.wait()
            self._written(slot, writing)

    def _release(self, slot: SubGroupSlot) -> None:
        """Drop a sub-group from its slot without writing it; the slot is free afterwards."""
        with self._lock:
            slot.info.release_memory()
            self._cached.pop(slot.info.param_id, None)
            if slot not in self._free:
                self._free.append(slot)

    def _raise_failure(self) -> None:
        """Raise, once, the first error of a write or of reading ahead."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- gradients and moments -----------------------------------------------------------------------------------------

    def _bring_gradient(self, info: Any, parameter: Any, slot: SubGroupSlot) -> None:
        """Set ``parameter.grad`` to a buffer with the swapped gradient and those that were too small to swap."""
        if slot.gradient is not None:
            buffer, there = slot.gradient, slot.gradient_read
        else:
            if self._gradient_buffer is None:
                self._gradient_buffer = self.aio_handle.new_cpu_locked_tensor(
                    self.largest_numel, torch.empty(0, dtype=self.dtype)
                )
            buffer, there = self._gradient_buffer, False
        parameter.grad = buffer.narrow(0, 0, info.numel())
        if info.swapped_gradients and not there:
            self._swap_in_pinned_gradients(self.aio_handle, parameter, parameter.grad)
        if info.unswapped_gradients:
            self._retrieve_unswapped_grad_partitions(swap_info=info, dest_buffer=parameter.grad)

    def _take_back_gradient(self, parameter: Any) -> None:
        """Detach the gradient's buffer from ``parameter``; during an update the next sub-group uses it again."""
        parameter.grad = None
        if not self._order:
            self._free_gradient_buffer()

    def _free_gradient_buffer(self) -> None:
        buffer, self._gradient_buffer = self._gradient_buffer, None
        if buffer is not None:
            self.aio_handle.free_cpu_locked_tensor(buffer)

    def _adopt_moments(self, slot: SubGroupSlot) -> None:
        """Copy states that the optimizer created in its own memory into the slot, from which they are written.

        Raises RuntimeError if the optimizer has more states than AdamW.
        """
        tensors = slot.info.tensors
        if len(tensors) > len(slot.buffers):
            raise RuntimeError(
                f"memascend.tiers: this optimizer has {len(tensors)} tensors per parameter, AdamW {STATES}: use AdamW, "
                "or remove tiers"
            )
        numel = self._io_aligned_numel(slot.info.numel())
        for context, buffer in zip(tensors, slot.buffers, strict=False):
            if context.compute_tensor.data_ptr() != buffer.data_ptr():
                compute = buffer.narrow(0, 0, slot.info.numel())
                compute.copy_(context.compute_tensor)
                context.set_buffers(compute_buffer=compute, swap_buffer=buffer.narrow(0, 0, numel))

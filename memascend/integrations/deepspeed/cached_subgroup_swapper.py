"""The optimizer swapper of several paths: sub-groups wait in host memory, and each is read and written by itself.

DeepSpeed's swappers wait for all transfers of an I/O handle at once, read at most one sub-group ahead and write each
one out. With several paths that leaves all but one idle. Here host memory holds as many sub-groups as `buffer_count`
allows, each with its own transfers: as soon as one is written out, the next in the order of the update is read into its
place (MLP-Offload, Algorithm 1). Where the order turns with each step, the last ones of an update stay, neither written
nor read again (3.2, cache-friendly order).
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
    """A place for one sub-group in host memory: buffers for master weights and two moments, and for its gradient if
    that is swapped."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.gradient = buffers[:STATES], buffers[STATES] if len(buffers) > STATES else None
        self.info: Any = None
        self.dirty = False  # its states have changed since they were written
        self.gradient_read = False
        self.reading: Completion | None = None
        self.writing: Completion | None = None


class CachedSubGroupSwapper(PartitionedOptimizerSwapper):
    """See the module. Called by one thread; transfers end in the dispatcher's."""

    swaps_gradients = False
    keeps = True  # the last of an update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()  # of what follows
        self._slots: list[SubGroupSlot] = []
        self._free: list[SubGroupSlot] = []
        self._cached: dict[str, SubGroupSlot] = {}  # by parameter, also while it is read
        self._writing: deque[SubGroupSlot] = deque()
        self._order: list[Any] = []
        self._position = 0
        self._gradient_buffer: torch.Tensor | None = None  # the buffer of the gradient that is in use, beside the slots
        self._failure: BaseException | None = None

    # -- the order of an update ----------------------------------------------------------------------------------------

    def begin_update(self, parameters: Sequence[Any]) -> None:
        """The swapped sub-groups in the order in which they will be stepped; their reads begin."""
        self.flush_gradients()
        with self._lock:
            self._open_slots()
            self._order, self._position = list(parameters), 0
            for slot in self._cached.values():
                slot.gradient_read = False
        self._advance()

    def end_update(self) -> None:
        with self._lock:
            self._order = []
        self._free_gradient_buffer()
        self._raise_failure()

    def settle(self) -> None:
        """Write out what only host memory has, forget the rest and give the memory of all slots back. Idempotent."""
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
        """Until what an update left on its way out has been written; the next forward pass hides that otherwise."""
        with self._lock:
            writing = list(self._writing)
        for slot in writing:
            self._wait_written(slot)
        self._raise_failure()

    # -- DeepSpeed's calls ---------------------------------------------------------------------------------------------

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
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
        """For the moments of a sub-group that is swapped in and has none yet."""
        numel = self._io_aligned_numel(info.numel())
        return [buffer.narrow(0, 0, numel) for buffer in self._cached[info.param_id].buffers[1:]]

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
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
        """After a look at the states, which have not changed: what only host memory has stays there."""
        info = self._get_param_swap_info(parameter)
        self._take_back_gradient(parameter)
        slot = None if info is None else self._cached.get(info.param_id)
        if slot is not None and not slot.dirty:
            self._release(slot)

    def writeback_optimizer_state_and_gradients(
        self, parameter: Any, write_opt_state: bool, write_gradients: bool
    ) -> None:
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
        self.settle()
        super().purge_state()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _open_slots(self) -> None:
        """With the lock held: all of the buffers, but one by which swapped gradients go out in backward."""
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
        """Where the sub-group is, or is being read to."""
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
        """With the lock held: the sub-group that is needed last gives its slot."""
        last = max(self._cached.values(), key=lambda slot: self._index_of_id(slot.info.param_id))
        if last.reading is not None:
            last.reading.wait()
            last.reading = None
        if last.dirty:
            self._write(last)
        else:
            self._release(last)

    def _index(self, parameter: Any) -> int:
        return self._index_of_id(self.parameter_id(parameter))

    def _index_of_id(self, identity: Any) -> int:
        """Its place in the order; what is not in it comes last."""
        for index, each in enumerate(self._order):
            if self.parameter_id(each) == identity:
                return index
        return len(self._order)

    def _advance(self) -> None:
        """Read ahead as far as slots are free, in the order of the update."""
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
        """With the lock held, into a free slot."""
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
        """With the lock held, once an update, where gradients are swapped: it is read ahead with the states."""
        if not self.swaps_gradients or not self._order or slot.gradient_read:
            return
        slot.gradient_read = True
        gradient = slot.gradient.narrow(0, 0, slot.info.numel())
        paths = slot.info.get_swap_gradient_paths()
        pieces = zip(slot.info.get_swap_gradient_buffers(gradient), paths, strict=True)
        reads = [self.aio_handle.begin_read(buffer, path) for buffer, path in pieces]
        slot.reading = all_of(reads if slot.reading is None else [slot.reading, *reads])

    def _write(self, slot: SubGroupSlot) -> None:
        """With the lock held. Its memory is free, and that of the next one, when the writes have ended."""
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
        with self._lock:
            if slot.writing is not end:
                return
            self._writing.remove(slot)
            self._free.append(slot)
            self._failure = self._failure or end.error()
            slot.writing = None
        try:
            self._advance()
        except BaseException as error:  # in the dispatcher: raised where the training goes on
            self._failure = self._failure or error

    def _wait_written(self, slot: SubGroupSlot) -> None:
        writing = slot.writing
        if writing is not None:
            with contextlib.suppress(Exception):  # kept as the failure
                writing.wait()
            self._written(slot, writing)

    def _release(self, slot: SubGroupSlot) -> None:
        with self._lock:
            slot.info.release_memory()
            self._cached.pop(slot.info.param_id, None)
            if slot not in self._free:
                self._free.append(slot)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- gradients and moments -----------------------------------------------------------------------------------------

    def _bring_gradient(self, info: Any, parameter: Any, slot: SubGroupSlot) -> None:
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
        parameter.grad = None
        if not self._order:
            self._free_gradient_buffer()

    def _free_gradient_buffer(self) -> None:
        buffer, self._gradient_buffer = self._gradient_buffer, None
        if buffer is not None:
            self.aio_handle.free_cpu_locked_tensor(buffer)

    def _adopt_moments(self, slot: SubGroupSlot) -> None:
        """States that the optimizer made in memory of its own are copied to where they will be written from."""
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

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

from memascend.planner.derived_sizes import STATES, held_in
from memascend.storage.completion import Completion, all_of


class HeldSubGroup:
    """Room for one sub-group: buffers for master weights and two moments, and for its gradient if that is swapped."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.gradient = buffers[:STATES], buffers[STATES] if len(buffers) > STATES else None
        self.info: Any = None
        self.dirty = False  # its states have changed since they were written
        self.gradient_read = False
        self.reading: Completion | None = None
        self.writing: Completion | None = None


class HeldSwapper(PartitionedOptimizerSwapper):
    """See the module. Called by one thread; transfers end in the dispatcher's."""

    swaps_gradients = False
    keeps = True  # the last of an update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()  # of what follows
        self._rooms: list[HeldSubGroup] = []
        self._free: list[HeldSubGroup] = []
        self._held: dict[str, HeldSubGroup] = {}  # by parameter, also while it is read
        self._writing: deque[HeldSubGroup] = deque()
        self._order: list[Any] = []
        self._position = 0
        self._beside: torch.Tensor | None = None  # the buffer of the gradient that is in use, beside the rooms
        self._failure: BaseException | None = None

    # -- the order of an update ----------------------------------------------------------------------------------------

    def begin_update(self, parameters: Sequence[Any]) -> None:
        """The swapped sub-groups in the order in which they will be stepped; their reads begin."""
        self.flush_gradients()
        with self._lock:
            self._open_rooms()
            self._order, self._position = list(parameters), 0
            for room in self._held.values():
                room.gradient_read = False
        self._advance()

    def end_update(self) -> None:
        with self._lock:
            self._order = []
        self._give_back_beside()
        self._raise_failure()

    def settle(self) -> None:
        """Write out what only host memory has, forget the rest and give the room back to others. Idempotent."""
        with self._lock:
            self._order = []
            for room in list(self._held.values()):
                if room.reading is not None:
                    room.reading.wait()
                    room.reading = None
                if room.dirty:
                    self._write(room)
                else:
                    self._release(room)
        self.wait_written()
        with self._lock:
            for room in self._rooms:
                buffers = room.buffers if room.gradient is None else [*room.buffers, room.gradient]
                self.swap_buffer_manager.free(buffers)
            self._rooms, self._free = [], []

    def wait_written(self) -> None:
        """Until what an update left on its way out has been written; the next forward pass hides that otherwise."""
        with self._lock:
            writing = list(self._writing)
        for room in writing:
            self._wait_written(room)
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
                self._open_rooms()
        room = self._room_of(info, parameter)
        if room.reading is not None:
            reading, room.reading = room.reading, None
            try:
                reading.wait()
            except BaseException:
                self._release(room)
                raise
        for context, buffer in zip(info.tensors, room.buffers, strict=False):
            numel = self._io_aligned_numel(info.numel())
            context.set_buffers(
                compute_buffer=buffer.narrow(0, 0, info.numel()), swap_buffer=buffer.narrow(0, 0, numel)
            )
        if info.has_gradients():
            self._bring_gradient(info, parameter, room)
        with self._lock:
            self._position = self._index(parameter) + 1
        self._advance()

    def moment_buffers(self, info: Any) -> list[torch.Tensor]:
        """For the moments of a sub-group that is swapped in and has none yet."""
        numel = self._io_aligned_numel(info.numel())
        return [buffer.narrow(0, 0, numel) for buffer in self._held[info.param_id].buffers[1:]]

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        info = self._get_param_swap_info(parameter)
        if info is None:
            return
        self._take_back_gradient(parameter)
        info.release_unswapped_gradients()
        room = self._held[info.param_id]
        self._adopt_moments(room)
        room.dirty = True
        position = self._index(parameter)
        if self._order and self.keeps and position >= len(self._order) - len(self._rooms):
            return
        with self._lock:
            self._write(room)
        if not self._order:
            self._wait_written(room)
            self._raise_failure()

    def release_swap_buffers(self, parameter: Any) -> None:
        """After a look at the states, which have not changed: what only host memory has stays there."""
        info = self._get_param_swap_info(parameter)
        self._take_back_gradient(parameter)
        room = None if info is None else self._held.get(info.param_id)
        if room is not None and not room.dirty:
            self._release(room)

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

    # -- rooms ---------------------------------------------------------------------------------------------------------

    def _open_rooms(self) -> None:
        """With the lock held: all of the buffers, but one by which swapped gradients go out in backward."""
        if self._rooms:
            return
        each = STATES + self.swaps_gradients
        manager = self.swap_buffer_manager
        count = held_in(manager.count, self.swaps_gradients)
        if count < 1:
            raise ValueError(
                f"zero_optimization.offload_optimizer.buffer_count={manager.count} is too small: a sub-group over "
                f"several paths needs {each + self.swaps_gradients} buffers; raise it, or remove the key"
            )
        for _ in range(count):
            buffers = manager.allocate(num_elems=self.largest_numel, count=each, dtype=self.dtype)
            self._rooms.append(HeldSubGroup(buffers))
        self._free = list(self._rooms)

    def _room_of(self, info: Any, parameter: Any) -> HeldSubGroup:
        """Where the sub-group is, or is being read to."""
        while True:
            with self._lock:
                room = self._held.get(info.param_id)
                if room is None and self._free:
                    room = self._read(info)
                if room is not None:
                    return room
                oldest = self._writing[0] if self._writing else None
                if oldest is None:
                    self._evict()
                    continue
            self._wait_written(oldest)
            self._raise_failure()

    def _evict(self) -> None:
        """With the lock held: the sub-group that is needed last gives its room."""
        last = max(self._held.values(), key=lambda room: self._index_of_id(room.info.param_id))
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
        """Read ahead as far as there is room, in the order of the update."""
        with self._lock:
            for parameter in self._order[self._position :]:
                identity = self.parameter_id(parameter)
                if identity in self._held:
                    self._read_gradient(self._held[identity])
                    continue
                if not self._free:
                    return
                self._read(self.swap_params_info[identity])

    def _read(self, info: Any) -> HeldSubGroup:
        """With the lock held, into a free room."""
        room = self._free.pop()
        room.info, room.dirty = info, False
        self._held[info.param_id] = room
        numel = self._io_aligned_numel(info.numel())
        try:
            reads = [
                self.aio_handle.begin_read(buffer.narrow(0, 0, numel), path)
                for buffer, path in zip(room.buffers, info.get_swap_paths(), strict=False)
            ]
        except BaseException:
            self._release(room)
            raise
        room.reading, room.gradient_read = all_of(reads), False
        self._read_gradient(room)
        return room

    def _read_gradient(self, room: HeldSubGroup) -> None:
        """With the lock held, once an update, where gradients are swapped: it is read ahead with the states."""
        if not self.swaps_gradients or not self._order or room.gradient_read:
            return
        room.gradient_read = True
        gradient = room.gradient.narrow(0, 0, room.info.numel())
        paths = room.info.get_swap_gradient_paths()
        pieces = zip(room.info.get_swap_gradient_buffers(gradient), paths, strict=True)
        reads = [self.aio_handle.begin_read(buffer, path) for buffer, path in pieces]
        room.reading = all_of(reads if room.reading is None else [room.reading, *reads])

    def _write(self, room: HeldSubGroup) -> None:
        """With the lock held. Its memory is free, and that of the next one, when the writes have ended."""
        info = room.info
        paths = info.get_swap_paths()
        numel = self._io_aligned_numel(info.numel())
        writes = [
            self.aio_handle.begin_write(buffer.narrow(0, 0, numel), path)
            for buffer, path in zip(room.buffers, paths, strict=False)
        ]
        info.release_memory()
        del self._held[info.param_id]
        self._writing.append(room)
        room.dirty = False
        room.writing = all_of(writes)
        room.writing.add_done_callback(lambda end: self._written(room, end))

    def _written(self, room: HeldSubGroup, end: Completion) -> None:
        with self._lock:
            if room.writing is not end:
                return
            self._writing.remove(room)
            self._free.append(room)
            self._failure = self._failure or end.error()
            room.writing = None
        try:
            self._advance()
        except BaseException as error:  # in the dispatcher: raised where the training goes on
            self._failure = self._failure or error

    def _wait_written(self, room: HeldSubGroup) -> None:
        writing = room.writing
        if writing is not None:
            with contextlib.suppress(Exception):  # kept as the failure
                writing.wait()
            self._written(room, writing)

    def _release(self, room: HeldSubGroup) -> None:
        with self._lock:
            room.info.release_memory()
            self._held.pop(room.info.param_id, None)
            if room not in self._free:
                self._free.append(room)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- gradients and moments -----------------------------------------------------------------------------------------

    def _bring_gradient(self, info: Any, parameter: Any, room: HeldSubGroup) -> None:
        if room.gradient is not None:
            buffer, there = room.gradient, room.gradient_read
        else:
            if self._beside is None:
                self._beside = self.aio_handle.new_cpu_locked_tensor(
                    self.largest_numel, torch.empty(0, dtype=self.dtype)
                )
            buffer, there = self._beside, False
        parameter.grad = buffer.narrow(0, 0, info.numel())
        if info.swapped_gradients and not there:
            self._swap_in_pinned_gradients(self.aio_handle, parameter, parameter.grad)
        if info.unswapped_gradients:
            self._retrieve_unswapped_grad_partitions(swap_info=info, dest_buffer=parameter.grad)

    def _take_back_gradient(self, parameter: Any) -> None:
        parameter.grad = None
        if not self._order:
            self._give_back_beside()

    def _give_back_beside(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            self.aio_handle.free_cpu_locked_tensor(beside)

    def _adopt_moments(self, room: HeldSubGroup) -> None:
        """States that the optimizer made in memory of its own are copied to where they will be written from."""
        tensors = room.info.tensors
        if len(tensors) > len(room.buffers):
            raise RuntimeError(
                f"memascend.tiers: this optimizer has {len(tensors)} tensors per parameter, AdamW {STATES}: use AdamW, "
                "or remove tiers"
            )
        numel = self._io_aligned_numel(room.info.numel())
        for context, buffer in zip(tensors, room.buffers, strict=False):
            if context.compute_tensor.data_ptr() != buffer.data_ptr():
                compute = buffer.narrow(0, 0, room.info.numel())
                compute.copy_(context.compute_tensor)
                context.set_buffers(compute_buffer=compute, swap_buffer=buffer.narrow(0, 0, numel))

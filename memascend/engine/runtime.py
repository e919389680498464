"""The streaming engine: trains a plain PyTorch model whose weights, gradients and states are kept on a tier.

    engine = StreamingEngine.start(model, folder, groups)          # or .resume, after a kill
    loss = model(...).loss; loss.backward()                        # blocks are streamed; updates run during backward
    engine.finish_step()                                           # all is written and committed

Source: LoHan (arXiv 2403.06504), IV-C; `WeightStream` moves the weights. Training is synchronous: parameters equal
those of training in memory, to the bit where every sum is taken in the same order.

The engine is one object in layers, each of which calls only those below it:

    runtime          start, resume and close; contents; saves
    accumulation     micro-batches of one step, side by side
    passes           forward and backward passes
    gradient_access  the gradients that a loop can read
    steps            completing, redoing and rolling back steps
    engine_state     buffers, streams, updates, counts
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memascend.engine import open_stores, state_files
from memascend.engine.accumulation import Accumulation
from memascend.engine.contents import StatesOf
from memascend.engine.device import synchronize
from memascend.engine.engine_state import RELEASED
from memascend.engine.groups import Groups
from memascend.engine.in_place_update import Redo, store_space
from memascend.engine.kept_buffers import buffer_space_bytes, persistent_buffers
from memascend.engine.mmap_parameters import releasable_bytes
from memascend.engine.model_guards import (
    left_empty,
    require_not_streamed,
    require_own_memory,
    require_python_modules,
    require_values,
)
from memascend.engine.model_units import units_of, units_of_store, whole_in_memory
from memascend.engine.opening import create_state_store, matches_layout, open_state_store
from memascend.engine.options import EngineOptions
from memascend.engine.saving import BackgroundSave, Extracts, Targets
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.storage import leaving
from memascend.storage.interrupts import whole
from memascend.storage.tensor_file import can_be_written

log = logging.getLogger("memascend")


class StreamingEngine(Accumulation):
    """Trains one model in one process on one device (`EngineOptions.device`). Not thread-safe.

    From `start` or `resume` until `close` the engine owns the model's parameters: they are empty except while they are
    in use. `groups`: parameter groups as torch.optim's (`params`, `lr`, `betas`, `eps`, `weight_decay`), or a function
    that returns the current ones; they are read again at each update.
    """

    def __init__(self, *parts: Any) -> None:
        """Build the engine from the arguments of `EngineState`. Use `start` or `resume` instead."""
        self._save: BackgroundSave | None = None  # the newest
        self._ends: deque[Callable[[], object]] = deque()  # the steps of `close` that are not done yet
        self.versions_why = "as an earlier run began it"  # why the store has this number of versions
        super().__init__(*parts)
        for key, slices in self.units.matrices.items():
            log.info(
                "memascend: %s is processed in %d slices: sums over its rows are computed per slice", key, len(slices)
            )
        if kept := whole_in_memory(self.layout):
            log.info("memascend: %s", kept)
        for _, name, buffer in persistent_buffers(self.model):
            if not can_be_written(buffer.dtype):
                log.warning(
                    "memascend: %s is %s, for which the safetensors format has no code, so that session.save(...) will "
                    "be refused: convert it, or register the buffer with persistent=False",
                    name,
                    buffer.dtype,
                )

    # -- begin and end -------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        model: nn.Module,
        folder: str | os.PathLike[str],
        groups: Groups,
        options: EngineOptions | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        allocator: Allocator | None = None,
        faults: Any = None,
    ) -> StreamingEngine:
        """Move a model in memory to a new store in `folder`, unit by unit; its parameters are empty afterwards.

        `blocks`: the modules that are streamed one at a time (default: all layers). `faults`: a layer below the store
        that makes requests fail, for tests. Raises NotStreamable, StorageError (no space, with the bytes that are
        missing), and MemoryError for host buffers; the model is then unchanged.
        """
        options = options or EngineOptions()
        require_not_streamed(model)
        require_python_modules(model)
        require_values(model)
        require_own_memory(model)
        units = units_of(model, blocks, options)
        released = releasable_bytes(model.parameters(), folder)
        store, options, why = create_state_store(
            folder, units.layout, options, faults, buffers=buffer_space_bytes(model), released=released
        )
        try:
            engine = cls(model, units, store, groups, options, allocator or PageAlignedPinnedAllocator())
            engine.versions_why = why
            try:
                engine._move_in(released > 0)
            except BaseException:
                engine._hooks.remove()
                engine._stop_work()
                engine._let_go()
                raise
            return engine
        except BaseException:
            with contextlib.suppress(OSError):
                store.undo()
            raise

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        folder: str | os.PathLike[str],
        groups: Groups,
        options: EngineOptions | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        allocator: Allocator | None = None,
        faults: Any = None,
    ) -> tuple[StreamingEngine, dict[str, Any]]:
        """Continue after the last completed step of a store; return the engine and the facts kept with that step. An
        update that was cut off is completed first.

        `model` has the same architecture; its values are discarded. Raises NotThisModel if the store has the states of
        another model or layout, or no completed step; and InterruptedUpdate if its states are partial.
        """
        options = options or EngineOptions()
        require_not_streamed(model)
        require_python_modules(model)
        open_stores.require_not_open(folder)
        units = units_of_store(model, blocks, options, lambda layout: matches_layout(folder, layout))
        store, options, kept = open_state_store(folder, units.layout, options, faults)
        try:
            engine = cls(model, units, store, groups, options, allocator or PageAlignedPinnedAllocator())
        except BaseException:
            store.close()
            raise
        engine.steps = dict(zip(engine.layout.order, kept["steps"], strict=True))
        engine._kept_steps = dict(engine.steps)
        engine.weights.empty_all()
        facts = kept["facts"]
        try:
            if (record := kept.get("redo")) is not None:
                facts = engine._complete(Redo(record))
            engine._kept_buffers.restore()
        except BaseException:
            engine._hooks.remove()
            engine._stop_work()
            engine._let_go()
            store.close()
            raise
        engine._be_ready()
        return engine, facts

    @torch.no_grad()
    def _move_in(self, takes_space: bool) -> None:
        """Write weights, zero moments and masters to the tier; parameters become empty only when all is committed.
        `takes_space`: the store has allocated only what was written, so that the rest is allocated here."""
        layout = self.layout
        for unit in layout.units:
            slot = self._stream.put(unit.key)
            slot.zero_()
            for part, values in self.units.values(unit):
                slot[part.first : part.first + part.numel].copy_(values)
                self.units.moved(part)
            for piece in unit.pieces:
                assert self._states is not None  # pieces exist only in a model with trained parameters
                states = self._states.put(piece.key)
                states.zero_()
                if not layout.own_masters:
                    for run, places in layout.state_places(piece):
                        states[places["master"]].copy_(run.of(slot))
                self._states.write(piece.key)
                self._states.release(piece.key)
            self._stream.write(unit.key)
            self._stream.release(unit.key)
        self._flush()
        if takes_space:
            self.state_store.take_space()
        self._kept_buffers.begin()
        self._commit({})
        self._be_ready()
        self.weights.empty_all()

    def _be_ready(self) -> None:
        """Limit the space for second versions of the states, and measure rates, where the options ask for it."""
        if self.options.replaces_without_redo:
            space = store_space(self.layout, 1, self.options.gradients, self.options.state_slots, redo=False)
            self.state_store.replace_within(space.slack)
        if self.options.profiles and self._states is not None:
            self._profile.measure_rates(self._states, self.state_store, self.options.state_slots)

    @whole
    def close(self, *, destroy: bool = False) -> None:
        """Restore the model's own forward and release all resources; a step that is not finished is discarded.

        The store stays for `resume`, unless `destroy`. Parameters stay empty. Idempotent. In a forked child the
        parent's threads and files are left alone.
        """
        own = self._pid == os.getpid()  # False in a forked child: threads and files belong to the parent
        if not self._closed:
            self._ends = deque([self._hooks.remove])
            if own:
                self._ends += [
                    self._end_save,
                    self._leave_model_empty,
                    self._stop_work,
                    self._let_go,
                    self.state_store.close,
                ]
            self._closed = True
        if destroy and own:
            self._ends.append(lambda: state_files.remove(self.state_store.folder))
        try:
            self._end()
        except KeyboardInterrupt:
            self._end()  # do the rest, since a program that is interrupted at its end does not call `close` again
            raise

    def _end(self) -> None:
        """Run the steps of `close` that are left. If one is interrupted, the next call repeats it and goes on."""
        while self._ends:
            self._ends[0]()  # removed only when done: each can be repeated after an interrupt
            self._ends.popleft()

    def _end_save(self) -> None:
        """Wait for a save in progress; Ctrl-C cancels it. Its error is not raised here, only by the save itself."""
        try:
            if self._save is not None:
                self._save.join()
        except KeyboardInterrupt:
            if self._save is not None:
                self._save.stop()
            raise

    def _leave_model_empty(self) -> None:
        left_empty(self.model, self.weights.nothing, self.state_store.folder)

    def _stop_work(self) -> None:
        """Stop updates and end all transfers; failed transfers raise no error here."""
        leaving.begin_if_asked()
        synchronize(self.units.device)  # copies in flight use memory that is freed below
        if self._swapping is not None:
            with contextlib.suppress(OSError):
                self._swapping.close()
        self.visits.forget()
        self.updates.abandon()
        self.updates.close()
        for stream in (self._stream, self._states):
            if stream is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    stream.close()
        self._auxiliary.close()

    def _let_go(self) -> None:
        """Drop the references to buffers, since graphs of the model may keep this object alive."""
        for name in RELEASED:
            vars(self).pop(name, None)
        self._inputs.drop()

    # -- contents ------------------------------------------------------------------------------------------------------

    def read_weights(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of every parameter after the last completed step, see `TierContents`. Raises
        RuntimeError as `require_completed_step`."""
        return self._contents.read_weights(order)

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """Return a trained parameter's states after the last completed step, see `TierContents`. Raises RuntimeError as
        `require_completed_step`."""
        return self._contents.read_states(name)

    def write_states(self, states_of: StatesOf, steps: Mapping[str, int]) -> None:
        """Replace the states of the parameters in `steps` (counts of steps by name), see `TierContents`; `keep` commits
        them. With one version of the states there is no completed step from the first unit until then. Raises
        RuntimeError if a gradient has come since the last step, and ValueError for a parameter that is not trained."""
        self.require_no_gradients()
        if unknown := sorted(set(steps) - set(self.steps)):
            raise ValueError(f"{unknown[0]} is not a trained parameter of this model")
        one = self.options.versions == 1
        if one and not self._restored:
            self._restored = True
            self.state_store.forget_step()
        written = self.state_store.commit_parts if one else lambda: None
        try:
            self._contents.write_states(lambda name: states_of(name) if name in steps else None, written)
        except BaseException as error:
            self._give_up_after(error)
            raise
        self.steps.update(steps)
        self.generation += 1

    # -- saves ---------------------------------------------------------------------------------------------------------

    @whole
    def save(
        self,
        targets: Targets,
        end: Callable[[], Any],
        give_up: Callable[[BaseException], BaseException],
        *,
        what: str = "save",
    ) -> BackgroundSave:
        """Start copying the tensors that `targets` name, as after the last completed step, into their files. Training
        can continue at once: an update that would overwrite data not copied yet waits for the copy.

        `end` is called when all is copied; `give_up` is called with an error and returns the one to raise; both run in
        the save's thread. `close` waits for the save. One save runs at a time: this call waits for the previous one,
        and raises its error if it was not raised before. The save owns the files from here on. Raises RuntimeError as
        `require_completed_step`, and while a step is in progress.
        """
        self._require_no_function("save()")
        self.require_open()
        self.require_completed_step()
        self.wait_for_save()
        extracts = Extracts(self.layout, targets).by_key
        self._save = BackgroundSave(what, self.state_store, extracts, self.buffers.need_saved(), end, give_up)
        return self._save

    @whole
    def wait_for_save(self) -> None:
        """Wait for a save in progress. Raises the error of the last save, if it has one that was not raised before."""
        if self._save is not None and not (self._save.done() and self._save.was_looked_at):
            self._save.wait()

    def raise_unseen_failure_of_save(self) -> None:
        """Raise the error of the last save, if it has one that was not raised before."""
        if self._save is not None and self._save.done() and not self._save.was_looked_at:
            self._save.wait()

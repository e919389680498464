"""The streaming engine: a plain PyTorch model is trained while its weights, gradients and states live on a tier.

    engine = StreamingEngine.start(model, folder, groups)          # or .resume, after a kill
    loss = model(...).loss; loss.backward()                        # blocks come and go; updates run meanwhile
    engine.finish_step()                                           # all is written and committed

Source: LoHan (arXiv 2403.06504), IV-C; the runtime of weights is `WeightStream`'s. Synchronous: parameters are those of
training in memory, to the bit where every sum is taken in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memascend.engine import open_stores, state_store
from memascend.engine.adam_settings import AdamSettings
from memascend.engine.arguments import tensors_in
from memascend.engine.block_runtime import PassInProgress
from memascend.engine.blocks import ModelUnits, NotStreamable, UnitWeights, largest_list
from memascend.engine.buffer_table import StreamOptions
from memascend.engine.buffers import EngineBuffers
from memascend.engine.contents import StatesOf, TierContents
from memascend.engine.device import Copies, DeviceWeights, GradientCopies, device_of, synchronize
from memascend.engine.frozen import FrozenApart
from memascend.engine.gradient_views import StepGradients
from memascend.engine.groups import Groups, GroupsNow
from memascend.engine.hooks import HookedRuntime, ModelHooks
from memascend.engine.in_place_update import Redo, store_space
from memascend.engine.inputs import KeptInput, KeptInputs, is_dense
from memascend.engine.kept_buffers import KeptBuffers, room_bytes
from memascend.engine.layout import Kind, Layout, Part, Unit
from memascend.engine.limit import Limit
from memascend.engine.mmap_parameters import releasable_bytes
from memascend.engine.model_guards import (
    left_empty,
    require_not_streamed,
    require_own_memory,
    require_python_modules,
    require_values,
)
from memascend.engine.opening import create_state_store, matches_layout, open_state_store
from memascend.engine.operators import Taken, take_off_left_over
from memascend.engine.options import EngineOptions
from memascend.engine.profile import StepProfile
from memascend.engine.recompute import OldGraph
from memascend.engine.saving import BackgroundSave, Extracts, Targets
from memascend.engine.scratch_storage import WAIT_S, AuxiliaryTiers
from memascend.engine.speculation import Beginning, Speculation
from memascend.engine.state_store import StateStore
from memascend.engine.swap import Decision, Swapping, link_rate
from memascend.engine.traffic import matrix_uses
from memascend.engine.updates import Updates
from memascend.engine.vertical import ORDERS, ForwardFootprint, Lanes, Route, SummedGradients, cannot_be_carried_over
from memascend.engine.weights import WeightStream
from memascend.memory.heap import HeapTrimmer
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.storage import leaving
from memascend.storage.completion import RequestCancelled
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.interrupts import patient, whole
from memascend.swapping import Rates as SwapRates

log = logging.getLogger("memascend")
_LET_GO = ("buffers", "updates", "weights", "_contents", "_stream", "_states", "_auxiliary", "_hooks")  # by `close`
_CUT_OFF = "a step's update was cut off: close the engine, and resume, which completes it"


class StreamingEngine(HookedRuntime):
    """One process, one device (`EngineOptions.device`). Not thread-safe.

    The model's parameters are its from `start` or `resume` on to `close`: empty but for the moments in which they are
    needed. `groups`: as torch.optim's (`params`, `lr`, `betas`, `eps`, `weight_decay`), or what returns those that hold
    now; read anew at each update.
    """

    def __init__(
        self,
        model: nn.Module,
        units: ModelUnits,
        store: StateStore,
        groups: Groups,
        options: EngineOptions,
        allocator: Allocator,
    ) -> None:
        self.model, self.options, self.state_store = model, options, store
        self.units, self.layout = units, units.layout
        self._groups = GroupsNow(groups, units.names)
        if missing := [name for name in self.layout.order if name not in self._groups]:
            raise ValueError(
                f"{missing[0]} requires a gradient but is in no param group of the optimizer ({len(missing)} such "
                "parameters): add it, or freeze it (requires_grad_(False))"
            )
        self.buffers = EngineBuffers(
            self.layout,
            allocator,
            blocks_in_flight=options.blocks_in_flight,
            state_slots=options.state_slots,
            gradients=options.gradients,
        )
        device, on_device, gradients, inputs = units.device, None, None, None
        if device.type != "cpu":  # each kind of copies on a stream of its own
            on_device, inputs = DeviceWeights(self.layout, Copies(device)), Copies(device)
            gradients = GradientCopies(self.buffers.need_arrivals(), Copies(device))
        parts = FrozenApart(store, self.layout)
        waits = StreamOptions(wait_s=WAIT_S, before_write=store.make_way)
        self._stream = WeightStream(parts, pool=self.buffers.weights, options=waits)
        self._states: WeightStream | None = None
        if self.buffers.states is not None:
            pool = self.buffers.states
            self._states = WeightStream(store, pool=pool, options=waits)
        for unit in self.layout.units:
            self._stream.register(unit.key, self.layout.unit_numel(unit))
            for piece in unit.pieces:
                self._states.register(piece.key, self.layout.states_numel(piece))
        for tensor in self.buffers.streamed:
            store.register(tensor)
        self._auxiliary = AuxiliaryTiers(store, self.layout, self.buffers, redoes=options.redoes)
        self.weights = UnitWeights(units, self._stream, on_device)
        self.weights.require_usable = self._require_usable
        self._contents = TierContents(
            self.layout, self.weights, self._states, store.folder, self.require_completed_step
        )
        self.updates = Updates(
            self.layout,
            self.weights,
            self._states,
            self.gradient_stream,
            self._settings,
            arm=options.arm,
            zero_missing=options.zero_missing,
            copies=gradients,
        )
        # Steps of each trained parameter by its name, as torch.optim counts them: none where it got no gradient.
        self.steps = dict.fromkeys(self.layout.order, 0)
        self._kept_steps = dict(self.steps)  # with the last completed step
        # What the loss is multiplied by before backward, to be set before that: updates and norms divide by it.
        self.scale = 1.0
        self._inputs = KeptInputs(self.buffers, self._auxiliary.scratch, WAIT_S, inputs)
        self.at_work = PassInProgress()
        self._forwards = 0  # forward passes with a graph
        self._visits: list[str] | None = None  # units of blocks in the order of this pass; None: it has not begun
        self._pattern: list[str] = []
        self._clip, self._speculates = options.clip, False  # of this step
        self.speculation = Speculation(self.layout, options, matrix_uses(units))
        self.gradients = StepGradients()
        self._numbers_of_slices = {
            unit.key: number for slices in units.matrices.values() for number, unit in enumerate(slices)
        }
        self._frozen = {p: name for p, name in units.names.items() if name not in self.steps and p.numel()}
        self._passes = 0  # backward passes of this step that have ended
        self._together: _Together | None = None  # micro-batches that are in progress side by side
        self._in_turn = False  # the micro-batches of one call, one after the other
        self._looking: _Looking | None = None  # at micro-batches one after the other
        self._known: dict[Any, Route | str] = {}  # by function and modes: how to go side by side, or why not
        self.accumulated: tuple[str, str] | None = None  # the order of the last call of `accumulate`, and why
        self._profile = StepProfile(
            self.layout, options.profiles, lambda: self.transferred, self._computed_again, units.device
        )
        self._swapping: Swapping | None = None
        if options.swap is not None:
            self._swapping = Swapping(
                model, units.blocks, options.swap, self._auxiliary.swap_tier, options.swap_room, allocator, device
            )
        self._unfinished: str | None = None  # what is to be done about an update that is half on the tier
        self._refusal: type[state_store.InterruptedUpdate] = state_store.InterruptedUpdate
        self._half_taken_back = False  # a step that failed, on a tier that failed again
        self._completes = False  # an interrupt alone has cut an update off, which is completed at the next use
        self._in_forward = False  # of the model as a whole
        self._save: BackgroundSave | None = None  # the newest
        self._ends: deque[Callable[[], object]] = deque()  # what `close` has left to do
        self._restored = False
        self.versions_why = "as an earlier run began it"  # so many of the states
        self._closed, self._pid = False, os.getpid()
        self._heap = HeapTrimmer()
        self._kept_buffers = KeptBuffers(model, store)
        self._hooks = ModelHooks(self, model, units, self.weights, self._contents, self._profile)
        for key, slices in units.matrices.items():
            log.info(
                "memascend: %s is processed in %d slices: sums over its rows are computed per slice", key, len(slices)
            )
        if kept := _kept_whole(self.layout):
            log.info("memascend: %s", kept)

    # -- begin and end -------------------------------------------------------------------------------------------------

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written since the engine was made: states, waiting gradients, activation checkpoints."""
        read, written = (a + b for a, b in zip(self.state_store.transferred, self._auxiliary.transferred, strict=True))
        if self._swapping is not None and self._swapping.cache is not None:
            moved = self._swapping.cache.tier.transferred
            read, written = read + moved.bytes_read, written + moved.bytes_written
        return read, written

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """Of the optimizer, as they are now."""
        return self._groups.now()

    @property
    def limit(self) -> Limit | None:
        """How fast the last step could have been, where that is measured."""
        return self._profile.limit

    @property
    def decision(self) -> Decision | None:
        """What is swapped of activations; None: it has not been asked for, or the first step is not done."""
        return self._swapping.decision if self._swapping is not None else None

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
        owner: str = "",
        facts: dict[str, Any] | None = None,
        config: DirectEngineConfig | None = None,
        faults: Any = None,
    ) -> StreamingEngine:
        """Move a model in memory to a new store in `folder`, unit by unit; its parameters are empty afterwards.

        `facts` are kept with step 0. Raises NotStreamable, StorageError (no room, with the bytes that are missing),
        MemoryError for host buffers; the model is then as it was.
        """
        options = options or EngineOptions()
        require_not_streamed(model)
        require_python_modules(model)
        require_values(model)
        require_own_memory(model)
        units = _units(model, blocks, options)
        released = releasable_bytes(model.parameters(), folder)
        store, options, why = create_state_store(
            folder, owner, units.layout, options, config, faults, buffers=room_bytes(model), released=released
        )
        try:
            engine = cls(model, units, store, groups, options, allocator or PageAlignedPinnedAllocator())
            engine.versions_why = why
            try:
                engine._move_in(facts or {}, released > 0)
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
        owner: str = "",
        config: DirectEngineConfig | None = None,
        faults: Any = None,
    ) -> tuple[StreamingEngine, dict[str, Any]]:
        """Go on after the last completed step of a store; also the facts that were kept with it.

        `model` is of the same architecture; its values are dropped. Raises NotThisModel where the store holds another
        model or layout, or no completed step; InterruptedUpdate.
        """
        options = options or EngineOptions()
        require_not_streamed(model)
        require_python_modules(model)
        open_stores.require_not_open(folder)
        units = _kept_units(model, blocks, options, lambda layout: matches_layout(folder, owner, layout))
        store, options, kept = open_state_store(folder, owner, units.layout, options, config, faults)
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
    def _move_in(self, facts: dict[str, Any], takes_space: bool) -> None:
        """Weights, zero moments and masters to the tier; parameters go empty only when all of it is committed.
        `takes_space`: the store has taken that of what is written alone."""
        layout = self.layout
        for unit in layout.units:
            slot = self._stream.put(unit.key)
            slot.zero_()
            for part, values in self.units.values(unit):
                slot[part.first : part.first + part.numel].copy_(values)
                self.units.moved(part)
            for piece in unit.pieces:
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
        self._commit(facts)
        self._be_ready()
        self.weights.empty_all()

    def _be_ready(self) -> None:
        if self.options.replaces_without_redo:
            space = store_space(self.layout, 1, self.options.gradients, self.options.state_slots, redo=False)
            self.state_store.replace_within(space.slack)
        if self.options.profiles and self._states is not None:
            self._profile.measure_rates(self._states, self.state_store, self.options.state_slots)

    def _flush(self) -> None:
        self._stream.flush()
        if self._states is not None:
            self._states.flush()

    def _commit(self, facts: dict[str, Any], redo: Redo | None = None) -> None:
        self.state_store.commit(self._record(facts, redo.record if redo is not None else None))
        self._kept_steps = dict(self.steps)

    def _record(self, facts: dict[str, Any], redo: dict[str, Any] | None = None, *, ahead: int = 0) -> dict[str, Any]:
        """What a commit keeps beside the states, `ahead` steps from now."""
        steps = [step + ahead for step in self.steps.values()]
        whole = {"steps": steps, "versions": self.options.versions, "facts": facts}
        if self.options.replaces_without_redo:
            whole["redoes"] = False
        return whole if redo is None else {**whole, "redo": redo}

    @whole
    def close(self, *, destroy: bool = False) -> None:
        """Give the model its own forward back and let go of everything; a step that is not finished is forgotten.

        The store stays for `resume`, unless `destroy`. Parameters stay empty. Idempotent. In a forked child nothing of
        the parent's ends.
        """
        own = self._pid == os.getpid()  # else a forked child's copy: the threads and the files are the parent's
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
            self._ends.append(lambda: state_store.remove(self.state_store.folder))
        try:
            self._end()
        except KeyboardInterrupt:
            self._end()  # the rest of it: who interrupts a program's end does not call `close` again
            raise

    def _end(self) -> None:
        while self._ends:
            self._ends[0]()  # each can be begun again
            self._ends.popleft()

    def _end_save(self) -> None:
        """The end of one in progress is awaited; Ctrl-C leaves it undone. Its error is for whoever asks the save."""
        try:
            if self._save is not None:
                self._save.join()
        except KeyboardInterrupt:
            self._save.stop()
            raise

    def _leave_model_empty(self) -> None:
        left_empty(self.model, self.weights.nothing, self.state_store.folder)

    def _stop_work(self) -> None:
        leaving.begin_if_asked()
        synchronize(self.units.device)  # copies that are in flight use memory that goes now
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
        """The buffers go with whoever holds them; the model's graphs may hold this object."""
        for name in _LET_GO:
            vars(self).pop(name, None)
        self._inputs.drop()

    def require_open(self) -> None:
        """RuntimeError after `close`."""
        if self._closed:
            folder = self.state_store.folder
            raise RuntimeError(
                f"this session ({folder}) is closed: open it again (streaming({str(folder)!r}, resume=True)) to "
                "continue"
            )

    def __getattr__(self, name: str) -> Any:
        if name in _LET_GO:
            self.require_open()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @whole
    def model_begins(self, *_: Any) -> None:
        """A forward pass: with `implicit_step` (LoHan, Fig. 4b) it is also the end of the step before."""
        alone = self._together is None and torch._C._current_graph_task_id() == -1
        if alone and self._in_forward and not _is_nested(self.model):
            self._hooks.end_cut_off()
        self._require_usable()
        self._in_forward = True
        if not torch.is_grad_enabled():
            for under_way in (self._looking, self._together):
                if under_way is not None:
                    under_way.footprint.evaluated = True
            self._stream.read_ahead(self._pattern[: len(self._pattern) // 2])
            return
        if self._together is not None:
            return
        if self.options.implicit_step and self._passes >= self.options.accumulate:
            self.finish_step()
        self._begin_pass()

    def _begin_pass(self) -> None:
        if (unfrozen := next((name for p, name in self._frozen.items() if p.requires_grad), None)) is not None:
            raise NotStreamable(
                f"{unfrozen} was frozen when the optimizer was created, and is trainable now: announce that when it is "
                "created (unfreezes=True), in a new folder with the model's state_dict()"
            )
        self._visits = []
        self._forwards += 1
        self.at_work.begun = self._forwards
        if self._looking is not None:
            self._looking.routes.append([])
        self._profile.begin_forward()
        self._stream.read_ahead(self._pattern)

    def _require_usable(self) -> None:
        """For a forward pass: weights are those of the last completed step. What a backward pass takes is its own."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotStreamable(
                "torch.func (grad, vjp, jvp, vmap and the like) needs copies of all weights, but a streamed model only "
                "has one block's at a time: use loss.backward()"
            )
        if torch._C._current_graph_task_id() != -1:
            self.weights.require_own_process()
            return
        self._require_whole(gives_up=True)
        self.updates.raise_failure()
        ends_here = self.options.implicit_step and torch.is_grad_enabled() and self._passes >= self.options.accumulate
        if self.updates.touched and not ends_here:
            if self.options.implicit_step:
                raise RuntimeError(
                    "this forward pass has no graph, or precedes the last backward pass of the step, and would see "
                    "half-updated weights: call optimizer.step() first (implicit_step=True completes a step with the "
                    "next forward pass that has a graph)"
                )
            raise RuntimeError(
                "a forward pass between backward() and step() would see half-updated weights: call optimizer.step() "
                "first; if the step has more backward passes, set their number (accumulate=); in a loop without "
                "optimizer.step(), set EngineOptions(implicit_step=True)"
            )

    @whole
    def require_completed_step(self) -> None:
        """Weights and states are those of the last completed step. RuntimeError where updates of the next one have
        begun; a step that ended in an error is given up. Raises the error of an update that has failed unseen."""
        self._require_whole(gives_up=torch._C._current_graph_task_id() == -1)
        self.updates.raise_failure()
        if self.updates.touched:
            raise RuntimeError(
                "between backward() and step() weights and states are half updated: call optimizer.step() first, or "
                "optimizer.zero_grad(), which discards the step"
            )

    @whole
    def require_no_gradients(self) -> None:
        """No gradient has come since the last completed step: states can be replaced. RuntimeError."""
        self.require_completed_step()
        if self.updates.pending:
            raise RuntimeError(
                "between backward() and step() states cannot be replaced: call optimizer.step() first, or "
                "optimizer.zero_grad(), which discards the step"
            )

    @whole
    def model_ends(self, _: nn.Module, __: Any, results: Any) -> None:
        self._in_forward = False
        if not torch.is_grad_enabled():
            self._stream.release_idle()
            return
        # A backward pass begins here, and not inside of one that a checkpoint around several blocks runs.
        engine, generation = weakref.ref(self), self.generation
        for result in tensors_in(results):
            if result.requires_grad:
                result.register_hook(lambda _: engine().backward_begins(generation))
        together = self._together
        if together is not None:
            together.forwards_ended += 1
        if together is None or together.forwards_ended == together.count:
            self._profile.end_forward(passes=1 if together is None else together.count)
        first = together is None or together.forwards_ended == 1
        if first and not self._waits and self._passes + self._side_by_side == self.options.accumulate:
            self.updates.expect()

    @property
    def _waits(self) -> bool:
        """Whether this step's gradients wait on the tier until all have come."""
        return self.options.waits and not self._speculates

    @property
    def _side_by_side(self) -> int:
        """Backward passes that are in progress together."""
        return 1 if self._together is None else self._together.count

    @property
    def _is_last(self) -> bool:
        """Whether the step has no backward pass after those in progress."""
        return self._passes + self._side_by_side >= self.options.accumulate

    def comes_again(self, unit: Unit) -> bool:
        if self.visits.is_nested_in(unit):
            return True  # a checkpoint inside of the block: the rest of the gradient follows
        return self.at_work.uses.get(unit.key, 0) > 1  # the same layer

    @whole
    def arrive(self, part: Part, gradient: torch.Tensor) -> None:
        """A gradient of this pass, whole."""
        if gradient.layout != torch.strided:
            raise NotStreamable(f"the gradient of {part.name} is sparse: use a dense one (sparse=False)")
        self.at_work.got_gradients = True
        if self._together is not None:
            total = self._together.sums.add(part, gradient, self.at_work.number)
            if total is None:
                return
            gradient = total
        self._use(part, gradient)

    def _use(self, part: Part, gradient: torch.Tensor) -> None:
        self.updates.arrive(part, gradient, wait=self._waits or not self._is_last, last=self._is_last)

    @whole
    def backward_begins(self, generation: int | None = None) -> None:
        """In the user's backward pass, not in a block's own: `_backward_ends` follows, if no error does.
        `generation`: of the weights that its graph was made with."""
        if generation not in (None, self.generation):
            raise OldGraph("the model")
        if not self.at_work.backward_begun:
            if self._together is None and self._passes >= self.options.accumulate:
                raise RuntimeError(
                    f"backward pass {self._passes + 1} of a step that was set to have {self.options.accumulate}: call "
                    "optimizer.step() before it, or set their number per step (accumulate=)"
                )
            if self.at_work.ended:
                raise RuntimeError(
                    "second backward pass in one micro-batch: add up its losses and call backward() once, or run "
                    "micro-batches one after the other (order='horizontal')"
                )
            self.at_work.backward_begun, self.at_work.got_gradients = True, False
            if self._together is None or self._together.backward_begins():
                self.gradients.begin_pass(first=self._passes == 0)
                self.updates.zeroed = self.gradients.zeroed
                self.updates.scale = self.scale
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    @whole
    def _backward_ends(self) -> None:
        self.visits.end()
        self._hooks.left_over(self)
        self.at_work.backward_begun = False
        if self._together is not None:
            self.at_work.ended = self.at_work.got_gradients
            return
        self._profile.end_backward()
        if not self.at_work.got_gradients:  # torch.autograd.grad of inputs or activations is no pass of the step
            self._visits = None
            return
        self._passes_end()

    def _passes_end(self) -> None:
        """Of a backward pass, or of all that were in progress together."""
        self.updates.end_pass(wait=self._waits or not self._is_last, last=self._is_last)
        self.gradients.whole = frozenset(self.updates.arrived)
        self._passes += self._side_by_side
        self._pattern, self._visits = self._visits or [], None
        if self._passes >= self.options.accumulate:  # until then another pass's graph may need them
            self._hooks.give_back_kept()

    def passed(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        self._profile.took(unit, forward_s, backward_s)

    def now(self) -> float:
        return self._profile.now()

    def _computed_again(self, unit: Unit) -> float:
        """The share of a block's products that backward computes a second time."""
        return self._swapping.computed_again(unit.key) if self._swapping is not None else 1.0

    @whole
    def entered(self, unit: Unit) -> None:
        uses = self.at_work.uses
        uses[unit.key] = uses.get(unit.key, 0) + 1
        if torch._C._current_graph_task_id() != -1:  # in a checkpoint's part of the user's backward pass
            if self._together is not None:
                raise NotStreamable(
                    f"{unit.key} is recomputed by a checkpoint around it: run micro-batches one after the other "
                    "(order='horizontal'), or remove the checkpoint"
                )
            if self._looking is not None:
                self._looking.why = "blocks are computed again by checkpoints around them"
            self.backward_begins()
        if self._visits is None:  # a part of the model is called alone
            self._begin_pass()
        if self._together is None:
            self._visits.append(unit.key)

    @whole
    def recomputes(self, unit: Unit) -> None:
        self.backward_begins()
        if self._visits is not None and self._together is None:
            self._visits.append(unit.key)

    @whole
    def visited(self, unit: Unit) -> None:
        if self.comes_again(unit):
            return
        self._hooks.left_over_of(self, unit)
        if self._together is not None:
            if not self._together.all_visited(unit, self.at_work.number):
                return
            for part, gradient in self._together.sums.take(unit):
                self._use(part, gradient)
        self.updates.end_unit(unit, wait=self._waits or not self._is_last, last=self._is_last)

    def require_not_updated(self, unit: Unit) -> None:
        if self.updates.has_begun(unit):
            raise NotStreamable(
                f"{unit.key} would have to be recomputed within one backward pass, after the update of its weights has "
                "begun: delay updates (wait=True when the optimizer is created)"
            )

    def computed_outside(self, seconds: float) -> None:
        if not self.at_work.backward_begun:
            self._profile.outside_s += seconds

    @whole
    def left(self, unit: Unit, by: PassInProgress) -> None:
        by.uses[unit.key] = max(0, by.uses.get(unit.key, 0) - 1)

    # -- several micro-batches (`memascend.engine.vertical`) -----------------------------------------------------------

    def accumulate(
        self,
        function: Callable[[Any], Any],
        micro_batches: Iterable[Any],
        *,
        order: str = "vertical",
        repeatable: bool = False,
    ) -> list[Any]:
        """`[function(each) for each in micro_batches]`, whose backward passes are all of this step.

        `vertical`: where it can be, all of them pass a unit of weights before any goes on to the next; the first call
        with a function, and those that cannot be, go one after the other. Gradients are equal to the bit. After an
        error the current step is given up, and nothing runs any more. Raises what `function` raises, ValueError for
        another order, RuntimeError for more passes than were announced, before any has begun.

        `repeatable`: the function changes nothing but the model and draws no numbers but from torch's, NumPy's and
        Python's own generators, and nobody looks at gradients before `finish_step`. So where all of a step's passes are
        in this call, their gradients may be used before their norm is known, and all of them be done again where they
        are to be clipped (`memascend.engine.speculation`); what they return is then the second pass's.
        """
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        if self._together is not None or self._in_turn:
            raise RuntimeError(
                "accumulate was called inside the function of a micro-batch: call it once, with all of them"
            )
        batches = list(micro_batches)
        self._require_usable()
        if self.options.implicit_step and self._passes >= self.options.accumulate:
            self.finish_step()
        if self._passes + len(batches) > self.options.accumulate:
            raise RuntimeError(
                f"{len(batches)} micro-batches after {self._passes} backward passes of a step that was set to have "
                f"{self.options.accumulate}: call optimizer.step() before them, or set their number per step "
                "(accumulate=)"
            )
        begins = self._speculated(batches, order) if repeatable else None
        results = self._in_order(function, batches, order)
        if begins is not None and self._is_to_be_clipped():
            begins.restore()
            results = self._in_order(function, batches, order)
        return results

    def _speculated(self, batches: Sequence[Any], order: str) -> Beginning | None:
        """Decide whether the gradients of this step wait for their norm; if not, what it can be done again from."""
        if self._passes or len(batches) != self.options.accumulate:
            return None
        side_by_side = order == "vertical" and self._not_vertical() is None
        if not self.speculation.pays(1 if side_by_side else len(batches)):
            return None
        begins = Beginning(self.model, self.units.device)
        if not begins.can_be_restored:
            return None
        self._speculates = True
        self.speculation.speculated += 1
        return begins

    @whole
    def _is_to_be_clipped(self) -> bool:
        """After all passes of a step whose gradients did not wait: whether their norm is too large. Nothing of the step
        stays then."""
        if not self.updates.pending:
            return False
        try:
            self.updates.finish_direct()
            norm = self.updates.sums.norm(self.layout.order)
            if not bool(torch.isfinite(norm)) or self._clipping(norm) == 1.0:
                return False
            self._take_back(written=True)
            self._hooks.give_back_kept()
        except BaseException as error:
            self._give_up_after(error)
            raise
        self.speculation.done_again += 1
        return True

    def _clipping(self, norm: torch.Tensor) -> float:
        """What gradients are divided by beside the loss scale."""
        return max(1.0, (float(norm) / self.scale + 1e-6) / self._clip) if self._clip > 0 else 1.0

    def _in_order(self, function: Callable[[Any], Any], batches: Sequence[Any], order: str) -> list[Any]:
        if order == "horizontal" or len(batches) < 2:
            self.accumulated = "horizontal", "as asked for" if len(batches) > 1 else "one micro-batch"
            return self._one_after_another(function, batches)
        kind = _kind_of_call(function, self.model)
        known = self._known.get(kind)
        why = self._not_vertical() or (known if isinstance(known, str) else None)
        if why is not None:
            if self.accumulated != ("horizontal", why):
                log.info("memascend: micro-batches run one after the other: %s", why)
            self.accumulated = "horizontal", why
            return self._one_after_another(function, batches)
        if known is None:
            return self._looked_at(function, batches, kind)
        self.accumulated = "vertical", "the micro-batches of the first step were independent"
        return self._vertically(function, batches, known)

    def _require_no_function(self, call: str) -> None:
        if self._together is not None or self._in_turn:
            raise RuntimeError(
                f"{call} was called inside the function of a micro-batch, whose gradients belong to the same step as "
                "the others': call it before or after session.accumulate(...)"
            )

    def _not_vertical(self) -> str | None:
        if self.units.device.type != "cpu":
            return f"micro-batches go side by side on the CPU alone, and {self.units.device} computes"
        if self._swapping is not None:
            return "activations are swapped"
        if self._passes:  # sums begin with what waits
            return "gradients of earlier passes of the step wait on the SSD: hand all micro-batches over in one call"
        return cannot_be_carried_over()

    def _one_after_another(self, function: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        self._in_turn = True
        try:
            return [function(each) for each in batches]
        except BaseException as error:
            self._give_up_after(error)
            raise
        finally:
            self._in_turn = False

    def _looked_at(self, function: Callable[[Any], Any], batches: Sequence[Any], kind: Any) -> list[Any]:
        """One after the other; from then on it is known whether and how they can go side by side."""
        looking = self._looking = _Looking(ForwardFootprint(self.model, self.units.device))
        try:
            results = self._one_after_another(function, batches)
        finally:
            self._looking = None
        routes, why = looking.routes, looking.why or looking.footprint.found()
        if why is None and (len(routes) != len(batches) or any(route != routes[0] for route in routes)):
            why = "they go through the blocks in different orders, or not once each"
        self.accumulated = "horizontal", why or "the first step, in which they are looked at"
        if why is not None:
            log.info("memascend: micro-batches run one after the other: %s", why)
        self._known[kind] = Route(routes[0]) if why is None else why
        return results

    def _vertically(self, function: Callable[[Any], Any], batches: Sequence[Any], route: Route) -> list[Any]:
        alone, passes = self.at_work, [PassInProgress(number) for number in range(len(batches))]

        def enter(number: int) -> None:
            self.at_work = passes[number]

        self._begin_pass()
        for each in passes:
            self._forwards += 1
            each.begun = self._forwards
        footprint = ForwardFootprint(self.model, self.units.device)
        runs = [functools.partial(function, each) for each in batches]
        lanes = Lanes(runs, route, enter=enter, leave=self._leave_unit)
        self._together = _Together(lanes, footprint, len(batches), self.options.gradients)
        try:
            results = lanes.run()
            self.at_work = alone
            self._leave_unit()
            self._profile.end_backward(passes=len(batches))
            if any(each.got_gradients for each in passes):
                for part, gradient in self._together.sums.take():
                    self._use(part, gradient)
                self._passes_end()
            self._together = None
        except BaseException as error:
            self.at_work, self._together = alone, None
            self._give_up_after(error)
            raise
        return results

    def reaches(self, unit: Unit, *, needs_it: bool = True) -> None:
        if self.in_block:
            return
        key, number = unit.matrix or unit.key, self._numbers_of_slices.get(unit.key, 0)
        together = self._together
        if together is None:
            if self._looking is not None:
                if self._visits is None:  # a part of the model is called alone
                    self._begin_pass()
                self._looking.at(key, number, forward=torch._C._current_graph_task_id() == -1)
            return
        if unit.kind is Kind.BLOCK:
            together.enters_a_block(self.at_work.number)
        together.lanes.reaches(key, number)
        if needs_it and together.held is not unit:
            self._leave_unit()
            self.weights.take(unit)
            together.held = unit
            if unit.kind is Kind.BLOCK:
                self._visits.append(unit.key)
                if torch._C._current_graph_task_id() == -1:
                    self._inputs.begin_group()

    def _leave_unit(self) -> None:
        """The weights that micro-batches side by side have used are needed no more."""
        together = self._together
        if together is not None and together.held is not None:
            held, together.held = together.held, None
            self.weights.give_back(held)

    @whole
    def keep_input(self, tensor: torch.Tensor) -> Any:
        goes = self.options.checkpoints == "tier" and tensor.numel() and is_dense(tensor)
        kept = self._inputs.keep(tensor) if goes else None
        return tensor if kept is None else kept

    @whole
    def bring_back(self, kept: Any) -> torch.Tensor:
        return kept.tensor() if isinstance(kept, KeptInput) else kept

    def taking(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Taken]:
        if self._swapping is None:
            return super().taking(unit, inputs)
        return self._swapping.forward(unit.key, inputs)

    def replaying(self, unit: Unit, taken: Taken) -> contextlib.AbstractContextManager[Any]:
        if self._swapping is None:
            return super().replaying(unit, taken)
        return self._swapping.backward(unit.key, taken)

    def left_by(self, stop: type[BaseException]) -> contextlib.AbstractContextManager[Any]:
        return self._hooks.left_by(stop)

    def _decide_on_swapping(self) -> None:
        """Once, when the first step's profile is complete."""
        swapping, rates, blocks_s = self._swapping, self._profile.rates, self._profile.blocks_s()
        if swapping is None or swapping.decision is not None or rates is None or not swapping.flops:
            return
        layout = self.layout
        weights = sum(layout.unit_numel(unit) for unit in layout.units) * layout.weights.itemsize
        states = sum(map(layout.states_numel, layout.pieces)) * layout.stored_states.itemsize
        measured = SwapRates(
            gpu=swapping.flops / blocks_s,
            link=link_rate(self.units.device),
            read=rates.read,
            write=rates.write,
            room=self.options.swap_room,
        )
        decision = swapping.decide(
            measured,
            self._profile.outside_s / blocks_s,
            weights=weights,
            gradients=weights,
            update_read=weights + states,
            update_written=weights + states,
        )
        log.info("memascend: %s", decision)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @whole
    def finish_step(self, *, keep: bool = True, facts: dict[str, Any] | None = None) -> float | None:
        """Until everything of this step is updated and written; the norm of all gradients, loss scale out.

        None: a gradient was infinite or NaN, and nothing was changed since the last `keep`. With `keep` the step is
        completed; else the caller does that before the next one. `facts`: JSON that the step is kept with where a kill
        cuts it off and `resume` completes it (`keep` gets the same); with the engine's own (some digits per parameter)
        less than `META_BYTES`, 1 MiB, or ValueError before anything is updated. Raises what failed, StorageError,
        InterruptedUpdate and others; the step is then given up (see `give_up`). With one version of the states a step
        whose update has begun cannot be: it waits for `resume`, which completes it, and until then every use says so.
        """
        self._require_no_function("optimizer.step()")
        self._require_whole()
        self.state_store.require_room_for(self._record(facts or {}, ahead=1))
        try:
            self.updates.raise_failure()
            if self.at_work.backward_begun:
                raise RuntimeError("the last backward pass raised an error: its step cannot be finished, do it again")
            norm = self._finish(facts or {}) if self.updates.pending else 0.0
            self.generation += 1  # weights that wait for a backward pass are given back here, also without gradients
            self._forget_passes()  # also those that no parameter got a gradient of
            self._hooks.give_back_kept()
            if keep:  # in here, so that no interrupt finds the step updated and neither kept nor given up
                self._keep(facts or {})
        except BaseException as error:
            self._give_up_after(error)
            raise
        return norm

    @whole
    def keep(self, facts: dict[str, Any]) -> None:
        """The finished step outlives the process from here on, with `facts` for `resume`: JSON, in all less than 1 MiB
        (ValueError). After an error the weights, states and counts are those of the completed step before, and the step
        is to be done again; but see `finish_step` for one version of the states."""
        self._require_whole()
        try:
            self._keep(facts)
        except BaseException as error:
            self._give_up_after(error)
            raise

    def _keep(self, facts: dict[str, Any]) -> None:
        with patient:
            self._kept_buffers.write_changed()
            self._commit(facts)
        self._restored = False
        if self.state_store.all_compared:
            self.weights.end_loans()
            self._close_streams()
            try:
                self.state_store.compare_no_more()
            except OSError as error:  # the step is kept: who is told of an error would do it twice
                log.warning("memascend: the step is completed; reopening its states failed and is retried: %s", error)
                self._half_taken_back = True
                return
            self._auxiliary.store_was_reopened()

    # -- gradients of the current step, for whoever reads `parameter.grad` (`gradient_views`) ------------------------

    def gradient_waits(self, name: str) -> bool:
        if name in self.gradients.spent:
            raise RuntimeError(
                f"the gradient of {name} was released by the last step(): read gradients before it (wait=True when the "
                "optimizer is created, and p.grad.norm() between backward() and step())"
            )
        if name not in self._arrived:
            return False
        if not self._waits or self.updates.touched:
            raise RuntimeError(
                f"the gradient of {name} is not in memory: gradients of a streamed model are consumed as they arrive. "
                "To clip them, or to read their norms, delay updates (clip=... or wait=True when the optimizer is "
                "created)"
            )
        if self.at_work.backward_begun or self._passes < self.options.accumulate:
            raise RuntimeError(
                f"the gradient of {name} is incomplete before the last of {self.options.accumulate} backward passes: "
                "read or clip it after that. A Trainer's last step of an epoch has fewer passes unless its rows are a "
                "multiple of per_device_train_batch_size * gradient_accumulation_steps"
            )
        return True

    @property
    def _arrived(self) -> Collection[str]:
        """Names of the parameters that got a gradient in the current step."""
        if self.at_work.backward_begun:
            return self.updates.arrived
        return self.gradients.whole if self.updates.pending else ()

    def give_values(self, parameter: nn.Parameter) -> bool:
        return self._hooks.outside.hold(parameter)

    @whole
    def gradient_norm(self, name: str) -> float:
        self.updates.raise_failure()
        self.updates.sum_waiting()
        return self.gradients.norm(name, self.updates.sums.of(name), self.scale)

    @whole
    def scale_gradient(self, name: str, factor: float) -> None:
        self.gradient_waits(name)  # or it raises
        self._clip = 0.0  # the loop clips by itself in this step
        self.gradients.multiply(name, factor)

    def forget_gradient(self, name: str) -> None:
        if name in self._arrived:
            raise RuntimeError(
                f"the gradient of {name} cannot be discarded alone: optimizer.zero_grad() discards all of them"
            )
        self.gradients.spent -= {name}

    @whole
    def forget_gradients_of(self, names: set[str], *, set_to_none: bool) -> None:
        self._require_no_function("zero_grad()")
        arrived = set(self._arrived)
        if arrived & names and arrived - names:
            raise RuntimeError(
                f"the gradient of {min(arrived & names)} cannot be discarded without that of {min(arrived - names)}: "
                "optimizer.zero_grad() discards all of them"
            )
        self.gradients.forget(arrived, set_to_none=set_to_none, of=names)
        if arrived & names:
            self.give_up()

    @whole
    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """As `zero_grad` of all parameters."""
        self._require_no_function("optimizer.zero_grad()")
        take_off_left_over()
        self.gradients.forget(self._arrived, set_to_none=set_to_none)
        if self.updates.pending or self._passes:
            self.give_up()

    def _finish(self, facts: dict[str, Any]) -> float | None:
        updates, options = self.updates, self.options
        updates.scale = self.scale
        waited = self._waits or self._passes < options.accumulate
        if waited:
            updates.sum_waiting()
        else:
            updates.finish_direct()
            if not options.implicit_step:  # a scheduler's step comes before the forward pass that ends this one
                updates.require_same_settings()
        norm = updates.sums.norm(self.layout.order)
        if not bool(torch.isfinite(norm)):
            try:
                self._take_back(written=not waited or options.redoes)
            except state_store.InterruptedUpdate as error:
                error.args = (f"a gradient was infinite or NaN; {error}",)
                raise
            return None
        clipping = self._clipping(norm)
        if waited:
            updates.scale *= clipping
        if options.redoes:
            self._auxiliary.gradients.flush()
            settings = [self._settings(name) for name in self.steps]
            self._update_in_parts(Redo.of(updates, settings, facts, self._kind_of_gradients()))
        elif waited:
            updates.finish_waiting()
        self._flush()
        self.speculation.saw(clipped=clipping > 1)
        self._count_step()
        step = max(self.steps.values(), default=0)
        self._profile.end_step(
            step, "optimizer" if waited else "backward", self.state_store.since_opened, updates.fastest
        )
        self._decide_on_swapping()
        updates.end_step()
        self._heap.after_step()
        return float(norm / self.scale)

    def _forget_passes(self) -> None:
        self._passes, self._clip, self._speculates = 0, self.options.clip, False

    def _count_step(self) -> None:
        updated = self.updates.arrived | self.updates.zeroed
        for name in self.steps:
            if self.options.zero_missing or name in updated:
                self.steps[name] += 1

    def _require_whole(self, *, gives_up: bool = False) -> None:
        """This is the process that trains, and the tier holds whole steps. With `gives_up` a step whose backward pass
        or update ended in an error that the loop has seen is forgotten."""
        self.weights.require_own_process()
        if gives_up and (self.updates.failure_was_told or self.at_work.backward_begun):
            log.warning(
                "memascend: the current step was discarded after an error; training continues from the previous one"
            )
            self.give_up()
        if self._half_taken_back and self._unfinished in (None, _CUT_OFF):
            self._take_back(written=True)
        if self._unfinished is _CUT_OFF and self._completes:
            self._complete_here()
        if self._unfinished is not None:
            raise (RuntimeError if self._unfinished is _CUT_OFF else self._refusal)(self._unfinished)

    def _update_in_parts(self, redo: Redo) -> None:
        """Each unit's weights and states with one commit, that says so; gradients go with the step's own."""
        all_done = {**redo.record, "done": [unit.key for unit in self.layout.units]}
        self.state_store.require_room_for(self._record({}, all_done))
        self._unfinished = _CUT_OFF
        self._kept_buffers.write_changed()
        self._commit({}, redo)

        def after(unit: Unit) -> None:
            self._flush()
            redo.did(unit)
            self._commit({}, redo)

        left = [unit for unit in reversed(self.layout.units) if not redo.is_done(unit)]
        self.updates.finish_waiting(left, after=after)
        self._unfinished = None
        self.state_store.erase(redo.keys(self.layout))

    def _kind_of_gradients(self) -> list[Any]:
        return [str(self.options.gradients), self.options.zero_missing]

    def _complete(self, redo: Redo) -> dict[str, Any]:
        """The step that an earlier process has begun to use its gradients for; the facts that it is kept with."""
        if redo.record["kind"] != self._kind_of_gradients():
            raise state_store.NotThisModel(
                f"{self.state_store.folder} holds gradients of a step that must be completed as {redo.record['kind']}, "
                f"but {self._kind_of_gradients()} was requested (gradients, zero_missing): resume once with the same "
                "options"
            )
        log.info("memascend: a step's update was interrupted: completing it from its gradients")
        self.gradient_stream()
        self.updates.take_up(redo.record, redo.settings(self.layout.order))
        self._update_in_parts(redo)
        self._flush()
        self._count_step()
        self.updates.end_step()
        self._commit(redo.facts)
        return redo.facts

    def _complete_here(self) -> None:
        """As `resume` does, where nothing but an interrupt has cut the update off."""
        try:
            self._complete(Redo(self.state_store.completed()["redo"]))
        except BaseException as error:
            self._give_up_after(error)
            raise
        self._kept_steps = dict(self.steps)

    @whole
    def completed_steps(self) -> dict[str, int]:
        """Of each trained parameter. After an interrupt the folder is looked at, and an update that it has cut off is
        completed, where the drive allows."""
        if self._pid == os.getpid() and not self._closed:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # the next use of the engine raises it
                self._require_whole()
        return self.steps

    def _take_back(self, *, written: bool) -> None:
        """Nothing of this step stays: what is in memory or written may be half of it. Where the tier does not open
        again, whoever needs the engine next tries once more."""
        self.generation += 1
        self._half_taken_back = self._half_taken_back or written
        synchronize(self.units.device)
        self.visits.forget()
        self.updates.abandon()
        self._hooks.forget_kept()
        self.weights.abandon()
        self._kept_buffers.forget_written()
        with contextlib.suppress(OSError, RequestCancelled):
            self._close_streams()
        self._forget_passes()
        self.steps = dict(self._kept_steps)
        if self._half_taken_back:
            try:
                self.state_store.roll_back()
            except state_store.InterruptedUpdate as error:
                self._unfinished, self._refusal = str(error), type(error)
                raise
            self._auxiliary.store_was_reopened()
            self._look_at_kept_steps()
            self.steps = dict(self._kept_steps)
            self._unfinished = _CUT_OFF if self.state_store.update_was_cut_off else None
        self._half_taken_back = False

    def _look_at_kept_steps(self) -> None:
        """A commit that Ctrl-C fell into may have been done all the same."""
        if (kept := self.state_store.completed()) is not None:
            self._kept_steps = dict(zip(self.layout.order, kept["steps"], strict=True))

    def _close_streams(self) -> None:
        """Every slot is free, and nothing is in flight; all of them can be used again. Raises the first failure."""
        failures = []
        for stream in (self._stream, self._states, self._auxiliary.gradients):
            try:
                if stream is not None:
                    stream.close()
            except (OSError, RequestCancelled) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @whole
    def give_up(self) -> None:
        """After an error in the loop: forget the current step. Everything is as after the last completed one.

        Raises InterruptedUpdate where that cannot be (`EngineOptions.redo`): the engine can then only be closed."""
        if self._closed:
            return
        self.weights.require_own_process()
        leaving.begin_if_asked()
        take_off_left_over()
        self.visits.forget()
        self.at_work = PassInProgress()
        self._hooks.forget()
        with contextlib.suppress(OSError, RequestCancelled):
            self._inputs.give_back()
        self._take_back(written=True)

    def _give_up_after(self, error: BaseException) -> None:
        self._completes = not isinstance(error, Exception)
        try:
            with patient:
                self.give_up()
        except Exception as another:
            error.add_note(f"and what was written of the step could not be taken back: {another}")
        else:
            if self._unfinished is not None:
                error.add_note(self._unfinished)

    def _settings(self, name: str) -> AdamSettings:
        return AdamSettings.of(self._groups.of(name), self.steps[name] + 1, self.gradients.factors.get(name, 1.0))

    def gradient_stream(self) -> WeightStream:
        """Of gradients that wait on the tier; made by whichever thread asks first."""
        return self._auxiliary.gradient_stream()

    # -- contents ------------------------------------------------------------------------------------------------------

    def read_weights(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every parameter after the last completed step, see `TierContents`; RuntimeError as
        `require_completed_step`."""
        return self._contents.read_weights(order)

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """A trained parameter's states after the last completed step, see `TierContents`; RuntimeError as
        `require_completed_step`."""
        return self._contents.read_states(name)

    def write_states(self, states_of: StatesOf, steps: Mapping[str, int]) -> None:
        """Put states in, see `TierContents`, which are those after so many `steps` of each parameter named; `keep`
        completes it. With one version of the states there is no completed step from the first unit on until then.
        RuntimeError where a gradient has come since the last step; ValueError for a parameter that is not trained."""
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
        """Begin to copy what `targets` name, as it is after the last completed step, into their files. Training can go
        on at once: an update that would overwrite what is not copied yet waits for that.

        `end` is called when all is copied, and `give_up` with an error, for the one that is raised, both in the save's
        thread. `close` waits for the save. One runs at a time: this waits for the one before, and raises its error
        where nobody has asked for it. The files belong to the save from here on. Raises RuntimeError as
        `require_completed_step`, and while a step is in progress.
        """
        self._require_no_function("save()")
        self.require_open()
        self.require_completed_step()
        if self._save is not None and not (self._save.done() and self._save.was_looked_at):
            self._save.wait()
        extracts = Extracts(self.layout, targets).by_key
        self._save = BackgroundSave(what, self.state_store, extracts, self.buffers.need_saved(), end, give_up)
        return self._save

    def raise_unseen_failure_of_save(self) -> None:
        """The error of the last save, where it has one that nobody has asked for."""
        if self._save is not None and self._save.done() and not self._save.was_looked_at:
            self._save.wait()


class _Looking:
    """At micro-batches one after the other: could they go side by side?"""

    def __init__(self, footprint: ForwardFootprint) -> None:
        self.footprint = footprint
        self.why: str | None = None
        self.routes: list[list[str]] = []  # keys that each pass reaches
        self._number = 0

    def at(self, key: str, number: int, *, forward: bool) -> None:
        route = self.routes[-1]
        again = bool(route) and route[-1] == key and number >= self._number
        self._number = number
        if not again:
            route.append(key)
            if forward and self.why is None:
                self.why = self.footprint.found_midway()


class _Together:
    """Micro-batches that are in progress side by side."""

    def __init__(self, lanes: Lanes, footprint: ForwardFootprint, count: int, dtype: torch.dtype) -> None:
        self.lanes, self.count, self.sums = lanes, count, SummedGradients(count, dtype)
        self.held: Unit | None = None  # whose weights stay until the last of them has left it
        self.forwards_ended = self._backwards_begun = 0
        self.footprint = footprint
        self._in_blocks: set[int] = set()
        self._visitors: dict[str, set[int]] = {}

    def enters_a_block(self, number: int) -> None:
        """NotStreamable where the beginnings of the forward passes were not independent."""
        if number in self._in_blocks:
            return
        self._in_blocks.add(number)
        if len(self._in_blocks) == self.count:
            self._require_nothing(self.footprint.found_midway())

    def backward_begins(self) -> bool:
        """Of one more; whether it is the first. NotStreamable where the forward passes were not independent."""
        self._backwards_begun += 1
        if self._backwards_begun == self.count:
            self._require_nothing(self.footprint.found())
        return self._backwards_begun == 1

    def _require_nothing(self, why: str | None) -> None:
        if why is not None:
            raise NotStreamable(
                f"micro-batches cannot run side by side here, as those of the first step could: {why}: run them one "
                "after the other (order='horizontal')"
            )

    def all_visited(self, unit: Unit, number: int) -> bool:
        """Whether backward has been through a unit in all of them, now that it has in `number`."""
        visitors = self._visitors.setdefault(unit.key, set())
        visitors.add(number)
        return len(visitors) == self.count


def _kind_of_call(function: Callable[..., Any], model: nn.Module) -> Any:
    """Calls that are alike do the same with the model, as far as that can be told beforehand."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", getattr(getattr(function, "__func__", None), "__code__", type(function)))
    return code, tuple(module.training for module in model.modules())


def _units(
    model: nn.Module, blocks: Sequence[nn.Module] | None, options: EngineOptions, aligned: bool = True
) -> ModelUnits:
    device, elements = device_of(model.parameters(), options.device), options.piece_elements
    units = ModelUnits(model, blocks, states=options.states, piece_elements=elements, aligned=aligned, device=device)
    for buffer in model.buffers():  # small, and no unit's
        buffer.data = buffer.data.to(device)
    return units


def _is_nested(model: nn.Module) -> bool:
    """In the model's forward pass: whether another one of it is in progress around it."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls > 1


def _kept_whole(layout: Layout) -> str:
    """What is in memory as a whole while a step needs it, and how much that is."""
    sizes = {
        unit.key: unit.numel * layout.weights.itemsize
        for unit in layout.units
        if unit.kind in (Kind.HELD, Kind.LOOKED_UP)
    }
    if not sizes:
        return ""
    named = sorted(sizes, key=sizes.__getitem__, reverse=True)
    others = f" and {len(named) - 3} more" if len(named) > 3 else ""
    blocks = sum(unit.kind is Kind.BLOCK for unit in layout.units)
    return (
        f"{blocks} blocks are streamed; {', '.join(named[:3])}{others} are in memory as a whole while a step needs "
        f"them, {sum(sizes.values()) / 2**20:.1f} MiB"
    )


def _kept_units(
    model: nn.Module, blocks: Sequence[nn.Module] | None, options: EngineOptions, is_kept: Callable[[Layout], bool]
) -> ModelUnits:
    """As the store has them, which may be cut as by an earlier version of this library, or have another's blocks, or
    weights with the frozen ones among them, or without gaps."""
    units = _units(model, blocks, options)
    if _is_or_was(units, is_kept):
        return units
    for chosen in [blocks] if blocks is not None else [None, largest_list(model)]:
        by_blocks = _units(model, chosen, options)
        cut = [options.piece_elements]
        if options.piece_elements is None:
            cut.append(by_blocks.layout.earlier_piece_elements)
        for elements, aligned in itertools.product(cut, (True, False)):
            found = _units(model, chosen, replace(options, piece_elements=elements), aligned)
            if _is_or_was(found, is_kept):
                return found
    return units


def _is_or_was(units: ModelUnits, is_kept: Callable[[Layout], bool]) -> bool:
    """Whether a store has these units, which then get the layout that it has."""
    for layout in (units.layout, replace(units.layout, splits=False)):
        if is_kept(layout):
            units.layout = layout
            return True
    return False

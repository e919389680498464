"""Steps of an engine: finished, kept, redone after a kill, and taken back after an error."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch

from memascend.engine.block_runtime import PassInProgress
from memascend.engine.device import synchronize
from memascend.engine.engine_state import EngineState
from memascend.engine.errors import InterruptedUpdate, NotStreamable, NotThisModel
from memascend.engine.in_place_update import Redo
from memascend.engine.layout import Unit
from memascend.engine.operators import take_off_left_over
from memascend.storage import leaving
from memascend.storage.completion import RequestCancelled
from memascend.storage.interrupts import patient, whole

log = logging.getLogger("memascend")

_CUT_OFF = "a step's update was cut off: close the engine, and resume, which completes it"


class StepRuntime(EngineState):
    """What makes a step last, and what forgets it.

    Why so much care: gradients are used while backward runs, so that until the commit the tier may hold any mixture of
    two steps. Every error therefore goes through `_give_up_after`, which puts back the last committed step, or, with
    one version of the states, leaves the step to be completed (`_unfinished`). Nothing is used before `_require_whole`
    has seen that neither is outstanding.
    """

    def __init__(self, *parts: Any) -> None:
        self._unfinished: str | None = None  # what is to be done about an update that is half on the tier
        self._refusal: type[InterruptedUpdate] = InterruptedUpdate
        self._half_taken_back = False  # a step that failed, on a tier that failed again
        self._completes = False  # an interrupt alone has cut an update off, which is completed at the next use
        self._restored = False
        super().__init__(*parts)

    # -- what may be used when -----------------------------------------------------------------------------------------

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

    # -- the end of a step ---------------------------------------------------------------------------------------------

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
        self.state_store.require_space_for(self._record(facts or {}, ahead=1))
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

    def _finish(self, facts: dict[str, Any]) -> float | None:
        updates, options = self.updates, self.options
        updates.scale = self.scale
        waited = self._waits or self._passes < options.accumulate
        if waited:
            updates.sum_waiting()
        else:
            updates.finish_direct()
            if not options.implicit_step:  # a scheduler's step comes before the forward pass that ends this one
                updates.adam.require_same_settings()
        norm = updates.sums.norm(self.layout.order)
        if not bool(torch.isfinite(norm)):
            try:
                self._take_back(written=not waited or options.redoes)
            except InterruptedUpdate as error:
                error.args = (f"a gradient was infinite or NaN; {error}",)
                raise
            return None
        clipping = self._clipping(norm)
        if waited:
            updates.scale *= clipping
        if options.redoes:
            gradients = self._auxiliary.gradients
            assert gradients is not None  # something has come, and has been summed there
            gradients.flush()
            settings = [self._settings(name) for name in self.steps]
            self._update_in_parts(Redo.of(updates, settings, facts, self._kind_of_gradients()))
        elif waited:
            updates.finish_waiting()
        self._flush()
        self.speculation.saw(clipped=clipping > 1)
        self._count_step()
        step = max(self.steps.values(), default=0)
        self._profile.end_step(
            step, "optimizer" if waited else "backward", self.state_store.since_opened, updates.adam.fastest
        )
        self._decide_on_swapping()
        updates.end_step()
        self._heap.after_step()
        return float(norm / self.scale)

    def _clipping(self, norm: torch.Tensor) -> float:
        """What gradients are divided by besides the loss scale."""
        return max(1.0, (float(norm) / self.scale + 1e-6) / self._clip) if self._clip > 0 else 1.0

    def _count_step(self) -> None:
        updated = self.updates.arrived | self.updates.zeroed
        for name in self.steps:
            if self.options.zero_missing or name in updated:
                self.steps[name] += 1

    def _forget_passes(self) -> None:
        self._passes, self._clip, self._speculates = 0, self.options.clip, False

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
            except OSError as error:  # the step is kept: whoever sees an error would do it twice
                log.warning("memascend: the step is completed; reopening its states failed and is retried: %s", error)
                self._half_taken_back = True
                return
            self._auxiliary.store_was_reopened()

    def _commit(self, facts: dict[str, Any], redo: Redo | None = None) -> None:
        self.state_store.commit(self._record(facts, redo.record if redo is not None else None))
        self._kept_steps = dict(self.steps)

    def _record(self, facts: dict[str, Any], redo: dict[str, Any] | None = None, *, ahead: int = 0) -> dict[str, Any]:
        """What a commit keeps besides the states, `ahead` steps from now."""
        steps = [step + ahead for step in self.steps.values()]
        whole = {"steps": steps, "versions": self.options.versions, "facts": facts}
        if self.options.replaces_without_redo:
            whole["redoes"] = False
        return whole if redo is None else {**whole, "redo": redo}

    # -- one version of the states: an update that is redone -----------------------------------------------------------

    def _update_in_parts(self, redo: Redo) -> None:
        """Each unit's weights and states with one commit, that says so; gradients go with the step's own."""
        all_done = {**redo.record, "done": [unit.key for unit in self.layout.units]}
        self.state_store.require_space_for(self._record({}, all_done))
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
            raise NotThisModel(
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
            kept = self.state_store.completed()
            assert kept is not None
            self._complete(Redo(kept["redo"]))
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

    # -- taking a step back --------------------------------------------------------------------------------------------

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
            except InterruptedUpdate as error:
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

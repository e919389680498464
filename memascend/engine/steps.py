"""Steps of an engine: how they are finished, kept, redone after a kill, and rolled back after an error."""

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
    """The layer of the engine that commits steps and rolls them back.

    Why this needs care: gradients are used while backward runs, so that until the commit the tier may hold any mixture
    of two steps. Every error therefore goes through `_give_up_after`, which restores the last committed step, or, with
    one version of the states, leaves the step to be completed (`_unfinished`). Each use of the engine first calls
    `_require_whole`, which checks that neither is still pending.
    """

    def __init__(self, *parts: Any) -> None:
        # The message for an update that is only partly on the tier: it says what to do about it.
        self._unfinished: str | None = None
        self._refusal: type[InterruptedUpdate] = InterruptedUpdate
        self._half_taken_back = False  # a step failed, and so did its rollback on the tier
        self._completes = False  # an update was cut off by an interrupt only: it is completed at the next use
        self._restored = False
        super().__init__(*parts)

    # -- what may be used when -----------------------------------------------------------------------------------------

    def _require_usable(self) -> None:
        """Check, before weights are used, that a forward pass sees those of the last completed step. Inside of a
        backward pass only the process is checked."""
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
        """Check that weights and states are those of the last completed step. A step that ended in an error is given up
        first. Raises RuntimeError if updates of the next step have begun, and the error of a failed update that was not
        raised before."""
        self._require_whole(gives_up=torch._C._current_graph_task_id() == -1)
        self.updates.raise_failure()
        if self.updates.touched:
            raise RuntimeError(
                "between backward() and step() weights and states are half updated: call optimizer.step() first, or "
                "optimizer.zero_grad(), which discards the step"
            )

    @whole
    def require_no_gradients(self) -> None:
        """Check that no gradient has come since the last completed step, so that states can be replaced. Raises
        RuntimeError otherwise."""
        self.require_completed_step()
        if self.updates.pending:
            raise RuntimeError(
                "between backward() and step() states cannot be replaced: call optimizer.step() first, or "
                "optimizer.zero_grad(), which discards the step"
            )

    def _require_whole(self, *, gives_up: bool = False) -> None:
        """Check that this is the process that trains and that the tier holds a whole step; retry a rollback that failed
        and complete an update that an interrupt cut off. With `gives_up`, first discard a step whose backward pass or
        update ended in an error that the loop has seen. Raises RuntimeError or InterruptedUpdate."""
        self.weights.require_own_process()
        if gives_up and (self.updates.failure_was_raised or self.at_work.backward_begun):
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
        """Wait until all updates of this step are done and written; return the 2-norm of all gradients, unscaled.

        None means that a gradient was infinite or NaN: the weights and states are still those of the last `keep`. With
        `keep` the step is completed too; otherwise the caller calls `keep` before the next step. `facts`: JSON that is
        kept with the step, also if a kill cuts its update off and `resume` completes it (pass the same to `keep`);
        together with the engine's own facts (some digits per parameter) less than `META_BYTES`, 1 MiB, or ValueError
        before anything is updated. Raises the error that occurred, StorageError, InterruptedUpdate or others; the step
        is then given up (see `give_up`). With one version of the states, a step whose update has begun cannot be given
        up: `resume` completes it, and until then every use of the engine raises an error that says so.
        """
        self._require_no_function("optimizer.step()")
        self._require_whole()
        self.state_store.require_space_for(self._record(facts or {}, ahead=1))
        try:
            self.updates.raise_failure()
            if self.at_work.backward_begun:
                raise RuntimeError("the last backward pass raised an error: its step cannot be finished, do it again")
            norm = self._finish(facts or {}) if self.updates.pending else 0.0
            # Also for a step without gradients: its passes are over, and units kept for a backward pass are released.
            self.generation += 1
            self._forget_passes()
            self._hooks.give_back_kept()
            if keep:  # inside of the try: an interrupt must not leave a step updated but neither kept nor given up
                self._keep(facts or {})
        except BaseException as error:
            self._give_up_after(error)
            raise
        return norm

    def _finish(self, facts: dict[str, Any]) -> float | None:
        """Complete all updates of the step, and return its norm, unscaled. If a gradient was infinite or NaN, the step
        is taken back and None is returned."""
        updates, options = self.updates, self.options
        updates.scale = self.scale
        waited = self._waits or self._passes < options.accumulate
        if waited:
            updates.sum_waiting()
        else:
            updates.finish_direct()
            if not options.implicit_step:  # there a scheduler may step before the forward pass that ends this step
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
            assert gradients is not None  # gradients are pending, and were summed in this stream
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
        """Return the factor, at least 1, by which clipping divides gradients in addition to the loss scale."""
        return max(1.0, (float(norm) / self.scale + 1e-6) / self._clip) if self._clip > 0 else 1.0

    def _count_step(self) -> None:
        """Count the step for every parameter that was updated in it."""
        updated = self.updates.arrived | self.updates.zeroed
        for name in self.steps:
            if self.options.zero_missing or name in updated:
                self.steps[name] += 1

    def _forget_passes(self) -> None:
        self._passes, self._clip, self._speculates = 0, self.options.clip, False

    @whole
    def keep(self, facts: dict[str, Any]) -> None:
        """Commit the finished step, so that it survives the process, with `facts` for `resume`: JSON, less than 1 MiB
        together with the engine's own (else ValueError). After an error the weights, states and counts are those of the
        previous completed step, and the step has to be done again; but see `finish_step` for one version."""
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
            except OSError as error:  # the step is kept: a caller that sees an error would do it a second time
                log.warning("memascend: the step is completed; reopening its states failed and is retried: %s", error)
                self._half_taken_back = True
                return
            self._auxiliary.store_was_reopened()

    def _commit(self, facts: dict[str, Any], redo: Redo | None = None) -> None:
        """Commit all writes with the record of the step."""
        self.state_store.commit(self._record(facts, redo.record if redo is not None else None))
        self._kept_steps = dict(self.steps)

    def _record(self, facts: dict[str, Any], redo: dict[str, Any] | None = None, *, ahead: int = 0) -> dict[str, Any]:
        """Return what a commit keeps in addition to the states, as JSON; `ahead` is added to all counts of steps."""
        steps = [step + ahead for step in self.steps.values()]
        whole = {"steps": steps, "versions": self.options.versions, "facts": facts}
        if self.options.replaces_without_redo:
            whole["redoes"] = False
        return whole if redo is None else {**whole, "redo": redo}

    # -- one version of the states: an update that is redone -----------------------------------------------------------

    def _update_in_parts(self, redo: Redo) -> None:
        """Update unit by unit, and commit each unit's weights and states with a record that names it as done. The
        gradients are erased with the commit of the step itself."""
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
        """Return how the waiting gradients are to be read, for the record of a redo."""
        return [str(self.options.gradients), self.options.zero_missing]

    def _complete(self, redo: Redo) -> dict[str, Any]:
        """Complete the step that an earlier process began to update, from its stored gradients; return its facts.
        Raises NotThisModel if gradients are to be read in another way than they were written."""
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
        """Complete, as `resume` does, an update that only an interrupt has cut off."""
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
        """Return the count of completed steps of each trained parameter. After an interrupt the folder is checked, and
        an update that was cut off is completed, if the drive works."""
        if self._pid == os.getpid() and not self._closed:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # the next use of the engine raises it
                self._require_whole()
        return self.steps

    # -- taking a step back --------------------------------------------------------------------------------------------

    @whole
    def give_up(self) -> None:
        """Discard the current step after an error in the loop: everything is as after the last completed step.

        Raises InterruptedUpdate if that is impossible (`EngineOptions.redo`): the engine can then only be closed."""
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
        """Give the step up after `error`, and add a note to the error if that fails or the step has to be completed."""
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
        """Discard all of this step, in memory and, with `written`, on the tier, since any of it may be incomplete. If
        the store cannot be reopened, the next use of the engine retries."""
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
        """Read the counts of steps from the store, since a commit that Ctrl-C interrupted may have succeeded."""
        if (kept := self.state_store.completed()) is not None:
            self._kept_steps = dict(zip(self.layout.order, kept["steps"], strict=True))

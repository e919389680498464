"""Accumulation of micro-batches in a step, side by side or one after the other (`memascend.engine.vertical`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memascend.engine.block_runtime import PassInProgress
from memascend.engine.layout import Kind, Unit
from memascend.engine.passes import PassRuntime
from memascend.engine.side_by_side import IndependenceCheck, SideBySide, kind_of_call
from memascend.engine.speculation import Beginning
from memascend.engine.vertical import ORDERS, ForwardFootprint, Lanes, Route, cannot_be_carried_over
from memascend.storage.interrupts import whole

log = logging.getLogger("memascend")


class Accumulation(PassRuntime):
    """Runs the micro-batches of a step in the order that moves the fewest bytes.

    Micro-batches that run side by side see each other's changes to the model, which would change results. The first
    call with a function therefore runs them one after the other and observes them (`IndependenceCheck`). Only those
    that were independent run side by side in later calls, on the same route through the blocks, and each step checks
    their independence again before it uses any gradient.
    """

    def __init__(self, *parts: Any) -> None:
        self._known: dict[Any, Route | str] = {}  # by function and modes: the route side by side, or why not
        self.accumulated: tuple[str, str] | None = None  # order of the last `accumulate`, and the reason
        super().__init__(*parts)
        self._numbers_of_slices = {
            unit.key: number for slices in self.units.matrices.values() for number, unit in enumerate(slices)
        }

    def accumulate(
        self,
        function: Callable[[Any], Any],
        micro_batches: Iterable[Any],
        *,
        order: str = "vertical",
        repeatable: bool = False,
    ) -> list[Any]:
        """Return `[function(each) for each in micro_batches]`; all of their backward passes belong to this step.

        `order`: with "vertical", all micro-batches pass a unit of weights before any of them moves on to the next,
        where that is possible. The first call with a function, and calls for which it is not possible, run them one
        after the other, as "horizontal" does. Gradients are bitwise equal in both orders.

        `repeatable`: the function changes nothing but the model, draws random numbers only from the generators of
        torch, NumPy and Python, and nobody reads gradients before `finish_step`. If all passes of the step are in this
        call, their gradients may then be used before their norm is known. If they need clipping, all passes are done
        again (`memascend.engine.speculation`), and the results are those of the second run.

        After an error the current step is given up, and no micro-batch is running any more. Raises what `function`
        raises, ValueError for an unknown order, and RuntimeError for a nested call or for more passes than were
        announced, before any has begun.
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

    def _in_order(self, function: Callable[[Any], Any], batches: Sequence[Any], order: str) -> list[Any]:
        """Run the micro-batches in the requested order if possible; record the order and why in `accumulated`."""
        if order == "horizontal" or len(batches) < 2:
            self.accumulated = "horizontal", "as asked for" if len(batches) > 1 else "one micro-batch"
            return self._one_after_another(function, batches)
        kind = kind_of_call(function, self.model)
        known = self._known.get(kind)
        why = self._not_vertical() or (known if isinstance(known, str) else None)
        if why is not None:
            if self.accumulated != ("horizontal", why):
                log.info("memascend: micro-batches run one after the other: %s", why)
            self.accumulated = "horizontal", why
            return self._one_after_another(function, batches)
        if known is None:
            return self._looked_at(function, batches, kind)
        assert isinstance(known, Route)
        self.accumulated = "vertical", "the micro-batches of the first step were independent"
        return self._vertically(function, batches, known)

    def _not_vertical(self) -> str | None:
        """Return why no micro-batches can run side by side in this step, or None if they can."""
        if self.units.device.type != "cpu":
            return f"micro-batches go side by side on the CPU alone, and {self.units.device} computes"
        if self._swapping is not None:
            return "activations are swapped"
        if self._passes:  # their sums would have to start from the gradients on the SSD
            return "gradients of earlier passes of the step wait on the SSD: hand all micro-batches over in one call"
        return cannot_be_carried_over()

    def _one_after_another(self, function: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """Run the micro-batches in turn. After an error the current step is given up."""
        self._in_turn = True
        try:
            return [function(each) for each in batches]
        except BaseException as error:
            self._give_up_after(error)
            raise
        finally:
            self._in_turn = False

    def _looked_at(self, function: Callable[[Any], Any], batches: Sequence[Any], kind: Any) -> list[Any]:
        """Run them one after the other, and record whether and on which route they can run side by side."""
        looking = self._looking = IndependenceCheck(ForwardFootprint(self.model, self.units.device))
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
        """Run the micro-batches side by side on `route`, and use the sums of their gradients. After an error the
        current step is given up."""
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
        self._together = SideBySide(lanes, footprint, len(batches), self.options.gradients)
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
                if self._visits is None:  # only a part of the model is called
                    self._begin_pass()
                self._looking.at(key, number, forward=torch._C._current_graph_task_id() == -1)
            return
        if unit.kind is Kind.BLOCK:
            together.enters_a_block(self.at_work.number)
        together.lanes.reaches(key, number)
        if needs_it and together.in_use is not unit:
            self._leave_unit()
            self.weights.take(unit)
            together.in_use = unit
            if unit.kind is Kind.BLOCK:
                assert self._visits is not None
                self._visits.append(unit.key)
                if torch._C._current_graph_task_id() == -1:
                    self._inputs.begin_group()

    def _leave_unit(self) -> None:
        """Give back the weights that the micro-batches side by side have finished using."""
        together = self._together
        if together is not None and together.in_use is not None:
            used, together.in_use = together.in_use, None
            self.weights.give_back(used)

    def _speculated(self, batches: Sequence[Any], order: str) -> Beginning | None:
        """Return the state from which this step can be done again; None if its gradients wait for their norm."""
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
        """Return whether the norm of a step whose gradients did not wait exceeds the limit, after all of its passes. If
        so, the whole step is taken back. An infinite or NaN norm does not count."""
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

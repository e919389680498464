"""Gradients on their way into the optimizer states, three ways (LoHan IV-C), by way of the tier where they must wait.

`none`       the optimizer runs after backward, as ZeRO-Infinity's: gradients wait on the tier, and each piece is read,
             updated and written before the next one is.
`naive`      as a piece's gradients arrive, its states are read, updated and written, one after the other (Fig. 3a).
`optimized`  the three stages overlap: states of the next pieces are read while one is updated and the one before it is
             written, which is after those reads began (Fig. 3b).

Each hand-over is a completion that is waited for: states are updated when their read has ended, their slot goes on when
the write has. One thread does all of it during backward, and takes no other core's help from the products; backward
waits where more gradients would be in memory than may. What comes after backward is done by the training thread itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memascend.engine.adam_settings import AdamSettings
from memascend.engine.adam_steps import AdamSteps
from memascend.engine.device import GradientCopies
from memascend.engine.errors import NotStreamable
from memascend.engine.job_thread import JobThread
from memascend.engine.layout import SUM_ELEMENTS, Layout, Part, Piece, Run, Unit, padded
from memascend.engine.options import ARMS
from memascend.engine.pieces import Gradients, PieceState, StepPieces
from memascend.engine.square_sums import SquareSums
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.weights import WeightStream
from memascend.ops.threads import compute_alone


class Updates:
    """One model's gradients and updates. All methods are the training thread's; what it need not wait for is done in
    another one.

    `settings(name)`: what a parameter is updated with. `gradients()`: the stream of gradients that wait; made when it
    is first asked for. `zero_missing`: a parameter that got no gradient in a step is updated with zeros, as in ZeRO's
    flat groups; else it is left as it is, as torch.optim does. `copies`: brings the gradients of an accelerator.

    Why one thread, and no more: reading, updating and writing of different pieces overlap, which hides the drive, while
    a second thread of AdamW would take cores from backward's products. Why each piece has a state (`StepPieces`): its
    gradient comes in several parts, maybe again in a later pass, and a unit's weights must not change while backward
    still computes with them. So an update waits until the piece is complete, and weights are written when the unit is.
    """

    def __init__(
        self,
        layout: Layout,
        weights: UnitWeights,
        states: WeightStream | None,
        gradients: Callable[[], WeightStream],
        settings: Callable[[str], AdamSettings],
        *,
        arm: str = "optimized",
        zero_missing: bool = True,
        copies: GradientCopies | None = None,
    ) -> None:
        if arm not in ARMS:
            raise ValueError(f"unknown arm {arm!r} of gradient offloading: use one of {', '.join(ARMS)}")
        self.layout, self.arm = layout, arm
        self._weights, self._states, self._gradients = weights, states, gradients
        self._zero_missing, self._copies = zero_missing, copies
        self._units = {unit.key: unit for unit in layout.units}
        self._places: dict[tuple[str, int], list[tuple[Piece, Run]]] = {}  # of a part
        for piece in layout.pieces:
            for run in piece.runs:
                self._places.setdefault(run.part.key, []).append((piece, run))
        trained = [sum(p.numel for p in unit.pieces) for unit in layout.units]
        self.most_waiting_bytes = 2 * max(trained, default=0) * layout.weights.itemsize
        self._expected: list[str] = []  # pieces in the order in which they came last time
        self._thread = JobThread(
            "memascend-updates", compute_alone, self._close_without_writing, self.most_waiting_bytes
        )
        self.adam = AdamSteps(layout.states, settings)
        self._begin()

    def _begin(self) -> None:
        self.sums = SquareSums()
        self.scale = 1.0  # what the gradients carry; the loss scale, and in the end clipping
        self._pieces = StepPieces(self.layout)
        self._arrived: set[tuple[str, int]] = set()  # parts that got a gradient
        self._order: list[str] = []  # pieces, as their updates began
        self.adam.begin()
        self.zeroed: frozenset[str] = frozenset()  # parameters that are updated with zeros if they get no gradient
        self._replaced: set[str] = set()  # units of which no element stays: their weights need not be read

    # -- from the training thread --------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether any gradient has come since the last step."""
        return bool(self._arrived)

    @property
    def touched(self) -> bool:
        """Whether an update of this step has begun: weights and states may be neither those before it nor after it."""
        return self._pieces.any_begun

    @property
    def arrived(self) -> set[str]:
        """Names of the parameters that got a gradient in this step."""
        return {name for name, _ in self._arrived}

    @property
    def failure_was_told(self) -> bool:
        """Whether an update has failed and the training thread has had its error."""
        return self._thread.failure_was_raised

    def expect(self) -> None:
        """Backward is about to begin: the states that it will need first are read."""
        if self.arm == "optimized" and self._states is not None and self._expected and not self.touched:
            self._states.read_ahead(self._expected)

    def arrive(self, part: Part, gradient: torch.Tensor, *, wait: bool, last: bool) -> None:
        """`gradient` is the updates' own from now on. `wait`: it goes to the tier; else it is used at once. `last`: of
        this parameter in this step."""
        self.raise_failure()
        if any(self._pieces.takes_no_more(piece, part.key) for piece, _ in self._places[part.key]):
            raise NotStreamable(
                f"{part.name} gets a second gradient in one backward pass, after the first one was used: blocks that "
                "run more than once per step need checkpoints with use_reentrant=False, or none (the engine recomputes "
                "blocks by itself)"
            )
        self._arrived.add(part.key)
        flat = gradient.detach().reshape(-1)
        self._thread.hold_back(flat.nbytes)
        for piece, _ in self._places[part.key]:
            if self._pieces.add(piece, part.key, flat):
                self._complete(piece, wait=wait, last=last)

    def _complete(self, piece: Piece, *, wait: bool, last: bool) -> None:
        gradients = self._pieces.take(piece)
        ready = self._copies.mark() if self._copies is not None else None
        if wait:
            first = not self._pieces.is_on_tier(piece)
            self._pieces.move(piece, PieceState.SUMMED if last else PieceState.SPILLED)
            self._thread.submit(lambda: self._spill(piece, gradients, ready, first=first, last=last))
        else:
            self._hold_open(piece)
            self._thread.submit(lambda: self._update_arrived(piece, gradients, ready))

    def _hold_open(self, piece: Piece) -> None:
        """The unit's weights stay where they are until all of its pieces are updated."""
        self._pieces.move(piece, PieceState.UPDATED)
        self._order.append(piece.key)
        if self._weights.is_in_use(self._units[piece.unit]):
            self._open_unit(piece.unit)

    def has_begun(self, unit: Unit) -> bool:
        """Whether an update of the unit's weights has begun in this step."""
        return any(map(self._pieces.has_begun, unit.pieces))

    def end_unit(self, unit: Unit, *, wait: bool, last: bool) -> None:
        """Backward has gone through the unit: what came of pieces that are not complete goes the way of the others, and
        pieces of which nothing came wait for nothing any more, so that the unit's slot is free. Where no gradient came
        at all (torch.autograd.grad of activations), the sums of earlier passes stay on the tier: more may come."""
        left = [piece for piece in unit.pieces if not self._pieces.has_begun(piece)]
        came = [piece for piece in left if self._has_come(piece)]
        if not wait and (came or self._pieces.is_open(unit.key)):
            came += [p for p in left if p not in came and (self._has_zeros(p) or self._pieces.is_on_tier(p))]
        for piece in came:
            self._complete(piece, wait=wait, last=last)
        for piece in left:
            if not wait and piece not in came:
                self._idle(piece)

    def _zeroes(self, part: Part) -> bool:
        """Whether a part that got no gradient is updated with zeros."""
        return self._zero_missing or part.name in self.zeroed

    def _has_zeros(self, piece: Piece) -> bool:
        return self._zero_missing or (bool(self.zeroed) and any(run.part.name in self.zeroed for run in piece.runs))

    def _has_come(self, piece: Piece) -> bool:
        return self._pieces.state(piece) is PieceState.ARRIVED

    def _idle(self, piece: Piece) -> None:
        """Nothing came of the piece, and nothing will."""
        if self._pieces.is_open(piece.unit):
            self._pieces.move(piece, PieceState.UPDATED)
            self._thread.submit(lambda: self._piece_done(piece))

    def end_pass(self, *, wait: bool, last: bool) -> None:
        """A backward pass has ended: what came of pieces that are not complete goes the way of the others."""
        if wait or self._zero_missing is False:
            for piece in filter(self._has_come, self.layout.pieces):
                self._complete(piece, wait=wait, last=last)

    def finish_direct(self) -> None:
        """After the last pass without waiting: what got no gradient, then until all is updated and written."""
        for unit in self.layout.units:
            left = [piece for piece in unit.pieces if not self._pieces.has_begun(piece)]
            wanted = [p for p in left if self._has_zeros(p) or self._has_come(p) or self._pieces.is_on_tier(p)]
            for piece in wanted:
                self._complete(piece, wait=False, last=True)
            if wanted:  # the unit's slot is free, whether or not the other pieces got a gradient
                self._thread.submit(partial(self._close_unit, unit.key))
        self._close_all()  # units with pieces that nothing came for
        self._expected = list(self._order)

    def sum_waiting(self) -> None:
        """Until the sums of squares of all that waits on the tier are there."""
        for piece in self.layout.pieces:
            if self._pieces.state(piece) is PieceState.SPILLED:
                self._pieces.move(piece, PieceState.SUMMED)
                self._thread.run(partial(self._sum, piece))
        self._thread.drain()

    def waiting_facts(self) -> dict[str, Any]:
        """What `take_up` needs besides the gradients on the tier (JSON)."""
        numbers = {unit.key: number for number, unit in enumerate(self.layout.units)}
        arrived = [
            [numbers[u.key], n] for u in self.layout.units for n, p in enumerate(u.parts) if p.key in self._arrived
        ]
        spilled = [number for number, piece in enumerate(self.layout.pieces) if self._pieces.is_on_tier(piece)]
        return {"scale": self.scale, "arrived": arrived, "spilled": spilled, "zeroed": sorted(self.zeroed)}

    def take_up(self, facts: Mapping[str, Any], settings: Mapping[str, AdamSettings]) -> None:
        """The gradients on the tier are those of a step that an earlier process has begun to use."""
        units, pieces = self.layout.units, self.layout.pieces
        self.scale = facts["scale"]
        self._arrived = {units[unit].parts[part].key for unit, part in facts["arrived"]}
        self._pieces.set_on_tier(pieces[number] for number in facts["spilled"])
        self.zeroed = frozenset(facts.get("zeroed", ()))
        self.adam.begin(settings)

    def finish_waiting(
        self, units: Sequence[Unit] | None = None, *, after: Callable[[Unit], None] | None = None
    ) -> None:
        """Update everything from the gradients on the tier, unit by unit (default: all, in the order in which the next
        forward pass will not need them: the last ones first). `after`: is called when a unit's update is submitted to
        the tier, before any other is."""
        by_unit = {
            unit.key: [piece for piece in unit.pieces if self._has_zeros(piece) or self._pieces.is_on_tier(piece)]
            for unit in (reversed(self.layout.units) if units is None else units)
        }
        chosen = [piece for pieces in by_unit.values() for piece in pieces]
        self._replaced = {key for key, pieces in by_unit.items() if self._replaces(self._units[key], pieces)}
        if self.arm == "optimized" and self._states is not None:
            self._states.read_ahead([piece.key for piece in chosen])
            self._gradients().read_ahead([gradient_key(piece) for piece in chosen if self._pieces.is_on_tier(piece)])
        for key, pieces in by_unit.items():
            for piece in pieces:
                self._pieces.move(piece, PieceState.UPDATED)
                self._thread.run(partial(self._update_waiting, piece))
            if pieces:
                self._close_all()  # also where a piece without a gradient is left as it is
                if after is not None:
                    after(self._units[key])

    def _replaces(self, unit: Unit, pieces: Sequence[Piece]) -> bool:
        """Whether updating `pieces` leaves nothing of the unit's weights, which come from masters of their own."""
        whole = len(pieces) == len(unit.pieces) and not unit.frozen_numel and not self.layout.own_masters
        return whole and all(part.key in self._arrived or self._zeroes(part) for part in unit.parts)

    def _close_all(self) -> None:
        self._thread.drain()
        for key in self._pieces.open_units:
            self._thread.run(partial(self._close_unit, key))

    def _close_without_writing(self) -> None:
        """After an error: backward may be waiting for one of these slots."""
        for key in self._pieces.open_units:
            self._close_unit(key, write=False)

    def end_step(self) -> None:
        """All is written; begin the next one."""
        for stream in (self._states, self._weights.stream):
            if stream is not None:
                stream.flush()
                stream.release_idle()
        self._begin()

    def abandon(self) -> None:
        """Forget the step: nothing is raised, and nothing runs any more when this returns."""
        self._thread.abandon()
        self._close_without_writing()
        self._begin()

    def raise_failure(self) -> None:
        """The error of an update that has failed."""
        self._thread.raise_failure()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.close()

    # -- in the updates' thread, or in the training's after backward ---------------------------------------------------

    def _of_piece(self, piece: Piece, gradients: Gradients, ready: Any) -> Gradients:
        """Of each run's elements alone, in host memory; those of an accelerator are there when `ready` is reached."""
        own = {r.part.key: gradients[r.part.key][r.begin : r.end] for r in piece.runs if r.part.key in gradients}
        return own if self._copies is None else self._copies.on_host(own, ready)

    def _sum_beyond(self, piece: Piece, arrived: Gradients, ready: Any) -> None:
        """Of parts that go on in other pieces, which may come before the parts' first ones do."""
        for run in piece.runs:
            if run.numel == run.part.numel or run.part.key not in arrived or run.part in self.sums:
                continue
            if self._copies is None:
                self.sums.add(run.part, 0, arrived[run.part.key])
            else:
                for begin, values in self._copies.in_turn(arrived[run.part.key], ready, SUM_ELEMENTS):
                    self.sums.add(run.part, begin, values)

    def _spill(self, piece: Piece, arrived: Gradients, ready: Any, *, first: bool, last: bool) -> None:
        """Add a pass's gradients to those on the tier."""
        stream, key = self._gradients(), gradient_key(piece)
        gradients = self._of_piece(piece, arrived, ready)
        slot = stream.put(key) if first else stream.fetch([key])[0]
        place = 0
        for run in piece.runs:
            view = slot[place : place + run.numel]
            if run.part.key in gradients:
                if first:
                    view.copy_(gradients[run.part.key])
                else:
                    view.add_(gradients[run.part.key].to(view.dtype))
            elif first:
                view.zero_()
            place += run.numel
        self._let_go(arrived, piece)
        if last:
            self._count(piece, slot)
        stream.write(key)
        stream.release(key)

    def _sum(self, piece: Piece) -> None:
        stream, key = self._gradients(), gradient_key(piece)
        self._count(piece, stream.fetch([key])[0])
        stream.release(key)

    def _count(self, piece: Piece, slot: torch.Tensor) -> None:
        place = 0
        for run in piece.runs:
            if run.part.key in self._arrived:
                self.sums.add(run.part, run.begin, slot[place : place + run.numel])
            place += run.numel

    def _update_waiting(self, piece: Piece) -> None:
        key = gradient_key(piece)
        if not self._pieces.is_on_tier(piece):
            self._update(piece, {})
            return
        slot = self._gradients().fetch([key])[0]
        place, gradients = 0, {}
        for run in piece.runs:
            if run.part.key in self._arrived or self._zeroes(run.part):
                gradients[run.part.key] = slot[place : place + run.numel]
            place += run.numel
        self._update(piece, gradients)
        self._gradients().release(key)

    def _update_arrived(self, piece: Piece, arrived: Gradients, ready: Any) -> None:
        stream, key = None, gradient_key(piece)
        spilled = self._pieces.is_on_tier(piece)
        if not spilled:
            self._sum_beyond(piece, arrived, ready)
        gradients = self._of_piece(piece, arrived, ready)
        if spilled:  # earlier passes' are on the tier
            stream = self._gradients()
            slot, place = stream.fetch([key])[0], 0
            for run in piece.runs:
                view = slot[place : place + run.numel]
                if run.part.key in gradients:
                    view.add_(gradients[run.part.key].to(view.dtype))
                if run.part.key in self._arrived:
                    gradients[run.part.key] = view
                    self.sums.add(run.part, run.begin, view)
                place += run.numel
        else:
            for run in piece.runs:
                if run.part.key in gradients and run.part not in self.sums:
                    self.sums.add(run.part, 0, gradients[run.part.key])
        if self.sums.finite:
            self._update(piece, gradients)
        else:  # the step will be taken back
            self._piece_done(piece, write=False)
        self._let_go(arrived, piece)
        if stream is not None:
            stream.release(key)

    def _update(self, piece: Piece, gradients: Gradients) -> None:
        """Read states, update, write. `gradients`: of each run's elements alone."""
        assert self._states is not None
        weights = self._weights_of(piece)
        states = self._states.fetch([piece.key])[0]
        for run, places in self.layout.state_places(piece):
            gradient = gradients.get(run.part.key)
            if gradient is None and self._zeroes(run.part):
                gradient = torch.zeros(run.numel, dtype=self.layout.dtype_of("master"))
            if gradient is not None:
                of_run = {state: states[place] for state, place in places.items()}
                self.adam.step(run, run.of(weights), gradient, of_run, self.scale)
        written = self._states.write(piece.key)
        if self.arm != "optimized":
            written.wait()
        self._states.release(piece.key)
        self._piece_done(piece)

    def _weights_of(self, piece: Piece) -> torch.Tensor:
        """Its unit's slot, which stays in use until the unit is done."""
        unit = self._units[piece.unit]
        self._open_unit(piece.unit, replaced=piece.unit in self._replaced and not self._weights.is_in_use(unit))
        self._weights.stream.await_copies(piece.unit)
        return self._weights.stream.tensor(piece.unit)

    def _let_go(self, gradients: Gradients, piece: Piece) -> None:
        """A gradient counts until its last piece is done with it."""
        self._thread.let_go(sum(g.nbytes for n, g in gradients.items() if self._places[n][-1][0] is piece))

    def _open_unit(self, key: str, *, replaced: bool = False) -> None:
        """Its weights stay in memory until `_close_unit`."""
        if not self._pieces.open(key):
            return
        try:
            if replaced:
                slot, unit = self._weights.stream.put(key), self._units[key]
                slot[unit.end if unit.end == unit.numel else 0 :].zero_()  # gaps, too
            else:
                self._weights.stream.fetch([key])
        except BaseException:
            self._pieces.close(key)
            raise

    def _piece_done(self, piece: Piece, *, write: bool = True) -> None:
        self._pieces.move(piece, PieceState.WRITTEN)
        if self._pieces.is_written(self._units[piece.unit]):
            self._close_unit(piece.unit, write=write)

    def _close_unit(self, key: str, *, write: bool = True) -> None:
        if not self._pieces.close(key):
            return
        if write:
            written = self._weights.stream.write(key)
            if self.arm != "optimized":
                written.wait()
        self._weights.stream.release(key)


def gradient_key(piece: Piece) -> str:
    return f"gradient of {piece.key}"


def gradient_numel(piece: Piece, dtype: torch.dtype) -> int:
    return padded(piece.numel, dtype)

"""Optimizer updates from gradients in three schedules (LoHan IV-C); gradients that must wait are kept on the tier.

`none`       the optimizer runs after backward, as in ZeRO-Infinity: gradients wait on the tier, and each piece is read,
             updated and written before the next one.
`naive`      as a piece's gradients arrive, its states are read, updated and written, one stage after the other
             (Fig. 3a).
`optimized`  the three stages overlap: the states of the next pieces are read while one piece is updated and the one
             before it is written; a write starts after those reads have started (Fig. 3b).

Stages are synchronized by completions: states are updated when their read has ended, and their slot is reused when
their write has ended. During backward one thread does all of this on a single core, so that matrix products keep the
other cores; backward blocks while the gradients in memory exceed their limit. After backward the training thread does
the work itself.
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
from memascend.engine.pieces import Gradients, PieceState, StepPieces
from memascend.engine.square_sums import SquareSums
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.weights import WeightStream
from memascend.ops.threads import compute_alone


class Updates:
    """Gradients and optimizer updates of one model. Call all methods from the training thread; work that it need not
    wait for runs in a second thread.

    `settings(name)` returns the AdamW settings of a parameter. `gradients()` returns the stream of gradients that wait,
    and creates it on the first call. `zero_missing`: a parameter without a gradient in a step is updated with zeros, as
    in ZeRO's flat groups; otherwise it stays unchanged, as in torch.optim. `copies` copies gradients from an
    accelerator to host memory (None on the CPU).

    Why one thread and no more: reading, updating and writing of different pieces overlap, which hides the drive's
    latency, while a second AdamW thread would take cores from backward's products. Why each piece has a state
    (`StepPieces`): its gradient comes in several parts, possibly again in a later pass, and a unit's weights must not
    change while backward still computes with them. So an update waits until its piece is complete, and weights are
    written when all pieces of the unit are updated. If backward may use a piece's weights after its last gradient, the
    piece is left incomplete until the end of the unit's visit, or of the backward pass.
    """

    def __init__(
        self,
        layout: Layout,
        weights: UnitWeights,
        states: WeightStream | None,
        gradients: Callable[[], WeightStream],
        settings: Callable[[str], AdamSettings],
        *,
        arm: str,
        zero_missing: bool,
        copies: GradientCopies | None,
    ) -> None:
        self.layout, self.arm = layout, arm
        self._weights, self._states, self._gradients = weights, states, gradients
        self._zero_missing, self._copies = zero_missing, copies
        self._units = {unit.key: unit for unit in layout.units}
        self._places: dict[tuple[str, int], list[tuple[Piece, Run]]] = {}  # pieces and runs that contain a part
        for piece in layout.pieces:
            for run in piece.runs:
                self._places.setdefault(run.part.key, []).append((piece, run))
        trained = [sum(p.numel for p in unit.pieces) for unit in layout.units]
        self.most_waiting_bytes = 2 * max(trained, default=0) * layout.weights.itemsize
        self._expected: list[str] = []  # keys of pieces, in the order of the last step's updates
        self._thread = JobThread(
            "memascend-updates", compute_alone, self._close_without_writing, self.most_waiting_bytes
        )
        self.adam = AdamSteps(layout.states, settings)
        self._begin()

    def _begin(self) -> None:
        """Reset the state of the step."""
        self.sums = SquareSums()
        self.scale = 1.0  # gradients are divided by it: the loss scale, times the clipping factor once that is known
        self._pieces = StepPieces(self.layout)
        self._arrived: set[tuple[str, int]] = set()  # parts that got a gradient
        self._order: list[str] = []  # keys of pieces, in the order in which their updates began
        self.adam.begin()
        self.zeroed: frozenset[str] = frozenset()  # parameters that are updated with zeros if they get no gradient
        self._replaced: set[str] = set()  # units that the update overwrites as a whole: their weights are not read

    # -- called from the training thread -------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether any gradient has come since the last step."""
        return bool(self._arrived)

    @property
    def touched(self) -> bool:
        """Whether an update of this step has begun, so that weights and states may mix those before and after it."""
        return self._pieces.any_begun

    @property
    def arrived(self) -> set[str]:
        """Names of the parameters that have received a gradient in this step."""
        return {name for name, _ in self._arrived}

    @property
    def failure_was_raised(self) -> bool:
        """Whether an update has failed and its error has been raised in the training thread."""
        return self._thread.failure_was_raised

    def expect(self) -> None:
        """Read ahead the states that backward, which is about to begin, will need first."""
        if self.arm == "optimized" and self._states is not None and self._expected and not self.touched:
            self._states.read_ahead(self._expected)

    def arrive(
        self, part: Part, gradient: torch.Tensor, *, wait: bool, last: bool, is_needed: Callable[[str], bool]
    ) -> None:
        """Take ownership of a part's gradient. `wait`: it goes to the tier; otherwise it is used at once. `last`: it is
        the last one of this parameter in this step. `is_needed(key)`: whether this pass has yet to recompute a unit.
        Blocks while too many bytes of gradients are in memory.

        Raises the error of an update that has failed, and NotStreamable for a second gradient in one backward pass.
        """
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
                unit = self._units[piece.unit]
                if wait or not (is_needed(unit.key) or self._weights.is_shared(unit, piece)):
                    self._complete(piece, wait=wait, last=last)

    def _complete(self, piece: Piece, *, wait: bool, last: bool) -> None:
        """Submit the next stage of a piece that has all gradients of this pass: spill them, or update it."""
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
        """Begin a piece's update; if its unit's weights are in memory, keep them until all its pieces are updated."""
        self._pieces.move(piece, PieceState.UPDATED)
        self._order.append(piece.key)
        if self._weights.is_in_use(self._units[piece.unit]):
            self._open_unit(piece.unit)

    def has_begun(self, unit: Unit) -> bool:
        """Return whether an update of the unit's weights has begun in this step."""
        return any(map(self._pieces.has_begun, unit.pieces))

    def end_unit(self, unit: Unit, *, wait: bool, last: bool) -> None:
        """Process the rest of a unit that backward has passed: pieces with some gradients are treated as complete, and
        pieces without any are finished, so that the unit's slot can be freed. If no gradient came at all
        (torch.autograd.grad of activations), the sums of earlier passes stay on the tier, since more may come."""
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
        """Return whether a part that got no gradient is updated with zeros."""
        return self._zero_missing or part.name in self.zeroed

    def _has_zeros(self, piece: Piece) -> bool:
        """Return whether the piece is updated even if it gets no gradient."""
        return self._zero_missing or (bool(self.zeroed) and any(run.part.name in self.zeroed for run in piece.runs))

    def _has_come(self, piece: Piece) -> bool:
        return self._pieces.state(piece) is PieceState.ARRIVED

    def _idle(self, piece: Piece) -> None:
        """Finish a piece that got no gradient and will not get one."""
        if self._pieces.is_open(piece.unit):
            self._pieces.move(piece, PieceState.UPDATED)
            self._thread.submit(lambda: self._piece_done(piece))

    def end_pass(self, *, wait: bool, last: bool) -> None:
        """Process, at the end of a backward pass, the gradients of pieces that are still incomplete."""
        if wait or not self._zero_missing:  # with zeros, `finish_direct` completes the rest
            for piece in filter(self._has_come, self.layout.pieces):
                self._complete(piece, wait=wait, last=last)

    def finish_direct(self) -> None:
        """Update the remaining pieces after the last pass, where gradients do not wait, and wait for all updates.

        All writes are submitted on return; with the arm `optimized` they may still be in flight (see `end_step`)."""
        for unit in self.layout.units:
            left = [piece for piece in unit.pieces if not self._pieces.has_begun(piece)]
            wanted = [p for p in left if self._has_zeros(p) or self._has_come(p) or self._pieces.is_on_tier(p)]
            for piece in wanted:
                self._complete(piece, wait=False, last=True)
            if wanted:  # free the unit's slot, whether or not its other pieces got a gradient
                self._thread.submit(partial(self._close_unit, unit.key))
        self._close_all()  # units with pieces that got no gradient
        self._expected = list(self._order)

    def sum_waiting(self) -> None:
        """Compute the sums of squares of all gradients on the tier; complete on return."""
        for piece in self.layout.pieces:
            if self._pieces.state(piece) is PieceState.SPILLED:
                self._pieces.move(piece, PieceState.SUMMED)
                self._thread.run(partial(self._sum, piece))
        self._thread.drain()

    def waiting_facts(self) -> dict[str, Any]:
        """Return the facts (JSON) that `take_up` needs in addition to the gradients on the tier."""
        numbers = {unit.key: number for number, unit in enumerate(self.layout.units)}
        arrived = [
            [numbers[u.key], n] for u in self.layout.units for n, p in enumerate(u.parts) if p.key in self._arrived
        ]
        spilled = [number for number, piece in enumerate(self.layout.pieces) if self._pieces.is_on_tier(piece)]
        return {"scale": self.scale, "arrived": arrived, "spilled": spilled, "zeroed": sorted(self.zeroed)}

    def take_up(self, facts: Mapping[str, Any], settings: Mapping[str, AdamSettings]) -> None:
        """Take over the gradients on the tier from a step that an earlier process began to apply."""
        units, pieces = self.layout.units, self.layout.pieces
        self.scale = facts["scale"]
        self._arrived = {units[unit].parts[part].key for unit, part in facts["arrived"]}
        self._pieces.set_on_tier(pieces[number] for number in facts["spilled"])
        self.zeroed = frozenset(facts.get("zeroed", ()))
        self.adam.begin(settings)

    def finish_waiting(
        self, units: Sequence[Unit] | None = None, *, after: Callable[[Unit], None] | None = None
    ) -> None:
        """Update everything from the gradients on the tier, unit by unit. `units`: default all, from last to first,
        since the next forward pass needs the last ones latest. `after(unit)` is called when the writes of a unit's
        update have been submitted to the tier, before the next unit begins."""
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
        """Return whether updating `pieces` overwrites all of the unit's weights, from separate master weights."""
        whole = len(pieces) == len(unit.pieces) and not unit.frozen_numel and not self.layout.own_masters
        return whole and all(part.key in self._arrived or self._zeroes(part) for part in unit.parts)

    def _close_all(self) -> None:
        """Wait for all submitted work, and close the units that are still open."""
        self._thread.drain()
        for key in self._pieces.open_units:
            self._thread.run(partial(self._close_unit, key))

    def _close_without_writing(self) -> None:
        """Free the slots of open units after an error, since backward may be waiting for one of them."""
        for key in self._pieces.open_units:
            self._close_unit(key, write=False)

    def end_step(self) -> None:
        """Wait for all writes, release idle buffers, and begin the next step."""
        for stream in (self._states, self._weights.stream):
            if stream is not None:
                stream.flush()
                stream.release_idle()
        self._begin()

    def abandon(self) -> None:
        """Discard the step. Raises nothing; no update is running on return."""
        self._thread.abandon()
        self._close_without_writing()
        self._begin()

    def raise_failure(self) -> None:
        """Raise the error of an update that has failed, if any."""
        self._thread.raise_failure()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.close()

    # -- run in the update thread during backward, and in the training thread after it ---------------------------------

    def _of_piece(self, piece: Piece, gradients: Gradients, ready: Any) -> Gradients:
        """Return the gradients of the piece's own runs, in host memory; those of an accelerator are copied after the
        event `ready`."""
        own = {r.part.key: gradients[r.part.key][r.begin : r.end] for r in piece.runs if r.part.key in gradients}
        return own if self._copies is None else self._copies.on_host(own, ready)

    def _sum_beyond(self, piece: Piece, arrived: Gradients, ready: Any) -> None:
        """Sum the squares of parts that span several pieces: their pieces may be updated in any order, while sums are
        taken from a part's first element on, so that all of a part is summed with its first piece."""
        for run in piece.runs:
            if run.numel == run.part.numel or run.part.key not in arrived or run.part in self.sums:
                continue
            if self._copies is None:
                self.sums.add(run.part, 0, arrived[run.part.key])
            else:
                for begin, values in self._copies.in_turn(arrived[run.part.key], ready, SUM_ELEMENTS):
                    self.sums.add(run.part, begin, values)

    def _spill(self, piece: Piece, arrived: Gradients, ready: Any, *, first: bool, last: bool) -> None:
        """Add the gradients of this pass to those on the tier."""
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
        """Add the squares of a piece's gradients on the tier."""
        stream, key = self._gradients(), gradient_key(piece)
        self._count(piece, stream.fetch([key])[0])
        stream.release(key)

    def _count(self, piece: Piece, slot: torch.Tensor) -> None:
        """Add the squares of the parts in a gradient slot that got a gradient."""
        place = 0
        for run in piece.runs:
            if run.part.key in self._arrived:
                self.sums.add(run.part, run.begin, slot[place : place + run.numel])
            place += run.numel

    def _update_waiting(self, piece: Piece) -> None:
        """Update a piece from its gradients on the tier."""
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
        """Update a piece from the gradients of this pass, plus those of earlier passes on the tier."""
        stream, key = None, gradient_key(piece)
        spilled = self._pieces.is_on_tier(piece)
        if not spilled:
            self._sum_beyond(piece, arrived, ready)
        gradients = self._of_piece(piece, arrived, ready)
        if spilled:  # the gradients of earlier passes are on the tier
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
        else:  # a gradient was infinite or NaN: the step will be rolled back
            self._piece_done(piece, write=False)
        self._let_go(arrived, piece)
        if stream is not None:
            stream.release(key)

    def _update(self, piece: Piece, gradients: Gradients) -> None:
        """Read the piece's states, update them and write them. `gradients`: flat, of the piece's own runs, by part."""
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
        """Return the slot of the piece's unit, in use until the unit is done; waits for copies of it to a device."""
        unit = self._units[piece.unit]
        self._open_unit(piece.unit, replaced=piece.unit in self._replaced and not self._weights.is_in_use(unit))
        self._weights.stream.await_copies(piece.unit)
        return self._weights.stream.tensor(piece.unit)

    def _let_go(self, gradients: Gradients, piece: Piece) -> None:
        """Stop counting the bytes of gradients whose last piece this is."""
        self._thread.let_go(sum(g.nbytes for n, g in gradients.items() if self._places[n][-1][0] is piece))

    def _open_unit(self, key: str, *, replaced: bool = False) -> None:
        """Keep a unit's weights in memory until `_close_unit`. `replaced`: they will be overwritten, so that they are
        not read."""
        if not self._pieces.open(key):
            return
        try:
            if replaced:
                slot, unit = self._weights.stream.put(key), self._units[key]
                slot[unit.end if unit.end == unit.numel else 0 :].zero_()  # padding, and gaps between parts if any
            else:
                self._weights.stream.fetch([key])
        except BaseException:
            self._pieces.close(key)
            raise

    def _piece_done(self, piece: Piece, *, write: bool = True) -> None:
        """Mark a piece as written; after its unit's last piece, write the unit's weights, unless not `write`."""
        self._pieces.move(piece, PieceState.WRITTEN)
        if self._pieces.is_written(self._units[piece.unit]):
            self._close_unit(piece.unit, write=write)

    def _close_unit(self, key: str, *, write: bool = True) -> None:
        """Write a unit's weights, unless not `write`, and end their use. No effect on a unit that is not open."""
        if not self._pieces.close(key):
            return
        if write:
            written = self._weights.stream.write(key)
            if self.arm != "optimized":
                written.wait()
        self._weights.stream.release(key)


def gradient_key(piece: Piece) -> str:
    """Return the key of a piece's waiting gradients."""
    return f"gradient of {piece.key}"


def gradient_numel(piece: Piece, dtype: torch.dtype) -> int:
    """Return the elements of a piece's gradient tensor on the tier, in whole units of direct I/O."""
    return padded(piece.numel, dtype)

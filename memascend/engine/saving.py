"""Saves in the background: a thread copies a snapshot of the tier into files, through one small buffer.

A tensor of the tier contains parts of many tensors of a save, and tensors are copied in the order in which the next
step will overwrite them; so the files are written in parts (`memascend.storage.tensor_parts`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memascend.engine.frozen import frozen_key
from memascend.engine.layout import Layout, Part, Piece, Run, Unit, numel_of_state
from memascend.engine.snapshot import Snapshot
from memascend.engine.state_store import StateStore
from memascend.storage import interrupts
from memascend.storage.byte_views import byte_view
from memascend.storage.completion import Promise, RequestCancelled
from memascend.storage.interrupts import whole
from memascend.storage.tensor_parts import TensorPartsWriter

WEIGHTS = "weights"  # a parameter's own values, in addition to the names of states


@dataclass(frozen=True)
class Target:
    """A tensor in a file that is being written."""

    file: TensorPartsWriter
    name: str


# Targets by (parameter, kind), where the kind is `WEIGHTS`, "master" or a state of the layout. Others are not saved.
Targets = Mapping[tuple[str, str], Sequence[Target]]


@dataclass(frozen=True)
class Extract:
    """Bytes `begin` to `end` of a tensor on the tier, which are copied to byte `at` of a target."""

    begin: int
    end: int
    target: Target
    at: int


class Extracts:
    """The byte ranges that a save copies from each tensor on the tier."""

    def __init__(self, layout: Layout, targets: Targets) -> None:
        self._layout, self._targets = layout, targets
        self._of: dict[str, list[Extract]] = {}
        # In the order of a step's writes: the last units first, and a unit's weights after all of its pieces.
        for unit in reversed(layout.units):
            for piece in unit.pieces:
                self._add_states(piece)
            self._add_weights(unit)

    @property
    def by_key(self) -> dict[str, list[Extract]]:
        """Byte ranges by key, in the order in which a step writes the tensors."""
        return self._of

    def _add_states(self, piece: Piece) -> None:
        """Add the byte ranges of a piece's states."""
        size = self._layout.stored_states.itemsize
        for run, places in self._layout.state_places(piece):
            for state, place in places.items():
                first = numel_of_state(state, run.part.offset + run.begin)
                self._add(piece.key, place.start * size, place.stop * size, (run.part.name, state), first * size)

    def _add_weights(self, unit: Unit) -> None:
        """Add the byte ranges of a unit's weights, which are also the masters where there are no separate ones."""
        layout, size = self._layout, self._layout.weights.itemsize
        runs = [run for piece in unit.pieces for run in piece.runs] if layout.own_masters else []
        taken = [(Run(part, 0, part.numel), WEIGHTS) for part in unit.parts] + [(run, "master") for run in runs]
        for run, what in taken:
            begin, first = _first_in_unit(run), run.part.offset + run.begin
            end, trained = begin + run.numel, layout.step_numel(unit)
            # A frozen part may begin in the padding of the trained tensor, and then continues in the frozen one.
            for key, low, high in ((unit.key, 0, trained), (frozen_key(unit.key), trained, layout.unit_numel(unit))):
                lo, hi = max(begin, low), min(end, high)
                self._add(key, (lo - low) * size, (hi - low) * size, (run.part.name, what), (first + lo - begin) * size)

    def _add(self, key: str, begin: int, end: int, what: tuple[str, str], at: int) -> None:
        """Add a byte range for each target of `what` (parameter, kind), where it begins at byte `at`."""
        for target in self._targets.get(what, ()) if begin < end else ():
            self._of.setdefault(key, []).append(Extract(begin, end, target, at))


def _first_in_unit(run: Run) -> int:
    part: Part = run.part
    return part.first + run.begin


class BackgroundSave(Promise):
    """A save in progress, with `done()` and `wait()`, which returns the result of `end` or raises the save's error."""

    def __init__(
        self,
        what: str,
        store: StateStore,
        extracts: Mapping[str, Sequence[Extract]],
        buffer: torch.Tensor,
        end: Callable[[], Any],
        give_up: Callable[[BaseException], BaseException],
    ) -> None:
        """Take the snapshot and start the thread. `end` is called when all is copied; `give_up` is called with any
        error and returns the one to raise; both run in the save's own thread."""
        super().__init__(what)
        self._store, self._extracts, self._buffer, self._end, self._remove = store, extracts, buffer, end, give_up
        self._asked_to_stop = False
        self.snapshot: Snapshot = store.take_snapshot(extracts)
        self.began_s, self.took_s = time.monotonic(), 0.0
        # Not a daemon thread, so that a save is completed when the program ends.
        self._thread = threading.Thread(target=self._run, name="memascend-save")
        try:
            self._thread.start()
        except BaseException:
            self.snapshot.end()
            raise

    @property
    def waited_s(self) -> float:
        """Seconds for which writes of updates waited until the save had copied the tensors that they replace."""
        return self.snapshot.waited_s

    @property
    def was_looked_at(self) -> bool:
        """Whether the caller has waited for the end of the save or asked for its error."""
        return self._observed

    @whole
    def join(self) -> None:
        """Wait until the save has ended, successfully or not, without raising its error."""
        while self._thread.is_alive():
            interrupts.check()
            self._thread.join(interrupts.SLICE_S)

    def stop(self) -> None:
        """Cancel the save and wait for its end; its error is RequestCancelled unless it had ended before."""
        self._asked_to_stop = True
        self.join()

    def _run(self) -> None:
        """The thread's target: copy, finish the files, and settle; after an error, remove what was written."""
        value, failure = None, None
        try:
            self._copy()
            self.snapshot.end()  # updates need not wait while the files are synced to the disk
            value = self._end()
        except BaseException as error:
            failure = error
            self.snapshot.end()
            try:
                failure = self._remove(error)
            except BaseException as another:
                error.add_note(f"and what was written could not be removed: {another}")
        self.took_s = time.monotonic() - self.began_s
        for name in ("_store", "_extracts", "_buffer", "_end", "_remove"):  # free the memory that they refer to
            delattr(self, name)
        self._settle(value, failure)

    def _copy(self) -> None:
        """Copy the snapshot's tensors in the order that it gives, one buffer at a time. Raises RequestCancelled if the
        save is stopped or the store is closed."""
        done: dict[str, int] = {}  # bytes copied so far, by tensor
        key: str | None = None
        while (key := self.snapshot.next(key)) is not None:
            if self._asked_to_stop:
                raise RequestCancelled(f"{self._what} was stopped")
            size, begin = self._store.size_of(key), done.get(key, 0)
            end = min(size, begin + self._buffer.nbytes)
            self._copy_part(key, begin, end)
            done[key] = end
            if end == size:
                self.snapshot.copied(key)
        if self.snapshot.ended:
            raise RequestCancelled(f"{self._what} was cut off: the store of its tensors was closed")

    def _copy_part(self, key: str, begin: int, end: int) -> None:
        """Read bytes `begin` to `end` of a tensor on the tier, and write those that are wanted to their targets."""
        extracts = [each for each in self._extracts[key] if each.begin < end and begin < each.end]
        if not extracts:
            return
        part = self._buffer[: end - begin]
        self._store.read_part(key, part, begin)
        view = byte_view(part)
        for each in extracts:
            first, last = max(begin, each.begin), min(end, each.end)
            each.target.file.put(each.target.name, each.at + first - each.begin, view[first - begin : last - begin])

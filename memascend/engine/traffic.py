"""Bytes that a step reads and writes, and bytes that its folder takes, computed from a layout and options alone.

A plan uses these to predict the traffic of a run, without weights or files. The counts are those of a steady step: the
first step reads more, since it does not know the order of the blocks yet. Which weights are still in memory when they
are needed again is not computed by a formula: the same `WeightStream` as in a run goes through a step, over a storage
that only counts.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from memascend.engine.buffers import weight_classes
from memascend.engine.in_place_update import bytes_of
from memascend.engine.layout import Kind, Layout, Piece, Unit, padded
from memascend.engine.matrices import SLICES_AHEAD
from memascend.engine.model_units import ModelUnits
from memascend.engine.options import EngineOptions
from memascend.engine.state_files import control_bytes
from memascend.engine.weights import WeightStream
from memascend.memory.pinned import CountingAllocator
from memascend.memory.pools import AdaptiveBufferPool
from memascend.storage.completion import Completion, Promise
from memascend.storage.engine_tiers import scratch_file_bytes

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
WEIGHTS, STATES, GRADIENTS, INPUTS, RECORDS = "weights", "states", "gradients", "inputs of blocks", "records"
_STEP = 1000  # a number of steps with as many digits as most have


class MatrixUse(NamedTuple):
    """Uses of a matrix that is streamed in slices: as an embedding, a head, or both (tied)."""

    embedding: bool
    head: bool

    @property
    def tied(self) -> bool:
        return self.embedding and self.head


def matrix_uses(units: ModelUnits) -> dict[str, MatrixUse]:
    """Return the uses of a model's sliced matrices, by key."""
    kinds = {key: {type(module) for module in units.modules[key]} for key in units.matrices}
    return {key: MatrixUse(torch.nn.Embedding in found, torch.nn.Linear in found) for key, found in kinds.items()}


@dataclass
class Traffic:
    """Bytes read and written in one step, each by (phase, kind of data)."""

    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    written: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total_read(self) -> int:
        return self.read.total()

    @property
    def total_written(self) -> int:
        return self.written.total()

    @property
    def total(self) -> int:
        return self.total_read + self.total_written

    def written_by_kind(self) -> dict[str, int]:
        """Return the bytes written by kind of data, summed over the phases."""
        sums: Counter[str] = Counter()
        for (_, what), nbytes in self.written.items():
            sums[what] += nbytes
        return dict(sums)

    def of_phases(self, moved: Mapping[tuple[str, str], int]) -> dict[str, int]:
        """Return the bytes of `read` or `written` by phase."""
        return {phase: sum(nbytes for (when, _), nbytes in moved.items() if when == phase) for phase in PHASES}


def step_traffic(
    layout: Layout,
    options: EngineOptions,
    *,
    input_numel: int = 0,
    uses: Mapping[str, MatrixUse] | None = None,
    facts_bytes: int = 0,
    side_by_side: bool = False,
) -> Traffic:
    """Return the traffic of a steady step in which every trained parameter gets a gradient and every slice of an
    embedding is used. `options.clip` counts as in a step whose gradients wait for their norm (see `speculation`).

    `options.versions`: None counts as two. `input_numel`: elements of a block's input (its hidden states). `uses`: uses
    of sliced matrices, by `Unit.matrix` (default: heads). `facts_bytes`: size of the JSON that the loop keeps with each
    step. `side_by_side`: all micro-batches pass a unit of weights before any of them moves on to the next, so that
    weights and gradients take the traffic of one pass. Swapped results inside of blocks (`options.swap`) are decided
    during a run and not included.
    """
    made, passes, uses = Traffic(), options.accumulate, uses or {}
    if side_by_side:
        options = replace(options, accumulate=1)
    if layout.units:
        _add_weights(made, layout, options, uses)
    for unit in layout.units:
        if unit.trained:
            _add_update(made, layout, options, unit)
    _add_gradients(made, layout, options, uses, passes)
    if options.checkpoints == "tier":
        inputs = passes * len(_blocks(layout)) * padded(input_numel, layout.weights) * layout.weights.itemsize
        made.written[FORWARD, INPUTS] += inputs
        made.read[BACKWARD, INPUTS] += inputs
    made.written[OPTIMIZER, RECORDS] += sum(_record_bytes(layout, options, facts_bytes))
    return made


def _blocks(layout: Layout) -> list[Unit]:
    return [unit for unit in layout.units if unit.kind is Kind.BLOCK]


def _update_phase(options: EngineOptions) -> str:
    """Return the phase in which states are updated."""
    return OPTIMIZER if options.waits else BACKWARD


def _add_weights(made: Traffic, layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse]) -> None:
    """Count reads of weights by replaying the passes that differ: the first, one in the middle, and the last."""
    replayed = _Replay(layout, options, uses)
    passes = min(options.accumulate, 3)
    for number in range(passes):
        times = options.accumulate - 2 if passes == 3 and number == 1 else 1
        forward, backward = replayed.one_pass(last=number == passes - 1)
        made.read[FORWARD, WEIGHTS] += times * forward
        made.read[BACKWARD, WEIGHTS] += times * backward
    made.read[OPTIMIZER, WEIGHTS] += replayed.update()


class _Replay:
    """A replay of a step's requests for weights, with the stream and the slots of a run."""

    def __init__(self, layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse]) -> None:
        self._layout, self._options = layout, options
        self._storage = _Counting()
        classes = weight_classes(layout, options.blocks_in_flight)
        pool = AdaptiveBufferPool(classes, layout.weights, CountingAllocator("page_aligned"))
        self._stream = WeightStream(self._storage, pool=pool)
        for unit in layout.units:
            self._stream.register(unit.key, layout.unit_numel(unit))
        self._blocks = [unit.key for unit in _blocks(layout)]
        self._resident = [unit.key for unit in layout.units if unit.kind is Kind.RESIDENT]
        self._looked_up = [[unit.key] for unit in layout.units if unit.kind is Kind.LOOKED_UP]
        self._heads: list[list[str]] = []  # keys of slices, by matrix
        for matrix, slices in itertools.groupby(layout.units, key=lambda unit: unit.matrix):
            use, keys = uses.get(matrix, MatrixUse(embedding=False, head=True)), [unit.key for unit in slices]
            self._looked_up += [keys] if matrix and use.embedding else []
            self._heads += [keys] if matrix and use.head else []
        self._kept: list[str] = []

    def one_pass(self, *, last: bool) -> tuple[int, int]:
        """Return the bytes read in forward and in backward. The backward of the `last` pass includes the reads for
        updates of looked-up weights, if gradients do not wait."""
        before = self._storage.read_bytes
        self._stream.read_ahead([*self._blocks, *reversed(self._blocks)])
        self._visit(*self._looked_up, self._blocks)
        if not self._kept:
            self._stream.fetch(self._resident)  # kept until the last backward pass has ended
            self._kept = self._resident
        self._visit(*self._heads)
        between = self._storage.read_bytes
        self._visit(*self._heads, self._blocks[::-1])
        if last:
            for key in self._kept:
                self._stream.release(key)
            self._kept = []
            trained = {unit.key for unit in self._layout.units if unit.trained}
            for keys in self._looked_up if not self._options.waits else ():  # fetched again when their gradients come
                self._visit([key for key in keys if key in trained])
        return between - before, self._storage.read_bytes - between

    def update(self) -> int:
        """Return the bytes read after backward: of weights that are not entirely overwritten from masters."""
        before = self._storage.read_bytes
        for unit in reversed(self._layout.units):
            if self._options.waits and unit.trained and (self._layout.own_masters or unit.frozen_numel):
                self._visit([unit.key])
        self._stream.release_idle()
        return self._storage.read_bytes - before

    def _visit(self, *each: Sequence[str]) -> None:
        """Fetch and release one tensor after the other, with the prefetches that a run makes for slices."""
        for keys in each:
            for number, key in enumerate(keys):
                self._stream.fetch([key])
                if keys in self._heads or keys in self._looked_up:
                    self._stream.prefetch(keys[number + 1 : number + 1 + SLICES_AHEAD])
                self._stream.release(key)


def _add_update(made: Traffic, layout: Layout, options: EngineOptions, unit: Unit) -> None:
    """Count the reads and writes of a unit's states, and the writes of its weights."""
    phase, element = _update_phase(options), layout.weights.itemsize
    states = sum(map(layout.states_numel, unit.pieces)) * layout.stored_states.itemsize
    made.read[phase, STATES] += states
    made.written[phase, STATES] += states
    made.written[phase, WEIGHTS] += layout.step_numel(unit) * element


def _add_gradients(
    made: Traffic, layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse], batches: int
) -> None:
    """Count gradients that wait on the tier: for the whole step, for its other passes, or, in each of the micro-batches
    (`batches`), for a matrix's other use."""
    passes = options.accumulate
    every = sum(_gradient_bytes(piece, options) for piece in layout.pieces)
    made.written[BACKWARD, GRADIENTS] += every * (passes if options.waits else passes - 1)
    made.read[BACKWARD, GRADIENTS] += every * (passes - 1)
    made.read[OPTIMIZER, GRADIENTS] += every if options.waits else 0
    first = batches * sum(_of_first_uses(layout, options, uses))
    made.written[BACKWARD, GRADIENTS] += first
    made.read[BACKWARD, GRADIENTS] += first


def _gradient_bytes(piece: Piece, options: EngineOptions) -> int:
    """Return the bytes of a piece's gradients on the tier."""
    return padded(piece.numel, options.gradients) * options.gradients.itemsize


def _of_first_uses(layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse]) -> Iterator[int]:
    """Yield the bytes of gradients of sliced tied heads, which wait for those of the embedding in the same pass."""
    for unit in layout.units:
        if unit.kind is Kind.SLICE and unit.matrix in uses and uses[unit.matrix].tied:
            yield from (_gradient_bytes(piece, options) for piece in unit.pieces)


def gradients_wait(layout: Layout, options: EngineOptions, uses: Mapping[str, MatrixUse] | None = None) -> bool:
    """Return whether any gradient goes through the tier, so that buffers for it are needed."""
    return options.waits or options.accumulate > 1 or any(_of_first_uses(layout, options, uses or {}))


def auxiliary_tensor_bytes(
    layout: Layout,
    options: EngineOptions,
    *,
    input_numel: int = 0,
    uses: Mapping[str, MatrixUse] | None = None,
    side_by_side: bool = False,
) -> list[int]:
    """Return the bytes of each tensor in the auxiliary file, in the order of their creation; empty if there is no such
    file."""
    inputs = []
    if options.checkpoints == "tier" and input_numel:
        inputs = [padded(input_numel, layout.weights) * layout.weights.itemsize] * len(_blocks(layout))
    found = [*inputs]
    found += _of_first_uses(layout, options, uses or {})
    if (options.waits or options.accumulate > 1) and not options.redoes:
        found += [
            _gradient_bytes(piece, options) for unit in _as_gradients_come(layout, uses or {}) for piece in unit.pieces
        ]
    if side_by_side:  # from the second step on: in the first one, micro-batches run one after the other
        found += [*inputs, *_of_first_uses(layout, options, uses or {})] * (options.accumulate - 1)
    return found


def _as_gradients_come(layout: Layout, uses: Mapping[str, MatrixUse]) -> list[Unit]:
    """Return the units in the order of their gradients: from head and norm through the blocks to the embeddings."""
    looked_up = [u for u in layout.units if u.kind is Kind.LOOKED_UP or (u.matrix in uses and uses[u.matrix].embedding)]
    blocks = _blocks(layout)
    first = [unit for unit in layout.units if unit not in blocks and unit not in looked_up]
    return [*first, *reversed(blocks), *looked_up]


def folder_bytes(
    layout: Layout,
    options: EngineOptions,
    *,
    input_numel: int = 0,
    uses: Mapping[str, MatrixUse] | None = None,
    side_by_side: bool = False,
) -> int:
    """Return the bytes that the store's folder takes on its disk during training: the file of the states, the auxiliary
    file, and the control file of each."""
    versions = options.versions or 2
    states = bytes_of(layout, versions, options.gradients, options.state_slots, redo=options.redo)
    auxiliary = auxiliary_file_bytes(layout, options, input_numel=input_numel, uses=uses, side_by_side=side_by_side)
    return states + control_bytes(states) + auxiliary


def auxiliary_file_bytes(
    layout: Layout,
    options: EngineOptions,
    *,
    input_numel: int = 0,
    uses: Mapping[str, MatrixUse] | None = None,
    side_by_side: bool = False,
) -> int:
    """Return the bytes of the auxiliary file (gradients that wait, inputs of blocks) and of its control file."""
    found = auxiliary_tensor_bytes(layout, options, input_numel=input_numel, uses=uses, side_by_side=side_by_side)
    return scratch_file_bytes(found) if found else 0


def _record_bytes(layout: Layout, options: EngineOptions, facts_bytes: int) -> Iterator[int]:
    """Yield, for each commit of a step, the bytes of its JSON record (`StreamingEngine._record`,
    `in_place_update.Redo`)."""
    count = len(layout.order)
    record = _json({"steps": [_STEP] * count, "versions": options.versions or 2}) + facts_bytes
    if options.redoes:
        arrived = [[n, m] for n, unit in enumerate(layout.units) for m, part in enumerate(unit.parts) if part.trained]
        of_step = {"of": [0] * count, "arrived": arrived, "spilled": list(range(len(layout.pieces)))}
        done = record + _json(of_step)
        yield done
        for unit in layout.units:
            if unit.trained:
                done += len(unit.key) + len('"", ')
                yield done
    elif options.replaces_without_redo:
        yield record  # the mark that the states are partial
    yield record


def _json(what: object) -> int:
    return len(json.dumps(what))


class _Counting:
    """A storage that only counts the bytes of reads, which are done at once."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        self.read_bytes += tensor.nbytes
        done = Promise(f"read of {key}")
        done.set_result()
        return done

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        raise AssertionError("nothing is written where reads are counted")

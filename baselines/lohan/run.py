"""A workload as the streaming engine would train it: options, layout, traffic of a step, and size of the folder.

It uses the engine's own modules (`memascend.engine.layout`, `.traffic`), so that a plan and a run agree.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.baselines.lohan.options import options_of, runs_side_by_side
from memascend.engine.layout import Kind, Layout, UnitParameters, make_layout
from memascend.engine.options import EngineOptions
from memascend.engine.speculation import as_they_come, break_even
from memascend.engine.traffic import (
    GRADIENTS,
    INPUTS,
    RECORDS,
    MatrixUse,
    Traffic,
    auxiliary_tensor_bytes,
    folder_bytes,
    gradients_wait,
    step_traffic,
)
from memascend.planner.footprint import TORCH_DTYPES
from memascend.planner.step import IoVolume

if TYPE_CHECKING:
    from memascend.planner.tensors import TensorSpec
    from memascend.planner.workload import Workload


@dataclass(frozen=True)
class PlannedRun:
    """The layout and engine options of a run; `uses` says how the matrices that are cut into slices are used."""

    layout: Layout
    uses: dict[str, MatrixUse]
    options: EngineOptions
    input_numel: int  # elements of a block's input
    side_by_side: bool  # whether all micro-batches of a step pass a unit of weights before the next unit

    @property
    def speculates(self) -> bool:
        """Whether gradients can be used before their norm is known as long as few steps are clipped."""
        return as_they_come(self.options, self.layout.weights) is not None

    @property
    def break_even(self) -> float:
        """Fraction of clipped steps from which on gradients wait for their norm."""
        options = replace(self.options, accumulate=1) if self.side_by_side else self.options
        return break_even(self.layout, options, input_numel=self.input_numel, uses=self.uses)

    def traffic(self, *, waiting: bool = False) -> Traffic:
        """Return the traffic of a step without clipping, in the steady state.

        It includes the facts that `memascend train` stores with each step. With `waiting`, gradients wait for their
        norm even if that is not necessary.
        """
        options = None if waiting else as_they_come(self.options, self.layout.weights)
        return step_traffic(self.layout, options or self.options, facts_bytes=_facts_bytes(), **self._sizes)

    def folder_bytes(self) -> int:
        """Return the size of the states' folder in bytes."""
        return folder_bytes(self.layout, self.options, **self._sizes)

    @property
    def gradients_wait(self) -> bool:
        """Whether all gradients of an unclipped step wait on the SSD until the last one has arrived."""
        return gradients_wait(self.layout, self.options, self.uses)

    @property
    def inputs_wait(self) -> bool:
        """Whether the inputs of blocks wait on the SSD for backward."""
        return self.options.checkpoints == "tier" and bool(self.input_numel)

    @property
    def has_auxiliary_file(self) -> bool:
        """Whether waiting tensors need a file in addition to that of the states."""
        return bool(auxiliary_tensor_bytes(self.layout, self.options, **self._sizes))

    @property
    def _sizes(self) -> dict[str, Any]:
        """Arguments that the functions of `memascend.engine.traffic` have in common."""
        return {"input_numel": self.input_numel, "uses": self.uses, "side_by_side": self.side_by_side}


def run_of(work: Workload) -> PlannedRun:
    """Return the planned run of a workload. The `state_versions` value `auto` counts as two versions."""
    layout, uses = layout_of(work)
    inputs = work.batch * work.context * work.spec.hidden
    return PlannedRun(layout, uses, options_of(work), inputs, runs_side_by_side(work))


def volume_of(work: Workload) -> IoVolume:
    """Return the bytes that a step reads and writes, and the size of the states' folder."""
    run = run_of(work)
    moved = run.traffic()
    inputs = sum(nbytes for (_, what), nbytes in moved.written.items() if what == INPUTS)
    return IoVolume(
        read_bytes=moved.of_phases(moved.read),
        write_bytes=moved.of_phases(moved.written),
        stored_bytes=run.folder_bytes(),
        # With `ssd`, the plan counts all activations that blocks save, in place of the inputs alone.
        activation_bytes=0 if work.stack.checkpointing == "ssd" else inputs,
    )


def stored_in(versions: str, work: Workload) -> int:
    """Return the size of the states' folder in bytes for the `state_versions` value `versions`."""
    return run_of(replace(work, state_versions=versions)).folder_bytes()


def layout_of(work: Workload) -> tuple[Layout, dict[str, MatrixUse]]:
    """Derive, from the names of the tensors, the layout that a run finds in the model's modules."""
    return _layout_of(tuple(work.spec.tensors()), work.spec.tied, work.dtype, work.kept_states)


@functools.lru_cache(maxsize=16)
def _layout_of(
    tensors: tuple[TensorSpec, ...], tied: bool, dtype: str, states: str
) -> tuple[Layout, dict[str, MatrixUse]]:
    """Return the layout and the uses of sliced matrices; cached, since a plan asks many times for one model."""
    modules: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
    kinds: dict[str, Kind] = {}
    matrices: dict[str, str] = {}
    uses: dict[str, MatrixUse] = {}
    for tensor in tensors:
        module = tensor.name.rpartition(".")[0]
        key = f"block {tensor.block}" if tensor.block is not None else module
        looked_up = ("embed" in module or module.endswith(("wte", "wpe"))) and len(tensor.shape) == 2
        shared = tied and tensor is tensors[0]
        outside = Kind.LOOKED_UP if looked_up and not shared else Kind.RESIDENT
        kinds[key] = outside if tensor.block is None else Kind.BLOCK
        modules.setdefault(key, []).append((tensor.name, tensor.shape, True))
        if tensor.block is None and len(tensor.shape) == 2:  # embeddings, and the head
            matrices[key] = tensor.name
            uses[key] = MatrixUse(embedding=looked_up, head=shared or not looked_up)
    layout = make_layout(
        [
            UnitParameters(key=key, kind=kinds[key], parameters=parts, rows_of=matrices.get(key))
            for key, parts in modules.items()
        ],
        [(tensor.name, tensor.numel) for tensor in tensors],
        weights=TORCH_DTYPES[dtype],
        states=TORCH_DTYPES[states],
    )
    return layout, uses


@functools.cache
def _facts_bytes() -> int:
    """Return the bytes of the facts that a run stores with each step, mostly the states of random generators."""
    from memascend.training import random_state

    seen = {"steps": 1 / 3, "clipped": 1 / 3}
    counters = {"adam_step": 1000, "skipped_steps": 0, "loss_scaler": {}, "clipping": seen}
    return len(json.dumps({"facts": {"step": 1000, "random": random_state.as_json(), "backend": counters}}))


def writes_in_words(work: Workload) -> str:
    """Describe the bytes that a step writes, by kind, and why it writes gradients."""
    run = run_of(work)
    written = run.traffic().written_by_kind()
    parts = [
        f"{what} {nbytes / 1e9:,.1f} GB" + (f" ({_why_they_wait(run)})" if what == GRADIENTS else "")
        for what, nbytes in sorted(written.items(), key=lambda each: -each[1])
        if nbytes and what != RECORDS
    ]
    return f"written per step: {', '.join(parts)}"


def clipping_in_words(work: Workload) -> list[str]:
    """Describe the traffic of a clipped step; an empty list unless gradients are used before their norm is known."""
    run = run_of(work)
    if not run.speculates:
        return []
    calm, waiting = (run.traffic(waiting=each) for each in (False, True))
    even = f"{run.break_even:.0%}"
    return [
        f"a clipped step is repeated: {_moved(calm, waiting)} in total;",
        f"while {even} or more of the recent steps were clipped, gradients are buffered: {_moved(waiting)}",
    ]


def _moved(*steps: Traffic) -> str:
    """Describe the bytes that steps read and write, summed."""
    read, written = sum(step.total_read for step in steps), sum(step.total_written for step in steps)
    return f"{read / 1e9:,.1f} GB read and {written / 1e9:,.1f} GB written"


def _why_they_wait(run: PlannedRun) -> str:
    """Return the reason for which gradients are on the SSD, the decisive one first."""
    options = run.options
    clips = options.clip > 0 and not run.speculates
    whys = {
        "buffered until their norm is known; not with --clip 0": clips and not options.redoes and options.arm != "none",
        "so that a step can be repeated": options.redoes,
        "buffered until all batches of a step are done": options.accumulate > 1 and not run.side_by_side,
        "the optimizer comes after backward": options.arm == "none",
    }
    return next((why for why, holds in whys.items() if holds), "of the tied head")

"""LoHan on the streaming engine: weights, gradients and optimizer states on the SSD, one device."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.arrangements import Arrangement
from memascend.baselines.lohan.footprint import footprint
from memascend.baselines.lohan.options import SWAPPING_ARMS, VERSIONS, runs_side_by_side
from memascend.baselines.lohan.schedule import gradients_wait, schedule
from memascend.baselines.protocol import PlannedSystem
from memascend.memory.budget import parse_bytes
from memascend.training.backends import STREAMING, Setup

if TYPE_CHECKING:
    from memascend.planner.step import IoVolume
    from memascend.planner.workload import Workload
    from memascend.training.config import TrainConfig

GIB = 1 << 30


def _arm(variant: str) -> Arrangement:
    label = f"LoHan ({variant})" if variant else "LoHan"
    # `verify` compares with our norm and AdamW. Buffers have their exact size and use the direct engine.
    return Arrangement(
        label=label,
        parts={"numerics": "fast"},
        pinned="page_aligned",
        swapped="page_aligned",
        pool="adaptive",
        overflow="fused",
        direct=True,
        int8_states=True,
    )


_ARMS = {
    "optimized": _arm(""),
    "as_published": _arm("Algorithm 1"),
    "released": _arm("swaps as released"),
    "naive": _arm("naive"),
    "none": _arm("optimizer after backward"),
}


class LoHan(PlannedSystem):
    """LoHan in one process; the states are in a folder of their own, separate from the run's swap files."""

    accumulates_vertically = True
    computes_in_its_buffers = True  # on a CPU, weights are used in the buffers into which they were read

    def refuse(self, config: TrainConfig) -> None:
        """Raise ValueError for several ranks, other places than one drive, and options that the engine does not
        support."""
        if config.ranks > 1:
            raise ValueError(f"system 'lohan' is one process, not {config.ranks}: leave --ranks out, or use another")
        if config.devices:
            raise ValueError("system 'lohan' keeps its states in a file so far: leave --devices out, and name --nvme")
        if config.tiers:
            raise ValueError("system 'lohan' keeps its states on one drive: leave --tiers out, and name --nvme")
        if config.checkpointing not in ("offloaded", "plain", "ssd"):
            raise ValueError(
                f"system 'lohan' recomputes its blocks, and checkpointing {config.checkpointing!r} does not fit: set "
                "offloaded (their inputs wait on the SSD), plain (on the device) or ssd (results inside of them, too, "
                "as far as that is faster)"
            )
        if config.checkpointing == "ssd" and config.arm in SWAPPING_ARMS:
            raise ValueError(
                f"arm {config.arm!r} decides by itself what goes to the SSD: leave checkpointing as it is (offloaded)"
            )
        if config.activation_policy() is not None:
            raise ValueError("system 'lohan' decides by products, not by blocks: set activations to auto, all or bytes")
        if config.accumulation == "vertical" and (config.checkpointing == "ssd" or config.arm in SWAPPING_ARMS):
            raise ValueError(
                "accumulation 'vertical' is not done with results of blocks on the SSD: leave it out, or set "
                "checkpointing to offloaded or plain and leave the arm out"
            )
        if config.activation_writes is not None:
            raise ValueError("system 'lohan' has no limit to what activations write: leave activation_writes out")
        if config.states == "bf16" and config.dtype != "bf16":
            raise ValueError("states 'bf16' need dtype bf16: set --dtype bf16, or --states fp32")
        self.refuse_a_plan_of_states(config.placement)

    @staticmethod
    def volume(work: Workload) -> IoVolume:
        """Return the bytes that a step reads and writes, and the size of the states' folder."""
        from memascend.baselines.lohan.run import volume_of

        return volume_of(work)

    @staticmethod
    def stored_in(versions: str, work: Workload) -> int:
        """Return the bytes on the SSD for the `state_versions` value `versions`, waiting tensors included.

        `two`: two versions of the states; `one`: one version and the gradients from which a step can be repeated;
        `checkpoint`: one version and space for two units.
        """
        from memascend.baselines.lohan.run import stored_in

        return stored_in(versions, work)

    @classmethod
    def storage_notes(cls, work: Workload, space_bytes: float | None = None) -> list[str]:
        """Describe the bytes that a step writes, and how many versions of the states a run keeps and why."""
        from memascend.baselines.lohan.run import clipping_in_words, writes_in_words
        from memascend.planner.limits import within_space

        kept = within_space(work, space_bytes)
        ordered = []
        if work.accumulation > 1 and work.accumulation_order != "horizontal" and not runs_side_by_side(work):
            why = "results of blocks are on the SSD" if work.on_cpu else "vertical accumulation needs --device cpu"
            ordered = [f"counted with horizontal accumulation: {why}"]
        return [writes_in_words(kept), *ordered, *clipping_in_words(kept), *cls._versions(work, space_bytes)]

    @classmethod
    def _versions(cls, work: Workload, space_bytes: float | None) -> list[str]:
        """Return lines about the number of versions of the states, the reason for it, and the alternatives."""
        stored = {way: cls.stored_in(way, work) for way in ("two", "one", "checkpoint")}
        two, one, alone = (f"{nbytes / GIB:.2f} GiB" for nbytes in stored.values())
        again = "this costs one more write and read of the gradients per step"
        if gradients_wait(replace(work, state_versions="two")):
            again = "the gradients are on the SSD in any case: a step writes no more than with two"
        if work.state_versions == "checkpoint":
            return [
                f"one version of the states alone, as requested: {alone}; if a kill interrupts an update, training "
                f"resumes from the last checkpoint; one with the gradients to repeat a step takes {one}, two {two}"
            ]
        if work.state_versions == "one":
            return [
                f"one version of the states, with the gradients to repeat a step, as requested: {one}; two would take "
                f"{two};",
                again,
            ]
        third = (
            f"one alone: {alone}, with --state-versions checkpoint; if a kill interrupts an update, training resumes "
            "from the last checkpoint"
        )
        if work.state_versions == "auto" and space_bytes is not None and space_bytes < stored["two"]:
            return [
                f"one version of the states, with the gradients to repeat a step: {one}, because two take {two} and "
                f"{space_bytes / GIB:.2f} GiB are available;",
                f"{again};",
                third,
            ]
        return [
            f"two versions of the states: {two}; a kill at any instant loses only the current step;",
            f"one, with the gradients to repeat a step: {one}, if the disk is too small or with --state-versions one;",
            third,
        ]

    def trainer(self, config: TrainConfig, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
        """Return the streaming backend's set-up; the states are outside the swap files, so they survive a kill."""
        folder = self.states_folder(config)
        arm = config.arm or next(iter(_ARMS))
        settings: dict[str, Any] = {"folder": str(folder), "arm": "optimized" if arm in SWAPPING_ARMS else arm}
        settings["versions"] = {"auto": None, "two": VERSIONS}.get(config.state_versions, 1)
        settings["redo"] = config.state_versions != "checkpoint"
        section = config.activation_section()
        if arm in SWAPPING_ARMS or section is not None:
            amount = str(section["amount"]) if section is not None else ""
            settings["swap"] = SWAPPING_ARMS.get(arm) or ("best" if amount == "auto" else amount)
            settings["swap_room"] = _activation_bytes(config, prepared)
        return Setup(backend=STREAMING, settings=settings, swaps=False)

    @staticmethod
    def states_folder(config: TrainConfig) -> Path:
        """Return the folder of the run's states. Its name is unique among runs that share a drive.

        A run that was moved with its states, or is named by a link, finds them.
        """
        run = config.output_folder
        parent = Path(config.nvme).absolute() if config.nvme else run
        named = [
            parent / f"memascend-states-{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
            for path in (run, run.resolve())
        ]
        inside = [] if config.nvme else sorted(run.glob("memascend-states-*"))
        moved = inside if len(inside) == 1 else []
        return next((folder for folder in [*named, *moved] if folder.exists()), named[0])


def _activation_bytes(config: TrainConfig, prepared: dict[str, Any]) -> int:
    """Return the bytes of host memory for activations: --host-memory minus the plan's bytes.

    Without --host-memory it is 0, so activations go to the SSD only.
    """
    planned = prepared.get("planned_host_bytes")
    if config.host_memory is None or planned is None:
        return 0
    return max(0, parse_bytes(config.host_memory) - planned)


SYSTEM = LoHan(name="lohan", arms=_ARMS, buffers=footprint, tasks=schedule)

"""Keep, recompute or offload: what becomes of each block's activations within a memory limit (SSDTrain, Fig. 7).

The simulator decides: mixes are simulated by the schedule of a system that lets the policies of blocks be chosen, and
the fastest that fits is taken. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from memascend.activation_policy import KEEP, OFFLOAD, RECOMPUTE, ActivationPolicy
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.pieces import PIECES_PER_BLOCK, pieces
from memascend.planner.step import SAVED, step_of
from memascend.planner.step_time import step_time
from memascend.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Of the blocks in the order of forward: first those that are offloaded, which have most time to be stored, then
    those that are computed again, last those that are kept, whose backward comes first.

    Blocks of a deep model that the simulator folds share a policy. `peak_bytes`: of saved activations on one GPU.
    """

    offloaded: int
    recomputed: int
    kept: int
    seconds: float
    peak_bytes: float
    written_bytes: int

    def __str__(self) -> str:
        parts = ((self.offloaded, "to the SSD"), (self.recomputed, "recomputed"), (self.kept, "kept"))
        return ", then ".join(f"{count} {what}" for count, what in parts if count)

    @property
    def policy(self) -> ActivationPolicy:
        """As `memascend train --activations` takes it."""
        return ActivationPolicy(((OFFLOAD, self.offloaded), (RECOMPUTE, self.recomputed), (KEEP, self.kept)))


def groups_of(work: Workload) -> int:
    """How many policies there are: blocks, or folds of neighbours."""
    return (len(pieces(work)) - 2) // PIECES_PER_BLOCK


class Mixes:
    """Mixes of one work on one machine; each is simulated once."""

    def __init__(self, work: Workload, machine: MachineSpec, calibrations: Calibrations | None = None) -> None:
        self.work, self.machine, self.costs = work, machine, calibrations
        self.groups = groups_of(work)
        self.simulate = cache(self._simulate)

    def _simulate(self, offloaded: int, recomputed: int) -> Mix:
        kept = self.groups - offloaded - recomputed
        policies = (OFFLOAD,) * offloaded + (RECOMPUTE,) * recomputed + (KEEP,) * kept
        work = replace(self.work, activation_policies=policies)
        made = step_time(work, self.machine, calibrations=self.costs)
        blocks = [round(count * self.work.spec.layers / self.groups) for count in (offloaded, recomputed)]
        return Mix(
            offloaded=blocks[0],
            recomputed=blocks[1],
            kept=self.work.spec.layers - sum(blocks),
            seconds=made.seconds,
            peak_bytes=made.simulated.peak(SAVED),
            written_bytes=step_of(work, self.machine, self.costs).volume().activation_bytes,
        )

    def that_fit(self, limit_bytes: float) -> Iterator[Mix]:
        """Every mix that does, but those that cannot be the fastest: with more blocks computed again than the products
        of a step that was found already leave seconds for."""
        best = float("inf")
        for recomputed in range(self.groups + 1):
            if self.simulate(0, recomputed).seconds >= best:  # no transfers: nothing with as many is faster
                return
            for offloaded in range(self.groups - recomputed + 1):
                mix = self.simulate(offloaded, recomputed)
                if mix.peak_bytes <= limit_bytes:
                    best = min(best, mix.seconds)
                    yield mix


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`fastest` of the mixes that fit `room_bytes`, None where none does; beside it one policy for all blocks."""

    room_bytes: float
    fastest: Mix | None
    all_kept: Mix
    all_recomputed: Mix
    all_offloaded: Mix


def choose(work: Workload, machine: MachineSpec, room_bytes: float, calibrations: Calibrations | None = None) -> Choice:
    """The fastest step whose saved activations stay within `room_bytes` of one GPU; of equal seconds the one that
    writes less. Raises ValueError where the machine lacks a rate.
    """
    mixes = Mixes(work, machine, calibrations)
    found = list(mixes.that_fit(room_bytes))
    return Choice(
        room_bytes=room_bytes,
        fastest=min(found, key=lambda mix: (round(mix.seconds, 6), mix.written_bytes), default=None),
        all_kept=mixes.simulate(0, 0),
        all_recomputed=mixes.simulate(0, mixes.groups),
        all_offloaded=mixes.simulate(mixes.groups, 0),
    )


def activation_room(work: Workload, gpu_bytes: float) -> float:
    """What one GPU has left for saved activations beside weights, states and kernels."""
    from memascend.planner.gpu_memory import gpu_memory  # which imports torch

    rest = ("activations of", "logits", "activation checkpoints")
    held = gpu_memory(work).components()
    return gpu_bytes - sum(size for name, size in held.items() if not name.startswith(rest))

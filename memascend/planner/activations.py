"""The choice to keep, recompute or offload each block's activations within a memory limit (SSDTrain, Fig. 7).

Mixes of policies are simulated with the schedule of a system whose block policies can be chosen, and the fastest one
that fits is taken. This module does not import torch.
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
    """A mix of activation policies, as numbers of blocks, and the simulated step with it.

    In the order of the forward pass, the first blocks are offloaded, since they have the most time to be stored; the
    next ones are recomputed; the last ones are kept, since their backward comes first. Blocks of a deep model that the
    simulator folds together share a policy. `peak_bytes`: peak of saved activations on one GPU.
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
        """The mix in the form that `memascend train --activations` takes."""
        return ActivationPolicy(((OFFLOAD, self.offloaded), (RECOMPUTE, self.recomputed), (KEEP, self.kept)))


def groups_of(work: Workload) -> int:
    """Return the number of independent policies: that of blocks, or of groups of adjacent blocks folded together."""
    return (len(pieces(work)) - 2) // PIECES_PER_BLOCK


class Mixes:
    """The mixes of one workload on one machine; each is simulated at most once."""

    def __init__(self, work: Workload, machine: MachineSpec, calibrations: Calibrations | None = None) -> None:
        self.work, self.machine, self.costs = work, machine, calibrations
        self.groups = groups_of(work)
        self.simulate = cache(self._simulate)

    def _simulate(self, offloaded: int, recomputed: int) -> Mix:
        """Simulate the step with the first groups offloaded, the next recomputed and the rest kept."""
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
        """Yield every mix within `limit_bytes`, except those that cannot be the fastest.

        The search stops once the recomputation alone takes longer than a step already found.
        """
        best = float("inf")
        for recomputed in range(self.groups + 1):
            # Without offloading there are no transfers, so no mix with as many recomputed blocks is faster.
            if self.simulate(0, recomputed).seconds >= best:
                return
            for offloaded in range(self.groups - recomputed + 1):
                mix = self.simulate(offloaded, recomputed)
                if mix.peak_bytes <= limit_bytes:
                    best = min(best, mix.seconds)
                    yield mix


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest mix within `room_bytes` (None if none fits), and for comparison one policy for all blocks."""

    room_bytes: float
    fastest: Mix | None
    all_kept: Mix
    all_recomputed: Mix
    all_offloaded: Mix


def choose(work: Workload, machine: MachineSpec, room_bytes: float, calibrations: Calibrations | None = None) -> Choice:
    """Return the fastest mix whose saved activations stay within `room_bytes` of one GPU.

    Of equally fast mixes the one that writes less is taken. Raises ValueError if the machine lacks a required rate.
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


def bytes_for_activations(work: Workload, gpu_bytes: float) -> float:
    """Return the bytes of one GPU that are left for saved activations after weights, states and kernels."""
    from memascend.planner.gpu_memory import gpu_memory  # which imports torch

    rest = ("activations of", "logits", "activation checkpoints")
    parts = gpu_memory(work).components()
    return gpu_bytes - sum(size for name, size in parts.items() if not name.startswith(rest))

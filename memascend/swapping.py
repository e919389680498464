"""How much of the activations to swap, by LoHan's model of an iteration (its section IV-D). No torch here.

`swapped` (the paper's A_G2M) are bytes that leave the device; what does not is computed again, operator by operator in
the order of the benefit (Eq. 6). Two things differ from the print: the share on the SSD is never negative (erratum
L16), and `best` looks at every prefix, where Algorithm 1 stops at the first that is no better and never goes below what
lies between blocks (erratum L17: with an SSD-bound backward that is at once).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

GIB = 2**30
# Of the authors' released script (erratum L18): it swaps until that takes this share of the forward pass, at this rate.
RELEASED_SHARE, RELEASED_RATE = 0.3, 18.0 * GIB


@dataclass(frozen=True)
class Operator:
    """Of all blocks: FLOP to compute it again, and bytes of what it leaves."""

    name: str
    flops: float
    nbytes: float

    @property
    def benefit(self) -> float:
        """Eq. 6: FLOP that a swapped byte saves."""
        return self.flops / self.nbytes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the profiling stage measures: FLOP/s, bytes/s, and bytes of main memory for activations (MEM_avail)."""

    gpu: float
    link: float
    read: float
    write: float
    room: float = 0.0


class Traffic(Protocol):
    """What an iteration moves and computes, in bytes and FLOP. `weights`: read in forward, and again in backward."""

    @property
    def layers(self) -> int: ...

    @property
    def gpus(self) -> int:
        """That share SSDs and memory."""

    @property
    def between_blocks(self) -> float:
        """Inputs of all blocks, which are always swapped."""

    @property
    def all_activations(self) -> float: ...

    @property
    def forward_flops(self) -> float: ...

    @property
    def block_flops(self) -> float:
        """Of forward, what is computed again where nothing but the inputs is swapped."""

    @property
    def weights(self) -> float: ...

    @property
    def gradients(self) -> float: ...

    @property
    def update_read(self) -> float: ...

    @property
    def update_written(self) -> float: ...

    def operators(self) -> list[Operator]:
        """By benefit, the largest first."""


def recomputed_flops(step: Traffic, swapped: float) -> float:
    """Eq. 7: piecewise linear in what is swapped beyond A_interBlock."""
    flops, left = step.block_flops, swapped - step.between_blocks
    for each in step.operators():
        share = min(1.0, max(0.0, left / each.nbytes))
        flops -= share * each.flops
        left -= each.nbytes
    return flops


def slope(step: Traffic, swapped: float) -> float:
    """Eq. 8: minus the benefit of the operator that is swapped next."""
    at = step.between_blocks
    for each in step.operators():
        at += each.nbytes
        if swapped < at:
            return -each.benefit
    return 0.0


def on_ssd(swapped: float, room: float) -> float:
    """Eq. 3: alpha A, not below zero."""
    return max(0.0, swapped - room)


def forward_terms(step: Traffic, rates: Rates, swapped: float) -> dict[str, float]:
    """Eqs. 2 and 4: seconds of the GPU, GPU to memory, memory to GPU, SSDs; the longest is T_f."""
    spilled = on_ssd(step.gpus * swapped, rates.room)
    return {
        "GPU": step.forward_flops / rates.gpu,
        "GPU to memory": swapped / rates.link,
        "memory to GPU": step.weights / rates.link,
        "SSD": step.weights / rates.read + spilled / rates.write,
    }


def backward_terms(step: Traffic, rates: Rates, swapped: float) -> dict[str, float]:
    """Eq. 5: the optimizer's traffic is in it; the longest is T_b."""
    spilled = on_ssd(step.gpus * swapped, rates.room)
    return {
        "GPU": (2.0 * step.forward_flops + recomputed_flops(step, swapped)) / rates.gpu,
        "GPU to memory": step.gradients / rates.link,
        "memory to GPU": (step.weights + swapped) / rates.link,
        "SSD": (step.update_read + spilled) / rates.read + step.update_written / rates.write,
    }


def iteration_s(step: Traffic, rates: Rates, swapped: float) -> float:
    """Eq. 1."""
    return max(forward_terms(step, rates, swapped).values()) + max(backward_terms(step, rates, swapped).values())


def prefixes(step: Traffic) -> list[float]:
    """Bytes swapped after each block's operator, from A_interBlock to A_all."""
    found = [step.between_blocks]
    for each in step.operators():
        begin = found[-1]
        found += [begin + each.nbytes * (n + 1) / step.layers for n in range(step.layers)]
    return found


def algorithm_1(step: Traffic, rates: Rates) -> float:
    """Bytes that Algorithm 1 swaps: it stops at the first prefix that is no better, not below A_interBlock."""
    chosen, least = step.between_blocks, float("inf")
    for swapped in prefixes(step):
        seconds = iteration_s(step, rates, swapped)
        if seconds >= least:
            break
        chosen, least = swapped, seconds
    return chosen


def best(step: Traffic, rates: Rates) -> float:
    """The least volume among those with the shortest iteration."""
    return min(prefixes(step), key=lambda swapped: (iteration_s(step, rates, swapped), swapped))


def released(step: Traffic, rates: Rates) -> float:
    """What the authors' released script would swap, which looks at the forward pass alone (erratum L18)."""
    most = RELEASED_SHARE * step.forward_flops / rates.gpu * RELEASED_RATE
    return max((swapped for swapped in prefixes(step) if swapped <= most), default=step.between_blocks)


RULES: dict[str, Callable[[Traffic, Rates], float]] = {"best": best, "algorithm 1": algorithm_1, "released": released}


def case(step: Traffic, rates: Rates) -> int:
    """1: the time only grows with what is swapped; 2: it only falls; 3: it has its minimum in between."""
    chosen = best(step, rates)
    return 1 if chosen == step.between_blocks else 2 if chosen >= step.all_activations * (1 - 1e-9) else 3


def is_convex(step: Traffic, rates: Rates) -> bool:
    """Whether the iteration time is, over all prefixes: where not, the first minimum need not be the least."""
    points = [(swapped, iteration_s(step, rates, swapped)) for swapped in prefixes(step)]
    slopes = [(t1 - t0) / (a1 - a0) for (a0, t0), (a1, t1) in pairwise(points) if a1 > a0]
    return all(later >= earlier - 1e-9 * abs(earlier) - 1e-18 for earlier, later in pairwise(slopes))

"""How many bytes of activations to swap, by LoHan's model of an iteration (its section IV-D).

`swapped` (the paper's A_G2M) is the number of bytes that leave the device; the other activations are recomputed.
Operators are swapped in decreasing order of their benefit (Eq. 6). Two things differ from the printed model: the share
on the SSD is never negative (erratum L16), and `best` examines every prefix. Algorithm 1 stops at the first prefix that
is no better and never goes below the inputs of the blocks (erratum L17: with an SSD-bound backward it stops at once).
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

GIB = 2**30
# The authors' released script (erratum L18) swaps until that takes this share of the forward pass, at this rate.
RELEASED_SHARE, RELEASED_RATE = 0.3, 18.0 * GIB


@dataclass(frozen=True)
class Operator:
    """An operator, summed over all blocks: FLOP to recompute it, and bytes of its saved outputs."""

    name: str
    flops: float
    nbytes: float

    @property
    def benefit(self) -> float:
        """FLOP saved per swapped byte (Eq. 6)."""
        return self.flops / self.nbytes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates from the profiling stage: `gpu` in FLOP/s, `link`, `read` and `write` in bytes/s.

    `host_bytes` is the number of bytes of main memory available for activations (MEM_avail).
    """

    gpu: float
    link: float
    read: float
    write: float
    host_bytes: float = 0.0


class Traffic(Protocol):
    """Traffic in bytes and work in FLOP of one iteration. `weights` are read in forward and again in backward."""

    @property
    def layers(self) -> int: ...

    @property
    def gpus(self) -> int:
        """Number of GPUs that share SSDs and main memory."""

    @property
    def between_blocks(self) -> float:
        """Bytes of the inputs of all blocks, which are always swapped."""

    @property
    def all_activations(self) -> float: ...

    @property
    def forward_flops(self) -> float: ...

    @property
    def block_flops(self) -> float:
        """The part of the forward FLOP that is recomputed if only the inputs of the blocks are swapped."""

    @property
    def weights(self) -> float: ...

    @property
    def gradients(self) -> float: ...

    @property
    def update_read(self) -> float: ...

    @property
    def update_written(self) -> float: ...

    def operators(self) -> list[Operator]:
        """Return the operators by benefit, the largest first."""


def recomputed_flops(step: Traffic, swapped: float) -> float:
    """Return the recomputed FLOP (Eq. 7), piecewise linear in the bytes swapped beyond A_interBlock."""
    flops, left = step.block_flops, swapped - step.between_blocks
    for each in step.operators():
        share = min(1.0, max(0.0, left / each.nbytes))
        flops -= share * each.flops
        left -= each.nbytes
    return flops


def slope(step: Traffic, swapped: float) -> float:
    """Return the slope of `recomputed_flops` (Eq. 8): minus the benefit of the operator that is swapped next."""
    at = step.between_blocks
    for each in step.operators():
        at += each.nbytes
        if swapped < at:
            return -each.benefit
    return 0.0


def on_ssd(swapped: float, host_bytes: float) -> float:
    """Return the bytes of swapped activations that spill to the SSD (Eq. 3: alpha A), at least zero."""
    return max(0.0, swapped - host_bytes)


def forward_terms(step: Traffic, rates: Rates, swapped: float) -> dict[str, float]:
    """Return the forward seconds of each resource (Eqs. 2 and 4); the largest is T_f."""
    spilled = on_ssd(step.gpus * swapped, rates.host_bytes)
    return {
        "GPU": step.forward_flops / rates.gpu,
        "GPU to memory": swapped / rates.link,
        "memory to GPU": step.weights / rates.link,
        "SSD": step.weights / rates.read + spilled / rates.write,
    }


def backward_terms(step: Traffic, rates: Rates, swapped: float) -> dict[str, float]:
    """Return the backward seconds of each resource, optimizer traffic included (Eq. 5); the largest is T_b."""
    spilled = on_ssd(step.gpus * swapped, rates.host_bytes)
    return {
        "GPU": (2.0 * step.forward_flops + recomputed_flops(step, swapped)) / rates.gpu,
        "GPU to memory": step.gradients / rates.link,
        "memory to GPU": (step.weights + swapped) / rates.link,
        "SSD": (step.update_read + spilled) / rates.read + step.update_written / rates.write,
    }


def iteration_s(step: Traffic, rates: Rates, swapped: float) -> float:
    """Return the seconds of one iteration, T_f + T_b (Eq. 1)."""
    return max(forward_terms(step, rates, swapped).values()) + max(backward_terms(step, rates, swapped).values())


def prefixes(step: Traffic) -> list[float]:
    """Return the swapped bytes after each operator of each block, from A_interBlock to A_all."""
    found = [step.between_blocks]
    for each in step.operators():
        begin = found[-1]
        found += [begin + each.nbytes * (n + 1) / step.layers for n in range(step.layers)]
    return found


def algorithm_1(step: Traffic, rates: Rates) -> float:
    """Return the bytes that Algorithm 1 swaps: it stops at the first prefix that is no better than the previous one.

    The result is at least A_interBlock.
    """
    chosen, least = step.between_blocks, float("inf")
    for swapped in prefixes(step):
        seconds = iteration_s(step, rates, swapped)
        if seconds >= least:
            break
        chosen, least = swapped, seconds
    return chosen


def best(step: Traffic, rates: Rates) -> float:
    """Return the smallest volume among the prefixes with the shortest iteration."""
    return min(prefixes(step), key=lambda swapped: (iteration_s(step, rates, swapped), swapped))


def released(step: Traffic, rates: Rates) -> float:
    """Return the bytes that the authors' released script would swap, considering only forward (erratum L18)."""
    most = RELEASED_SHARE * step.forward_flops / rates.gpu * RELEASED_RATE
    return max((swapped for swapped in prefixes(step) if swapped <= most), default=step.between_blocks)


RULES: dict[str, Callable[[Traffic, Rates], float]] = {"best": best, "algorithm 1": algorithm_1, "released": released}


def case(step: Traffic, rates: Rates) -> int:
    """Return the case of the model: 1 if the time only grows with the swapped bytes, 2 if it only falls, 3 if its
    minimum is in between."""
    chosen = best(step, rates)
    return 1 if chosen == step.between_blocks else 2 if chosen >= step.all_activations * (1 - 1e-9) else 3


def is_convex(step: Traffic, rates: Rates) -> bool:
    """Return whether the iteration time is convex over all prefixes; if not, the first minimum may not be the global
    one."""
    points = [(swapped, iteration_s(step, rates, swapped)) for swapped in prefixes(step)]
    slopes = [(t1 - t0) / (a1 - a0) for (a0, t0), (a1, t1) in pairwise(points) if a1 > a0]
    return all(later >= earlier - 1e-9 * abs(earlier) - 1e-18 for earlier, later in pairwise(slopes))

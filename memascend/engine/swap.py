"""Traffic-aware activation swapping (LoHan, IV-D): the first iterations are profiled, then a rule decides what to swap.

The first forward pass counts FLOP and bytes of the products, operator by operator in Python, which takes several times
as long as the computation of a small block. So the seconds are those of the next pass, in which nothing is observed.

Inputs of blocks are offloaded to the tier in any case. Of the products' results inside of blocks, the chosen ones go to
host memory while there is space and to the SSD otherwise, through the activation cache; the others are recomputed.
Gradients equal those of recomputing everything, to the bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memascend.activation import ActivationCache, CacheOptions, attach_cache
from memascend.activation.host_first import HostFirst
from memascend.activation_policy import OFFLOAD
from memascend.engine.operators import Measuring, Replaying, Seen, Taken, Taking, take_off_left_over
from memascend.memory.pinned import Allocator
from memascend.storage.tier import Tier
from memascend.swapping import (
    RULES,
    Operator,
    Rates,
    algorithm_1,
    backward_terms,
    is_convex,
    iteration_s,
)

_LEAST_BYTES = 4096  # smaller results are not swapped
# Python's seconds to swap one result and bring it back. If the CPU computes, it waits for them, and LoHan's model does
# not have them: the rules are not offered results that are recomputed in less time.
_COST_S = 1e-3
_LINK_BYTES, _LINK_PASSES = 32 << 20, 3


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Profile of an iteration, in bytes and FLOP; implements `memascend.swapping.Traffic`."""

    layers: int
    between_blocks: float
    block_flops: float
    forward_flops: float
    weights: float
    gradients: float
    update_read: float
    update_written: float
    products: tuple[Operator, ...]
    gpus: int = 1

    @property
    def all_activations(self) -> float:
        """Bytes of the inputs of blocks and of all products' results."""
        return self.between_blocks + sum(each.nbytes for each in self.products)

    def operators(self) -> list[Operator]:
        """Return the products, those with the largest benefit first."""
        return sorted(self.products, key=lambda each: -each.benefit)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The bytes to swap per pass in addition to the inputs of blocks (`more_bytes`), of those that could be swapped
    (`offered_bytes`), with the seconds per iteration that LoHan's model predicts with and without them."""

    rule: str
    more_bytes: float
    offered_bytes: float
    seconds: float
    seconds_without: float
    bound: str
    first_minimum_bytes: float
    convex: bool

    def __str__(self) -> str:
        chosen = f"swaps {self.more_bytes / 2**20:.1f} of {self.offered_bytes / 2**20:.1f} MiB of products' results"
        why = f"backward is bound by {self.bound}"
        gain = f"{self.seconds:.3g} s per step by the model, {self.seconds_without:.3g} s with none"
        text = f"{chosen} ({self.rule}): {why}; {gain}"
        if not self.convex:
            text += "; not convex, so that all prefixes were looked at" if self.rule == "best" else "; not convex"
        elif self.first_minimum_bytes != self.more_bytes and self.rule == "best":
            text += f"; Algorithm 1 stops at {self.first_minimum_bytes / 2**20:.1f} MiB"
        return text


def decide(step: Iteration, rates: Rates, rule: str) -> Decision:
    """Decide how many bytes to swap. `rule`: one of `memascend.swapping.RULES`, "all", a number of bytes, or a share of
    all bytes ("50%")."""
    most = step.all_activations - step.between_blocks
    if rule in RULES:
        more = RULES[rule](step, rates) - step.between_blocks
    elif rule.endswith("%"):
        more = most * min(1.0, float(rule.removesuffix("%")) / 100)
    else:
        more = most if rule == "all" else min(most, float(rule))
    swapped = step.between_blocks + more
    terms = backward_terms(step, rates, swapped)
    slowest = max(terms, key=lambda name: terms[name])
    return Decision(
        rule=rule,
        more_bytes=more,
        offered_bytes=most,
        seconds=iteration_s(step, rates, swapped),
        seconds_without=iteration_s(step, rates, step.between_blocks),
        bound="compute" if slowest == "GPU" else slowest,
        first_minimum_bytes=algorithm_1(step, rates) - step.between_blocks,
        convex=is_convex(step, rates),
    )


def link_rate(device: torch.device) -> float:
    """Measure the bytes per second of copies to the device, or within host memory if the device is the CPU."""
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, fastest = torch.empty_like(source, device=device, pin_memory=False), 0.0
    for _ in range(_LINK_PASSES):
        begin = time.perf_counter()
        target.copy_(source)  # returns when the copy is complete
        fastest = max(fastest, _LINK_BYTES / (time.perf_counter() - begin))
    return fastest


class Swapping:
    """Activation swapping of one model. Swapped results first take up to `host_bytes` of host memory from `allocator`;
    the rest goes to the tier that `tier()` creates. Not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        rule: str,
        tier: Callable[[], Tier],
        host_bytes: int,
        allocator: Allocator,
        device: torch.device,
    ) -> None:
        self._device = device
        self.model, self._blocks, self.rule = model, list(blocks), rule
        self._tier, self._host_bytes, self._allocator = tier, host_bytes, allocator
        self.decision: Decision | None = None
        self.cache: ActivationCache | None = None
        self._undo: Callable[[], None] = lambda: None
        self._seen: dict[str, list[Seen]] = {}
        self._inputs: dict[str, int] = {}
        self._chosen: dict[str, frozenset[int]] = {}
        self._timed = False  # whether a pass has run with nothing observed

    @property
    def is_profiled(self) -> bool:
        """Whether all that the rule depends on is known: FLOP and bytes, and for a rule of the paper also seconds."""
        return bool(self.flops) and (self._timed or self.rule not in RULES)

    @property
    def flops(self) -> int:
        """FLOP of the forward passes of all blocks; 0 before the profile."""
        return sum(each.flops for products in self._seen.values() for each in products)

    def computed_again(self, key: str) -> float:
        """Return the share of a block's forward pass that backward recomputes, measured in FLOP."""
        products, chosen = self._seen.get(key, []), self._chosen.get(key, frozenset())
        left = sum(each.flops for number, each in enumerate(products) if number not in chosen)
        return left / sum(each.flops for each in products) if chosen else 1.0

    @contextlib.contextmanager
    def forward(self, key: str, inputs: Sequence[torch.Tensor]) -> Iterator[Taken]:
        """Context for a block's forward pass; yields the record of the results taken, complete at its end."""
        if self.decision is None and key not in self._seen:
            measuring = Measuring()
            with measuring.around():
                yield (taken := Taken())
            taken.names = [each.name for each in measuring.seen]
            self._seen[key] = measuring.seen
            self._inputs[key] = next((t.nbytes for t in inputs if t.is_floating_point()), 0)
        elif key in self._chosen:
            mode = Taking(self._chosen[key])
            with mode.around():
                yield mode.taken
        else:
            self._timed = True
            yield Taken()

    def backward(self, key: str, taken: Taken) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the recomputation of a block, in which results that were taken replace products."""
        return Replaying(taken, key).around() if taken.names else contextlib.nullcontext()

    def decide(self, rates: Rates, outside_share: float, **traffic: float) -> Decision:
        """Decide what to swap, once `is_profiled`. `outside_share`: forward time outside of the blocks as a
        fraction of that of the blocks; `traffic`: the other fields of `Iteration`."""
        places: dict[tuple[int, str], list[tuple[str, Seen]]] = {}
        for key, products in self._seen.items():
            for number, each in enumerate(products):
                if each.nbytes >= _LEAST_BYTES and each.flops:
                    places.setdefault((number, each.name), []).append((key, each))
        if self._device.type == "cpu" and self.rule in RULES:
            places = {at: where for at, where in places.items() if min(e.seconds for _, e in where) >= _COST_S}
        operators = {
            place: Operator(f"{place[1]} {place[0]}", sum(e.flops for _, e in where), sum(e.nbytes for _, e in where))
            for place, where in places.items()
        }
        step = Iteration(
            layers=len(self._seen),
            between_blocks=sum(self._inputs.values()),
            block_flops=self.flops,
            forward_flops=self.flops * (1.0 + outside_share),
            products=tuple(operators.values()),
            **traffic,
        )
        made = decide(step, rates, self.rule)
        order = sorted(operators, key=lambda place: -operators[place].benefit)
        self.decision = replace(made, more_bytes=self._choose(made.more_bytes, order, places))
        return self.decision

    def _choose(
        self, more: float, order: list[tuple[int, str]], places: dict[tuple[int, str], list[tuple[str, Seen]]]
    ) -> int:
        """Choose whole results, by benefit and then in the order of the blocks, up to `more` bytes; return their
        bytes."""
        chosen: dict[str, set[int]] = {}
        taken = 0
        for place in order:
            for key, each in places[place]:
                if each.nbytes > more * (1 + 1e-9):
                    continue
                more -= each.nbytes
                taken += each.nbytes
                chosen.setdefault(key, set()).add(place[0])
        self._chosen = {key: frozenset(numbers) for key, numbers in chosen.items()}
        if self._chosen:
            below = self._tier()
            tier = HostFirst(below, self._host_bytes, self._allocator) if self._host_bytes else below
            options = CacheOptions(amount="all", minimum_bytes=_LEAST_BYTES, device=self._device.type)
            policies = dict.fromkeys(self._blocks, OFFLOAD)
            self.cache = ActivationCache(tier, options, policies, allocator=self._allocator)
            self._undo = attach_cache(self.model, self.cache)
        return taken

    def close(self) -> None:
        """Detach from the model and discard everything that was swapped. Idempotent."""
        take_off_left_over()
        self._undo()
        self._undo = lambda: None
        if self.cache is not None:
            self.cache.close()

"""LoHan's own model of an iteration: Eqs. 1 to 8 and Algorithm 1, line by line (its section IV-D). No simulator in it.

A step of a GPT of L layers, width h, batch b, context s and vocabulary V: P = 12 L h^2 + V h parameters,
A_all = 34 s b h L bytes of activations, of which A_interBlock = 2 s b h L between blocks. `swapped` (A_G2M) are
bytes that leave the GPU; what does not is computed again, operator by operator in the order of the benefit (Eq. 6).
Two things differ from the print: the share on the SSD is never negative (erratum L16), and `best` looks at every
prefix, where Algorithm 1 stops at the first that is no better and never goes below A_interBlock.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Operator:
    """Of one block: FLOP to compute it again, and bytes of what it leaves."""

    name: str
    flops: float
    nbytes: float

    @property
    def benefit(self) -> float:
        """Eq. 6: FLOP that a swapped byte saves."""
        return self.flops / self.nbytes


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model of Table IV and the batch of one GPU; `gpus` of them share SSDs and memory (in the paper one)."""

    layers: int
    hidden: int
    batch: int
    context: int = 1024
    vocab: int = 50257
    gpus: int = 1

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def all_activations(self) -> float:
        return 34.0 * self.tokens * self.hidden * self.layers

    @property
    def between_blocks(self) -> float:
        return 2.0 * self.tokens * self.hidden * self.layers

    @property
    def block_flops(self) -> float:
        return self.layers * self.tokens * (24.0 * self.hidden**2 + 4.0 * self.context * self.hidden)

    @property
    def forward_flops(self) -> float:
        return self.block_flops + 2.0 * self.tokens * self.hidden * self.vocab

    def operators(self) -> list[Operator]:
        """Of all blocks together, by benefit; the input of each block, which is always swapped, is not among them."""
        width, unit = self.hidden, self.tokens * self.hidden * self.layers
        found = [
            Operator("fc2", 8.0 * unit * width, 2.0 * unit),
            Operator("qkv", 6.0 * unit * width, 6.0 * unit),
            Operator("projection", 2.0 * unit * width, 2.0 * unit),
            Operator("fc1", 8.0 * unit * width, 8.0 * unit),
            Operator("attention", 4.0 * unit * self.context, 2.0 * unit),
            Operator("norms and activations", 0.0, 12.0 * unit),
        ]
        return sorted(found, key=lambda each: -each.benefit)

    def recomputed_flops(self, swapped: float) -> float:
        """Eq. 7: piecewise linear in what is swapped beyond A_interBlock."""
        flops, left = self.block_flops, swapped - self.between_blocks
        for each in self.operators():
            share = min(1.0, max(0.0, left / each.nbytes))
            flops -= share * each.flops
            left -= each.nbytes
        return flops

    def slope(self, swapped: float) -> float:
        """Eq. 8: minus the benefit of the operator that is swapped next."""
        at = self.between_blocks
        for each in self.operators():
            at += each.nbytes
            if swapped < at:
                return -each.benefit
        return 0.0

    def reported_tflops(self, seconds: float) -> float:
        """As the paper's TFLOPS count (inferred, erratum L21): a whole recomputation, whatever was swapped."""
        share = 1 + self.context / (6 * self.hidden) + self.vocab / (16 * self.layers * self.hidden)
        return 96.0 * self.tokens * self.layers * self.hidden**2 * share / seconds / 1e12


class DiT(Net):
    """A diffusion transformer of Table VI: 18 L h^2 parameters, of which 6 L h^2 modulate an image, not a token."""

    @property
    def parameters(self) -> float:
        return 18.0 * self.layers * self.hidden**2


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the profiling stage measures: FLOP/s, bytes/s, and bytes of main memory for activations (MEM_avail)."""

    gpu: float
    link: float
    read: float
    write: float
    room: float = 0.0


def on_ssd(swapped: float, room: float) -> float:
    """Eq. 3: alpha A, not below zero."""
    return max(0.0, swapped - room)


def forward_terms(net: Net, rates: Rates, swapped: float) -> dict[str, float]:
    """Eqs. 2 and 4: seconds of the GPU, GPU to memory, memory to GPU, SSDs; the longest is T_f."""
    p16, spilled = 2.0 * net.parameters, on_ssd(net.gpus * swapped, rates.room)
    return {
        "GPU": net.forward_flops / rates.gpu,
        "GPU to memory": swapped / rates.link,
        "memory to GPU": p16 / rates.link,
        "SSD": p16 / rates.read + spilled / rates.write,
    }


def backward_terms(net: Net, rates: Rates, swapped: float) -> dict[str, float]:
    """Eq. 5: the optimizer's 14 P each way are in it; the longest is T_b."""
    p, spilled = net.parameters, on_ssd(net.gpus * swapped, rates.room)
    return {
        "GPU": (2.0 * net.forward_flops + net.recomputed_flops(swapped)) / rates.gpu,
        "GPU to memory": 2.0 * p / rates.link,
        "memory to GPU": (2.0 * p + swapped) / rates.link,
        "SSD": (14.0 * p + spilled) / rates.read + 14.0 * p / rates.write,
    }


def iteration_s(net: Net, rates: Rates, swapped: float) -> float:
    """Eq. 1."""
    return max(forward_terms(net, rates, swapped).values()) + max(backward_terms(net, rates, swapped).values())


def prefixes(net: Net) -> list[float]:
    """Bytes swapped after each block's operator, from A_interBlock to A_all."""
    found = [net.between_blocks]
    for each in net.operators():
        begin = found[-1]
        found += [begin + each.nbytes * (n + 1) / net.layers for n in range(net.layers)]
    return found


def algorithm_1(net: Net, rates: Rates) -> float:
    """Bytes that Algorithm 1 swaps: it stops at the first prefix that is no better, not below A_interBlock."""
    chosen, least = net.between_blocks, float("inf")
    for swapped in prefixes(net):
        seconds = iteration_s(net, rates, swapped)
        if seconds >= least:
            break
        chosen, least = swapped, seconds
    return chosen


def best(net: Net, rates: Rates) -> float:
    """The least volume among those with the shortest iteration."""
    return min(prefixes(net), key=lambda swapped: (iteration_s(net, rates, swapped), swapped))


def case(net: Net, rates: Rates) -> int:
    """1: the time only grows with what is swapped; 2: it only falls; 3: it has its minimum in between."""
    chosen = best(net, rates)
    return 1 if chosen == net.between_blocks else 2 if chosen >= net.all_activations * (1 - 1e-9) else 3


POLICIES = ("LoHan+Optimized", "LoHan+G10", "LoHan+ZeRO", "LoHan+Cap", "LoHan+CM")


def policy_bytes(policy: str, net: Net, rates: Rates) -> float | None:
    """What the activation policies of Fig. 9a swap; None where one fails. Simulated from their descriptions alone.

    `LoHan+ZeRO`: between blocks, to main memory. `LoHan+Cap`: to main memory, as much as the GPU's forward hides.
    `LoHan+CM`: to main memory, the volume with the shortest time of GPU and link, the model states' traffic unseen.
    `LoHan+G10`: everything, to the SSDs if need be.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    if policy == "LoHan+Optimized":
        return best(net, rates)
    if policy == "LoHan+G10":
        return net.all_activations
    if rates.room < net.between_blocks:
        return None
    if policy == "LoHan+ZeRO":
        return net.between_blocks
    if policy == "LoHan+Cap":
        hidden = forward_terms(net, rates, 0.0)["GPU"] * rates.link
        return min(net.all_activations, rates.room, max(net.between_blocks, hidden))
    unseen = Rates(gpu=rates.gpu, link=rates.link, read=float("inf"), write=float("inf"), room=float("inf"))
    fitting = [swapped for swapped in prefixes(net) if swapped <= rates.room]
    return min(fitting, key=lambda swapped: (iteration_s(net, unseen, swapped), swapped))

"""LoHan's own model of an iteration: Eqs. 1 to 8 and Algorithm 1, line by line (its section IV-D), without a simulator.

A step of a GPT of L layers, width h, batch b, context s and vocabulary V has P = 12 L h^2 + V h parameters and
A_all = 34 s b h L bytes of activations, of which A_interBlock = 2 s b h L are between blocks. `swapped` (A_G2M) is the
number of bytes that leave the GPU; the other activations are recomputed, and operators are swapped in decreasing order
of their benefit (Eq. 6). The equations are implemented in the library (`memascend.swapping`), which also uses them to
decide in a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend import swapping
from memascend.swapping import (
    GIB,
    Operator,
    Rates,
    algorithm_1,
    backward_terms,
    best,
    case,
    forward_terms,
    is_convex,
    iteration_s,
    on_ssd,
    prefixes,
    released,
)

__all__ = [
    "GIB",
    "POLICIES",
    "DiT",
    "Net",
    "Operator",
    "Rates",
    "algorithm_1",
    "backward_terms",
    "best",
    "case",
    "forward_terms",
    "is_convex",
    "iteration_s",
    "on_ssd",
    "policy_bytes",
    "prefixes",
    "released",
]


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model of Table IV and the batch of one GPU; `gpus` GPUs share SSDs and memory (in the paper one)."""

    layers: int
    hidden: int
    batch: int
    context: int = 1024
    vocab: int = 50257
    gpus: int = 1

    @property
    def parameters(self) -> float:
        """P = 12 L h^2 + V h."""
        return 12.0 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def weights(self) -> float:
        """Bytes of the 16-bit weights: 2P."""
        return 2.0 * self.parameters

    @property
    def gradients(self) -> float:
        """Bytes of the 16-bit gradients: 2P."""
        return 2.0 * self.parameters

    @property
    def update_read(self) -> float:
        """Bytes that the optimizer reads in a step: 14P (2P weights, 12P states)."""
        return 14.0 * self.parameters

    @property
    def update_written(self) -> float:
        """Bytes that the optimizer writes in a step: 14P."""
        return 14.0 * self.parameters

    @property
    def tokens(self) -> int:
        """Tokens of one GPU's batch: b s."""
        return self.batch * self.context

    @property
    def all_activations(self) -> float:
        """A_all in bytes: 34 s b h L."""
        return 34.0 * self.tokens * self.hidden * self.layers

    @property
    def between_blocks(self) -> float:
        """A_interBlock in bytes: 2 s b h L, the inputs of all blocks."""
        return 2.0 * self.tokens * self.hidden * self.layers

    @property
    def block_flops(self) -> float:
        """FLOP of all blocks' forward pass, with the scores of attention."""
        return self.layers * self.tokens * (24.0 * self.hidden**2 + 4.0 * self.context * self.hidden)

    @property
    def forward_flops(self) -> float:
        """FLOP of the whole forward pass, with the output matrix."""
        return self.block_flops + 2.0 * self.tokens * self.hidden * self.vocab

    def operators(self) -> list[Operator]:
        """Return the operators, summed over all blocks, in decreasing order of benefit.

        The inputs of blocks, which are always swapped, are not included.
        """
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
        """Return the recomputed FLOP (Eq. 7)."""
        return swapping.recomputed_flops(self, swapped)

    def slope(self, swapped: float) -> float:
        """Return the slope of `recomputed_flops` (Eq. 8)."""
        return swapping.slope(self, swapped)

    def reported_tflops(self, seconds: float) -> float:
        """Return TFLOPS as the paper counts them (inferred, erratum L21): with full recomputation, whatever was
        swapped."""
        share = 1 + self.context / (6 * self.hidden) + self.vocab / (16 * self.layers * self.hidden)
        return 96.0 * self.tokens * self.layers * self.hidden**2 * share / seconds / 1e12


class DiT(Net):
    """A diffusion transformer of Table VI: 18 L h^2 parameters; 6 L h^2 of them modulate an image, not a token."""

    @property
    def parameters(self) -> float:
        return 18.0 * self.layers * self.hidden**2


POLICIES = ("LoHan+Optimized", "LoHan+G10", "LoHan+ZeRO", "LoHan+Cap", "LoHan+CM")


def policy_bytes(policy: str, net: Net, rates: Rates) -> float | None:
    """Return the bytes that an activation policy of Fig. 9a swaps, or None if it fails for lack of main memory.

    The policies follow their descriptions only. `LoHan+ZeRO` swaps the inputs of blocks to main memory; `LoHan+Cap`
    swaps to main memory as much as the GPU's forward pass hides; `LoHan+CM` swaps to main memory the volume with the
    shortest time of GPU and link, ignoring the traffic of model states; `LoHan+G10` swaps everything, to the SSDs if
    necessary. Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    if policy == "LoHan+Optimized":
        return best(net, rates)
    if policy == "LoHan+G10":
        return net.all_activations
    if rates.host_bytes < net.between_blocks:
        return None
    if policy == "LoHan+ZeRO":
        return net.between_blocks
    if policy == "LoHan+Cap":
        hidden = forward_terms(net, rates, 0.0)["GPU"] * rates.link
        return min(net.all_activations, rates.host_bytes, max(net.between_blocks, hidden))
    unseen = Rates(gpu=rates.gpu, link=rates.link, read=float("inf"), write=float("inf"), host_bytes=float("inf"))
    fitting = [swapped for swapped in prefixes(net) if swapped <= rates.host_bytes]
    return min(fitting, key=lambda swapped: (iteration_s(net, unseen, swapped), swapped))

"""Activations on SSDs: bytes per step, the write bandwidth that hides them, and drive lifetime (SSDTrain, III-D).

Everything is for one GPU, in bytes and seconds, with closed formulas and without torch. The saved tensors of a block
and the times that add up follow the authors' fork of llm-analysis (github.com/K-Wu/llm-analysis at 44495f6,
examples/activation_size_estimate): 16-bit tensors, FlashAttention, dropout masks, and fp32 layer norms that sequence
parallelism divides as well. The paper's text is less specific, so a check against its numbers is calibrated rather than
independent.
"""

from __future__ import annotations

from dataclasses import dataclass

YEAR_S = 365 * 86_400
TB = 10**12


def _at_least(least: float, **values: float) -> None:
    """Raise ValueError for the first value below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least:g}, got {value:g}")


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A stack of equal blocks with a feed-forward of four times the hidden size."""

    layers: int
    hidden: int
    heads: int
    context: int
    vocab: int

    def __post_init__(self) -> None:
        _at_least(1, **vars(self))

    @property
    def parameters(self) -> int:
        """Parameters of matrices and embedding: 12 h^2 per block, plus V h."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """`tensor` GPUs share each block, `pipeline` stages share the blocks; data parallelism does not matter here.

    `gathers`: whether ZeRO-3 gathers each block's weights over the network while the previous block is computed.
    """

    tensor: int = 1
    pipeline: int = 1
    gathers: bool = False

    def __post_init__(self) -> None:
        _at_least(1, tensor=self.tensor, pipeline=self.pipeline)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one GPU. `flops_per_s` is the rate that it achieves, not its peak."""

    flops_per_s: float
    memory_bytes_per_s: float = 1.555e12  # A100 40 GB (NVIDIA's data sheet)
    link_bytes_per_s: float = 300e9  # NVLink 3, one direction (NVIDIA's data sheet: 600 GB/s for both)
    gather_bytes_per_s: float = 200e9  # eight HDR InfiniBand links of a DGX A100

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value:g}")


@dataclass(frozen=True, kw_only=True)
class Drives:
    """The SSDs of one GPU, with the assumptions that turn their rating into lifetime writes of activations (III-D).

    rated_bytes: lifetime writes of one drive by its JESD rating. rating_waf, our_waf: write amplification in the rating
    (random writes) and here (large sequential writes). retention_gain: factor of additional write cycles if data must
    be retained for a day instead of three years. The defaults are the paper's four Samsung 980 PRO 1 TB.
    """

    count: int = 4
    rated_bytes: float = 600 * TB
    rating_waf: float = 2.5
    our_waf: float = 1.0
    retention_gain: float = 86.0

    def __post_init__(self) -> None:
        _at_least(1, count=self.count, rating_waf=self.rating_waf, our_waf=self.our_waf)
        _at_least(1, retention_gain=self.retention_gain, rated_bytes=self.rated_bytes)

    @property
    def lifetime_bytes(self) -> float:
        """Bytes of activations that the drives endure: S_endurance of III-D."""
        return self.count * self.rated_bytes * self.rating_waf / self.our_waf * self.retention_gain

    def years(self, bytes_per_step: float, step_s: float) -> float:
        """Return the lifetime in years: t_life = S_endurance t_step / S_activations; infinite if nothing is written."""
        return self.lifetime_bytes * step_s / bytes_per_step / YEAR_S if bytes_per_step else float("inf")


def block_bytes(model: Transformer, batch: int, tensor: int = 1) -> float:
    """Return the bytes that one block saves for backward, for `batch` sequences: (41 s b h + 8 a s b) / t.

    These are inputs, queries, keys and values of attention (10 sbh), its output and log-sums (4 sbh + 8 a s b),
    projection and masks (3 sbh), the feed-forward (16 sbh), and two norms in fp32 (8 sbh).
    """
    tokens = model.context * batch
    return (41 * tokens * model.hidden + 8 * model.heads * tokens) / tensor


def activation_bytes(model: Transformer, batch: int, parallel: Parallelism | None = None) -> float:
    """Return the activation bytes of one micro-batch on one GPU.

    They include the blocks, and embedding, last norm and 16-bit logits, all divided among the pipeline stages. Table
    III is this for t = 2: L (20.5 sbh + 4 a s b) + 3 sbh + V s b.
    """
    parallel = parallel or Parallelism()
    tokens = model.context * batch
    ends = (6 * tokens * model.hidden + 2 * model.vocab * tokens) / parallel.tensor
    return (model.layers * block_bytes(model, batch, parallel.tensor) + ends) / parallel.pipeline


def forward_s(model: Transformer, batch: int, rates: Rates, parallel: Parallelism | None = None) -> float:
    """Return the seconds of one micro-batch's forward pass.

    Each block takes its products (24 s b h^2 + 4 s^2 b h operations), two norms and two all-reduces, or the gather of
    its weights if that takes longer. The logits are added, and a pipeline stage takes 1/p of the total.
    """
    parallel = parallel or Parallelism()
    tokens, shared = model.context * batch, parallel.tensor
    wide = tokens * model.hidden
    products = wide * (24 * model.hidden + 4 * model.context) / (shared * rates.flops_per_s)
    norms = 2 * 8 * wide / shared / rates.memory_bytes_per_s
    reduces = 2 * 2 * wide * 2 * (shared - 1) / shared / rates.link_bytes_per_s
    block = products + norms + reduces
    if parallel.gathers:
        block = max(block, 2 * 12 * model.hidden**2 / rates.gather_bytes_per_s)
    logits = 2 * wide * model.vocab / (shared * rates.flops_per_s)
    return (model.layers * block + logits) / parallel.pipeline


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Activations and time of one micro-batch.

    `activation_bytes`: bytes that it saves. `step_s`: seconds of its forward and backward pass (3 T_fwd).
    """

    activation_bytes: float
    step_s: float

    @property
    def write_bytes_per_s(self) -> float:
        """Bandwidth with which writing takes half of the step: activations / (t_step / 2)."""
        return self.activation_bytes / (self.step_s / 2)

    def years(self, drives: Drives | None = None) -> float:
        """Return the drives' lifetime in years, by default of the paper's four drives."""
        return (drives or Drives()).years(self.activation_bytes, self.step_s)


def projection(model: Transformer, batch: int, rates: Rates, parallel: Parallelism | None = None) -> Projection:
    """Return activations, required write bandwidth and drive lifetime if all activations go to SSDs."""
    return Projection(
        activation_bytes=activation_bytes(model, batch, parallel),
        step_s=3 * forward_s(model, batch, rates, parallel),
    )

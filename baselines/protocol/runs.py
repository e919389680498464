"""What a run of the harness is, and what a configuration needs to know of its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run of one twin. Sizes in tokens and sequences; ``k`` divides hidden, intermediate, vocabulary."""

    run_id: str
    system: str
    arm: str
    model: str
    k: int
    dtype: str  # "fp16" or "bf16"
    sequence: int
    batch: int  # sequences per rank
    steps: int
    seed: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a configuration needs to know of the model, in elements of one rank's partitions.

    ``pool_buffers``: buffers of the baseline's pool, 2 + the matrices of a block (9 if dense, 390 with 128 experts).
    """

    largest_tensor: int
    parameters: int
    pool_buffers: int

"""Descriptions of a run of the harness, and of the model sizes that a configuration needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run of one twin. ``sequence`` is in tokens; ``k`` divides hidden, intermediate, vocabulary sizes."""

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
    """Sizes of the model that a configuration needs, in elements of one rank's partitions.

    ``pool_buffers`` is the number of buffers of the baseline's pool: 2 + the matrices of a block (9 if dense, 390 with
    128 experts).
    """

    largest_tensor: int
    parameters: int
    pool_buffers: int

"""Bytes that one training step moves between host memory and the SSD, phase by phase.

With ZeRO-Infinity's schedule, of P streamed parameters in 16 bits and states of S bytes each: forward and backward read
the weights (2P each), backward writes the gradients (S P), the optimizer reads master, gradient and two moments (4 S P)
and writes master, two moments and the new weights (3 S P + 2P). That is 38P bytes with fp32 states and 22P with bf16
(MemAscend IV-E, Fig. 20; 37.99P counted on DeepSpeed 0.19.8). Tensors that stay in host memory move nothing, and a tied
embedding is read once more in each pass, because it is met twice. Backward in fact finds the output matrix and the last
block still in memory; they are counted all the same, which is 0.5 % of a step of Qwen2.5-7B too much.
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend.planner.footprint import DTYPES, STATE_DTYPES, SUB_GROUP_SIZE
from memascend.planner.pool import SWAP_THRESHOLD_BYTES, partition_numel, streamed, sub_groups
from memascend.planner.spec import ModelSpec

PHASES = ("forward", "backward", "optimizer")
# Systems whose model states live on the SSD; the others move nothing.
SSD_SYSTEMS = ("zero_infinity", "memascend")


@dataclass(frozen=True, kw_only=True)
class IoVolume:
    """Bytes read and written in one step, by phase, summed over all ranks. `stored_bytes`: what lies on the SSD."""

    read_bytes: dict[str, int]
    write_bytes: dict[str, int]
    stored_bytes: int

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    @property
    def total_bytes(self) -> int:
        return self.total_read_bytes + self.total_write_bytes


def io_volume(
    spec: ModelSpec,
    system: str = "memascend",
    *,
    dtype: str = "fp16",
    states: str = "fp32",
    ranks: int = 1,
    micro_batches: int = 1,
    sub_group_size: int | None = None,
    swap_threshold_bytes: float | None = None,
    swap_gradients: bool = True,
) -> IoVolume:
    """I/O of one optimizer step of `micro_batches` forward and backward passes (gradient accumulation).

    Arguments and thresholds as those of :func:`memascend.planner.footprint.plan`. Gradients are written once a micro
    batch, whole: DeepSpeed writes what it has accumulated so far. `swap_gradients`: False where they stay in memory.
    """
    nothing = dict.fromkeys(PHASES, 0)
    if system not in SSD_SYSTEMS:
        return IoVolume(read_bytes=nothing, write_bytes=nothing, stored_bytes=0)
    area = spec.k * spec.k
    threshold = SWAP_THRESHOLD_BYTES / area if swap_threshold_bytes is None else swap_threshold_bytes
    weight, state = DTYPES[dtype].itemsize, STATE_DTYPES[states].itemsize
    parts = streamed(spec.tensors(), element_bytes=weight, ranks=ranks, threshold_bytes=threshold)
    weights = ranks * weight * (sum(map(sum, parts.blocks)) + sum(parts.outside))
    size = sub_group_size or max(1, SUB_GROUP_SIZE // ranks // area)
    swapped = [numel for numel in sub_groups(spec.tensors(), size, ranks) if numel * state >= threshold]
    states_of_one = ranks * state * sum(swapped)  # one of master, gradient, first and second moment
    again = ranks * weight * partition_numel(spec.vocab * spec.hidden, ranks) if spec.tied else 0
    gradients = states_of_one if swap_gradients else 0
    passes = micro_batches * (weights + again)
    return IoVolume(
        read_bytes={"forward": passes, "backward": passes, "optimizer": 3 * states_of_one + gradients},
        write_bytes={
            "forward": 0,
            "backward": micro_batches * gradients,
            "optimizer": 3 * states_of_one + weights,
        },
        stored_bytes=weights + 3 * states_of_one + gradients,
    )

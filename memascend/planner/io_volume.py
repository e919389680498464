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

from memascend.planner.pool import partition_numel
from memascend.planner.workload import ELEMENT_BYTES, Workload

PHASES = ("forward", "backward", "optimizer")


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


def io_volume(work: Workload) -> IoVolume:
    """I/O of one optimizer step, of all its forward and backward passes (gradient accumulation).

    Gradients are written once a batch, whole: DeepSpeed writes what it has accumulated so far; not at all where the arm
    keeps them in memory.
    """
    nothing = dict.fromkeys(PHASES, 0)
    if not work.swaps:
        return IoVolume(read_bytes=nothing, write_bytes=nothing, stored_bytes=0)
    spec, ranks = work.spec, work.ranks
    weight, state = ELEMENT_BYTES[work.dtype], ELEMENT_BYTES[work.kept_states]
    parts = work.streamed()
    weights = ranks * weight * (sum(map(sum, parts.blocks)) + sum(parts.outside))
    swapped = [numel for numel in map(sum, work.sub_groups()) if numel * state >= work.swap_threshold_bytes]
    states_of_one = ranks * state * sum(swapped)  # one of master, gradient, first and second moment
    again = ranks * weight * partition_numel(spec.vocab * spec.hidden, ranks) if spec.tied else 0
    gradients = states_of_one if work.arrangement.swaps_gradients else 0
    passes = work.accumulation * (weights + again)
    return IoVolume(
        read_bytes={"forward": passes, "backward": passes, "optimizer": 3 * states_of_one + gradients},
        write_bytes={
            "forward": 0,
            "backward": work.accumulation * gradients,
            "optimizer": 3 * states_of_one + weights,
        },
        stored_bytes=weights + 3 * states_of_one + gradients,
    )

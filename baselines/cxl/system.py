"""CXL-aware allocation: ZeRO-Offload whose host buffers are placed, by class, on the nodes that a policy chooses."""

from __future__ import annotations

from typing import Any

from memascend.arrangements import Arrangement, arrangement_of_parts
from memascend.baselines.cxl.schedule import schedule
from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, host_offload, zero3_config

# ZeRO-Offload with our pinned memory, which can be placed on nodes, and no other part of ours; the overflow check is
# DeepSpeed's own.
_PLACED = {"pinned": "exact", "pool": "stock", "overflow": "stock", "aio": "file"}


def _arm(label: str, placement: str | None, **others: bool) -> Arrangement:
    return arrangement_of_parts(_PLACED, label, states_on="host", placement=placement, overflow="chain", **others)


_ARMS = {
    "cxl_aware": _arm("CXL-aware allocation", "latency_first"),
    "as_published": _arm("CXL-aware allocation (Algorithm 1 as printed)", "latency_first", runs=False),
    "naive": _arm("Naive CXL (interleave)", "process_interleave"),
    "baseline": _arm("Local DRAM", None),
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    in_memory = {"device": "cpu", "pin_memory": True}
    return zero3_config(run, dict(in_memory), dict(in_memory))


SYSTEM = DeepSpeedSystem(name="cxl", arms=_ARMS, configure=_configure, buffers=host_offload, tasks=schedule)

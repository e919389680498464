"""MemAscend on DeepSpeed: adaptive pool, alignment-free pinned memory, fused overflow check."""

from __future__ import annotations

from typing import Any

from baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, zero3_config

_ALL = {"pinned": "exact", "pool": "adaptive", "overflow": "fused", "aio": "memascend"}
_PARTS = {
    "memascend": _ALL,
    "pinned_only": {"pinned": "exact", "pool": "monolithic_separate", "overflow": "chain", "aio": "memascend"},
    "pool_only": {"pinned": "power_of_two", "pool": "adaptive", "overflow": "chain", "aio": "memascend"},
    "overflow_only": {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "fused", "aio": "memascend"},
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    return zero3_config(run, *nvme_offload(run, sizes, nvme_path))


SYSTEM = DeepSpeedSystem(name="memascend", parts_by_arm=_PARTS, configure=_configure)

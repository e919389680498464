"""MemAscend on DeepSpeed: adaptive pool, alignment-free pinned memory, fused overflow check."""

from __future__ import annotations

from typing import Any

from baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, zero3_config

_ALL = {"pinned": "exact", "pool": "adaptive", "overflow": "fused", "aio": "direct"}
_BF16 = {**_ALL, "optimizer_states": "bf16"}
_PARTS = {
    "memascend": _ALL,
    "memascend_fast": {**_ALL, "numerics": "fast"},
    "memascend_bf16": {**_BF16, "numerics": "fast"},
    "memascend_bf16_nearest": {**_BF16, "numerics": "exact"},
    "memascend_kept_gradients": {**_ALL, "gradients": "kept"},
    "pinned_only": {"pinned": "exact", "pool": "monolithic_separate", "overflow": "chain", "aio": "file"},
    "pool_only": {"pinned": "power_of_two", "pool": "adaptive", "overflow": "chain", "aio": "file"},
    "memascend_on_files": {**_ALL, "aio": "file"},
    "direct_only": {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "chain", "aio": "direct"},
    "overflow_only": {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "fused", "aio": "file"},
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    if _PARTS[run.arm].get("optimizer_states") == "bf16" and run.dtype != "bf16":
        raise ValueError(f"arm {run.arm!r} keeps its states in bf16 and trains in bf16: run it with --dtype bf16")
    return zero3_config(run, *nvme_offload(run, sizes, nvme_path))


SYSTEM = DeepSpeedSystem(name="memascend", parts_by_arm=_PARTS, configure=_configure)

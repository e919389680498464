"""MemAscend on DeepSpeed: adaptive pool, alignment-free pinned memory, fused overflow check, direct NVMe engine."""

from __future__ import annotations

from typing import Any

from memascend.arrangements import Arrangement, arrangement_of_parts
from memascend.baselines.memascend.schedule import schedule
from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, ssd_offload, zero3_config

_ALL = {"pinned": "exact", "pool": "adaptive", "overflow": "fused", "aio": "direct"}
_PUBLISHED = {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "chain", "aio": "file"}
_BF16 = {**_ALL, "optimizer_states": "bf16"}


def _arm(variant: str, parts: dict[str, str]) -> Arrangement:
    label = f"MemAscend ({variant})" if variant else "MemAscend"
    return arrangement_of_parts(parts, label, derives_sizes=True)


_ARMS = {
    "memascend": _arm("", _ALL),
    "memascend_fast": _arm("own AdamW", {**_ALL, "numerics": "fast"}),
    "memascend_bf16": _arm("bf16 states", {**_BF16, "numerics": "fast"}),
    "memascend_bf16_nearest": _arm("bf16 states, nearest rounding", {**_BF16, "numerics": "exact"}),
    "memascend_kept_gradients": _arm("gradients kept", {**_ALL, "gradients": "host"}),
    "pinned_only": _arm("pinned memory only", {**_PUBLISHED, "pinned": "exact"}),
    "pool_only": _arm("pool only", {**_PUBLISHED, "pool": "adaptive"}),
    "memascend_on_files": _arm("a file for each tensor", {**_ALL, "aio": "file"}),
    "direct_only": _arm("direct NVMe engine only", {**_PUBLISHED, "aio": "direct"}),
    "overflow_only": _arm("overflow check only", {**_PUBLISHED, "overflow": "fused"}),
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration. Raises ValueError for an arm with bf16 states and another dtype."""
    if _ARMS[run.arm].states == "bf16" and run.dtype != "bf16":
        raise ValueError(f"arm {run.arm!r} keeps its states in bf16 and trains in bf16: run it with --dtype bf16")
    return zero3_config(run, *nvme_offload(run, sizes, nvme_path))


SYSTEM = DeepSpeedSystem(name="memascend", arms=_ARMS, configure=_configure, buffers=ssd_offload, tasks=schedule)

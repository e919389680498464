"""ZeRO-Infinity: DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, as published and as it is today."""

from __future__ import annotations

from typing import Any

from baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, zero3_config

_PARTS = {
    "as_published": {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "chain", "aio": "file"},
    "as_published_one_tensor": {
        "pinned": "power_of_two",
        "pool": "monolithic",
        "overflow": "chain",
        "aio": "file",
    },
    "aminmax": {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "aminmax", "aio": "file"},
    "today_016": {"pinned": "power_of_two", "pool": "stock", "overflow": "stock", "aio": "file"},
    "today": {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"},
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    param, optimizer = nvme_offload(run, sizes, nvme_path)
    if run.arm == "today_016":
        param["buffer_size"] += 512  # 0.16 asserts that a tensor is smaller than its buffer, not equal to it
    return zero3_config(run, param, optimizer)


SYSTEM = DeepSpeedSystem(name="zero_infinity", parts_by_arm=_PARTS, configure=_configure)

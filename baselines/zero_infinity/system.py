"""ZeRO-Infinity: DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, as published and in today's version."""

from __future__ import annotations

from typing import Any

from memascend.arrangements import Arrangement, arrangement_of_parts
from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, ssd_offload, zero3_config
from memascend.baselines.zero_infinity.schedule import schedule
from memascend.planner.derived_sizes import PIPELINED, optimizer_buffers

_STOCK = dict.fromkeys(("pinned", "pool", "overflow", "aio"), "stock")
_PUBLISHED = {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "chain", "aio": "file"}


def _arm(variant: str, parts: dict[str, str], **others: Any) -> Arrangement:
    refusal = "stock DeepSpeed fails with bf16 optimizer states on NVMe"
    return arrangement_of_parts(parts, f"ZeRO-Infinity ({variant})", refuses_bf16_states=refusal, **others)


_ARMS = {
    "as_published": _arm("as published", _PUBLISHED),
    "as_published_one_tensor": _arm(
        "as published, one pool tensor", {**_PUBLISHED, "pool": "monolithic"}, whole_swap_out=True
    ),
    "as_published_round_threshold": _arm(
        "as published, rounding bounded by PyTorch",
        _PUBLISHED,
        pinned="round_threshold",
        swapped="round_threshold",
        shown_beside=True,
        runs=False,
    ),
    "as_published_direct": _arm("as published, direct NVMe engine", {**_PUBLISHED, "aio": "direct"}),
    "aminmax": _arm("as published, aminmax check", {**_PUBLISHED, "overflow": "aminmax"}),
    "today_016": _arm(
        "DeepSpeed 0.16",
        {"pinned": "power_of_two", "pool": "stock", "overflow": "stock", "aio": "file"},
        whole_swap_out=True,
    ),
    "today": _arm("DeepSpeed 0.19.8", _STOCK, shown_beside=True),
    "today_pipelined": _arm("DeepSpeed 0.19.8, pipelined", _STOCK, pipelined=True),
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration, with the pipelined optimizer and the larger buffers of 0.16 if the
    arm asks."""
    param, optimizer = nvme_offload(run, sizes, nvme_path)
    if _ARMS[run.arm].pipelined:
        optimizer |= {**PIPELINED, "buffer_count": optimizer_buffers(PIPELINED)}
    if run.arm == "today_016":
        param["buffer_size"] += 512  # 0.16 asserts that a tensor is smaller than its buffer, not equal to it
    return zero3_config(run, param, optimizer)


SYSTEM = DeepSpeedSystem(name="zero_infinity", arms=_ARMS, configure=_configure, buffers=ssd_offload, tasks=schedule)

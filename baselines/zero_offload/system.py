"""ZeRO-Offload as the papers use it: ZeRO-3 with parameters and optimizer in CPU memory; the reference for losses."""

from __future__ import annotations

from typing import Any

from memascend.arrangements import arrangement_of_parts
from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, host_offload, zero3_config
from memascend.baselines.zero_offload.schedule import schedule

_STOCK = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}
# Without swapping there are no swap buffers; memory pinned by torch is rounded as by CUDA's caching allocator.
_ARMS = {"today": arrangement_of_parts(_STOCK, "ZeRO-Offload", states_on="host", swapped="power_of_two")}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    in_memory = {"device": "cpu", "pin_memory": True}
    return zero3_config(run, dict(in_memory), dict(in_memory))


SYSTEM = DeepSpeedSystem(name="zero_offload", arms=_ARMS, configure=_configure, buffers=host_offload, tasks=schedule)

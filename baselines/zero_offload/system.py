"""ZeRO-Offload as the papers use it: ZeRO-3 with parameters and optimizer in CPU memory. The reference of losses."""

from __future__ import annotations

from typing import Any

from baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, zero3_config

_STOCK = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    in_memory = {"device": "cpu", "pin_memory": True}
    return zero3_config(run, dict(in_memory), dict(in_memory))


SYSTEM = DeepSpeedSystem(name="zero_offload", parts_by_arm={"today": _STOCK}, configure=_configure)

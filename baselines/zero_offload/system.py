"""ZeRO-Offload as the papers use it: ZeRO-3 with parameters and optimizer in CPU memory. The reference of losses."""

from __future__ import annotations

from typing import Any

from baselines.protocol import RunSpec, Sizes, describe_folder, zero3_config

_STOCK = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}


class ZeroOffload:
    name = "zero_offload"
    arms = ("today",)

    def describe(self) -> dict[str, Any]:
        return describe_folder(self.name)

    def parts(self, arm: str) -> dict[str, str]:
        return dict(_STOCK)

    def deepspeed_config(self, run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
        return zero3_config(run, {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": True})


SYSTEM = ZeroOffload()

"""SSDTrain: weights and states on the device, activations on the SSD; with arms that keep or recompute all (Fig. 7).

The treatment of activations in each arm is described in schedule.py.

The paper trains in FP16 with SGD to save GPU memory; here AdamW with fp32 masters is used, as in every other system, so
that losses can be compared. The paper's tensor parallelism over two GPUs is one rank here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.arrangements import Arrangement
from memascend.baselines.protocol import PlannedSystem
from memascend.baselines.ssdtrain.footprint import footprint
from memascend.baselines.ssdtrain.schedule import schedule
from memascend.training.backends import IN_MEMORY, Setup

if TYPE_CHECKING:
    from memascend.training.config import TrainConfig

_CHECKPOINTING = {"ssdtrain": "ssd", "hybrid": "ssd", "keep": "none", "recompute": "plain"}
_LABELS = {
    "ssdtrain": "SSDTrain",
    "hybrid": "SSDTrain (as much as the SSD takes)",
    "keep": "Keep all",
    "recompute": "Recompute all",
}
_ARMS = {name: Arrangement(label=label, states_on="gpu") for name, label in _LABELS.items()}
_ARMS["as_published"] = Arrangement(label="SSDTrain (as published)", states_on="gpu", runs=False)


class SSDTrain(PlannedSystem):
    """SSDTrain in one process; an arm determines the treatment of activations and must match `checkpointing`."""

    def defaults(self, arm: str) -> dict[str, Any]:
        return {"checkpointing": _CHECKPOINTING[arm]} if arm in _CHECKPOINTING else {}

    def refuse(self, config: TrainConfig) -> None:
        """Raise ValueError for checkpointing that does not match the arm, several ranks, devices and bf16 states."""
        arm = config.arm or next(iter(_ARMS))
        wanted = _CHECKPOINTING[arm]
        if config.checkpointing != wanted:
            raise ValueError(
                f"arm {arm!r} of system 'ssdtrain' trains with checkpointing {wanted!r}, not {config.checkpointing!r}: "
                f"set --checkpointing {wanted}, or choose another arm ({', '.join(_ARMS)})"
            )
        if arm == "hybrid" and config.activations != "auto":
            raise ValueError(
                f"arm 'hybrid' of system 'ssdtrain' offloads what the SSD takes in time, not {config.activations!r}: "
                "leave --activations out, or choose the arm ssdtrain"
            )
        if config.ranks > 1:
            raise ValueError(f"system 'ssdtrain' is one process, not {config.ranks}: leave --ranks out")
        if config.devices:
            raise ValueError("system 'ssdtrain' keeps activations in a file: leave --devices out, and name --nvme")
        if config.nvme and wanted != "ssd":
            raise ValueError(f"arm {arm!r} of system 'ssdtrain' writes nothing to an SSD: leave --nvme out")
        if config.states == "bf16":
            raise ValueError("system 'ssdtrain' keeps fp32 states: leave --states out, or set --system in_memory")

    def trainer(self, config: TrainConfig, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
        """Return the in-memory backend's set-up; `swap` is the folder of activations for arms that offload them."""
        on_ssd = config.checkpointing == "ssd"
        folder = {"activations_folder": swap} if on_ssd else {}
        return Setup(backend=IN_MEMORY, settings={"update": "torch", "group_elements": None, **folder}, swaps=on_ssd)


SYSTEM = SSDTrain(name="ssdtrain", arms=_ARMS, buffers=footprint, tasks=schedule, chooses_policies=True)

"""SSDTrain: weights and states on the device, activations on the SSD; beside it keeping and recomputing all (Fig. 7).

The paper trains in FP16 with SGD to make room on its GPU; here AdamW over fp32 masters, as in every other system, so
that losses can be compared. Its tensor parallelism over two GPUs is one rank here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baselines.protocol import PlannedSystem
from baselines.protocol.schedules import backward, forward
from baselines.ssdtrain.footprint import footprint
from memascend.arrangements import Arrangement
from memascend.training.backends import IN_MEMORY, Setup

if TYPE_CHECKING:
    from memascend.planner.step import Step
    from memascend.training.config import TrainConfig

_CHECKPOINTING = {"ssdtrain": "ssd", "keep": "none", "recompute": "plain"}
_LABELS = {"ssdtrain": "SSDTrain", "keep": "Keep all", "recompute": "Recompute all"}
_ARMS = {name: Arrangement(label=label, states_on="gpu") for name, label in _LABELS.items()}


class SSDTrain(PlannedSystem):
    """One process. An arm is what becomes of activations, and has to agree with the run's `checkpointing`."""

    def refuse(self, config: TrainConfig) -> None:
        arm = config.arm or next(iter(_ARMS))
        wanted = _CHECKPOINTING[arm]
        if config.checkpointing != wanted:
            raise ValueError(
                f"arm {arm!r} of system 'ssdtrain' trains with checkpointing {wanted!r}, not {config.checkpointing!r}: "
                f"set --checkpointing {wanted}, or choose another arm ({', '.join(_ARMS)})"
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
        on_ssd = config.checkpointing == "ssd"
        folder = {"activations_folder": swap} if on_ssd else {}
        return Setup(backend=IN_MEMORY, settings={"update": "torch", "group_elements": None, **folder}, swaps=on_ssd)


def _products(step: Step) -> None:
    """Products alone: the traffic of activations is not among a step's tasks yet, and a plan says so."""
    backward(step, after=forward(step))


SYSTEM = SSDTrain(name="ssdtrain", arms=_ARMS, buffers=footprint, tasks=_products)

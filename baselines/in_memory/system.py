"""Plain PyTorch in memory, the reference for every other system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.arrangements import Arrangement
from memascend.baselines.in_memory.schedule import schedule
from memascend.baselines.protocol import PlannedSystem, device_only
from memascend.training.backends import IN_MEMORY, UPDATES, Setup

if TYPE_CHECKING:
    from memascend.training.config import TrainConfig

_ARMS = {
    name: Arrangement(label=f"In memory ({update} AdamW)", states_on="gpu", int8_states=update == "memascend")
    for name, update in UPDATES.items()
}


class InMemory(PlannedSystem):
    """Training in one process, with everything that a GPU would hold on the device."""

    def refuse(self, config: TrainConfig) -> None:
        """Raise ValueError for several ranks, for places to swap to, and for bf16 states without a suitable AdamW."""
        if config.ranks > 1:
            raise ValueError(
                f"system 'in_memory' is one process, not {config.ranks}: leave --ranks out, or use another"
            )
        for name in ("devices", "tiers", "nvme"):
            if getattr(config, name) and not (name == "nvme" and config.checkpointing == "ssd"):
                raise ValueError(f"system 'in_memory' swaps nothing: leave --{name} out, or set --system memascend")
        if config.states == "bf16" and (config.arm in (None, "torch_adamw") or config.dtype != "bf16"):
            raise ValueError(
                "states 'bf16' in memory need --arm memascend_adamw (which rounds stochastically) or deepspeed_adamw, "
                "and dtype bf16"
            )

    def trainer(self, config: TrainConfig, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
        """Return the in-memory backend's set-up; `swap` is the folder of activations with checkpointing `ssd`."""
        folder = {"activations_folder": swap} if config.checkpointing == "ssd" else {}
        update = UPDATES[config.arm or next(iter(UPDATES))]
        return Setup(
            backend=IN_MEMORY, settings={"update": update, "group_elements": None, **folder}, swaps=bool(folder)
        )


SYSTEM = InMemory(name="in_memory", arms=_ARMS, buffers=device_only, tasks=schedule)

"""The offloading system of a run: its backend setup, its defaults, and the refusal of options it does not support.

Systems are found by entry point (`memascend.systems`). This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memascend import systems
from memascend.training.backends import Setup
from memascend.training.config import TrainConfig


def setup(config: Any, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
    """Return the backend setup for a checked `config`. `swap`: the folder for swap files, if the setup uses one."""
    setup: Setup = systems.load(config.system, config.arm).trainer(config, prepared, run_id, swap)
    return setup


def states_folder(config: Any) -> Path | None:
    """Return the folder of the states that outlive a kill of the run; None if its system keeps none."""
    system = systems.load(config.system, config.arm)
    if not hasattr(system, "states_folder"):
        return None
    folder: Path = system.states_folder(config)
    return folder


def with_defaults(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a user set, completed by the defaults of the system's arm.

    Raises ValueError for an unknown system or arm.
    """
    return {**systems.own_defaults(wanted.get("system", TrainConfig.system), wanted.get("arm")), **wanted}


def check(config: Any) -> None:
    """Raise a one-line ValueError for an unknown system, and for keys that exclude one another."""
    system = systems.load(config.system, config.arm)
    if not systems.arrangement(config.system, config.arm).runs:
        what = config.system if config.arm is None else f"{config.system} ({config.arm})"
        runs = [name for name in systems.names() if systems.arrangement(name).runs]
        raise ValueError(f"{what} can only be planned and simulated: train with one of {', '.join(runs)}")
    system.refuse(config)
    systems.require_states(config.system, config.arm, config.states, config.dtype)
    systems.require_order(config.system, config.accumulation)
    systems.require_versions(config.system, config.state_versions)
    systems.require_kept_states(config.system, config.checkpoints)
    for device in config.devices:
        if not os.path.exists(device):
            raise ValueError(f"there is no device {device}; prepare one with 'memascend storage format'")
    if config.gradients == "bf16" and config.dtype != "bf16":
        raise ValueError("gradients 'bf16' need dtype bf16: set --dtype bf16, or --gradients fp32")

"""States that an earlier call left on the SSD: a new run must not continue them, and a resumed one must find its own.

This module imports the engine, and with it torch, only if there are such states.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from memascend.training import checkpoint, systems
from memascend.training.children import say
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder


def place_of_new(config: TrainConfig) -> Path | None:
    """Return the folder in which a new run will keep its states; None if its system keeps none.

    Raises ValueError if anything is there: a run whose folder was removed may have left its states, by whose name the
    new run would continue them.
    """
    folder = systems.states_folder(config)
    if folder is None or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return folder
    step = _kept_step(folder)
    what = f"the states of step {step} of an earlier run" if step else "files of an earlier run"
    raise ValueError(f"{folder} holds {what}: remove it, or name another folder with --output")


def require_found(config: TrainConfig, nvme: str | None, run: RunFolder) -> None:
    """Raise ValueError if a run that is resumed with another `config.nvme` would leave newer states behind.

    `nvme`: the value before.
    """
    new, old = systems.states_folder(config), systems.states_folder(dataclasses.replace(config, nvme=nvme))
    if new is None or old is None or not old.exists() or (new.exists() and new.samefile(old)):
        return
    left = _kept_step(old)
    if not left:
        return
    full = [each.step for each in checkpoint.listed(run.checkpoints)[0] if each.is_full]
    if left > max([_kept_step(new) or 0, *full]):
        raise ValueError(f"the states of step {left} are in {old}: move that folder to {new}, or leave --nvme out")
    say(f"note: {old} still holds the states of step {left}, which this run no longer needs")


def _kept_step(folder: Path) -> int | None:
    """Return the step of the states in the folder; None if there are none, or if a kill interrupted their update."""
    if not folder.is_dir():
        return None
    from memascend.engine.errors import InterruptedUpdate
    from memascend.engine.state_files import holds_states
    from memascend.engine.state_store import kept_facts

    if not holds_states(folder):
        return None
    try:
        step: int = kept_facts(folder).get("step", 0)
    except InterruptedUpdate:
        return None
    return step

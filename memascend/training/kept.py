"""Opening the optimizer states that a run of the streaming engine left on storage, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from memascend.training import backends, launch, systems
from memascend.training.folder import RunFolder
from memascend.training.preparation import read_prepared

if TYPE_CHECKING:
    from memascend.training.backends.streaming import StreamingBackend


def require_run(folder: RunFolder) -> None:
    """Raise ValueError if `folder` does not contain a run."""
    if not folder.config.is_file():
        raise ValueError(f"{folder.root} holds no run: name the folder that memascend train wrote to (--output)")


def kept_backend(folder: RunFolder) -> StreamingBackend | None:
    """Return the backend of a run whose states outlive it, or None for other runs and unprepared ones.

    `open_kept(kept_source(folder))` on the result opens the states.
    """
    config, prepared = launch.saved_config(folder), read_prepared(folder)
    if prepared is None:
        return None
    setup = systems.setup(config, prepared, folder.root.name, str(folder.root / "swap"))
    if setup.backend != backends.STREAMING:
        return None
    from memascend.memory.ledger import Ledger

    return cast("StreamingBackend", backends.load(setup.backend)(config, setup.settings, Ledger()))


def kept_source(folder: RunFolder) -> Path | dict[str, Any]:
    """Return the model folder or the model configuration that the run started from.

    Raises ValueError if the run's files do not include it.
    """
    prepared = read_prepared(folder)
    if prepared is None:
        raise ValueError(f"{folder.prepared} is missing: run memascend train --output {folder.root} --resume first")
    return Path(prepared["model_folder"]) if prepared["model_folder"] else prepared["model_config"]

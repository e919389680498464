"""`memascend export`: the newest weights of a run as a folder that `from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.training import backends, checkpoint, launch, systems
from memascend.training.checkpoint import Checkpoint
from memascend.training.folder import RunFolder
from memascend.training.progress import byte_count

if TYPE_CHECKING:
    from memascend.training.backends.streaming import StreamingBackend


def export(run: Path, target: Path) -> str:
    """Write them into `target`, which is made and appears whole; returns a line that says which step they are of.

    Raises ValueError, in one line, where `run` is no run, trains at the moment or has no weights yet, and where
    `target` is there already, or in the run's folder; OSError where it cannot be written. A step whose update was cut
    off is completed first.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ValueError(f"{run} holds no run: name the folder that memascend train wrote to (--output)")
    target = Path(os.path.abspath(target))
    if target.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{target} is in the run's own folder: name one outside of {run}")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: name a new one")
    partial = target.with_name(f".{target.name}.partial")
    with folder.held(resume=True):
        found = [
            each for each in checkpoint.listed(folder.checkpoints)[0] if (each.model / checkpoint.WEIGHTS).exists()
        ]
        newest = found[-1] if found else None
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            step = _write(folder, newest, partial)
            nbytes = sum(path.stat().st_size for path in partial.iterdir())
            if target.exists():
                target.rmdir()
            os.rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return f"step {step} of {run}: {byte_count(nbytes)} in {target}, for from_pretrained"


def _write(folder: RunFolder, newest: Checkpoint | None, partial: Path) -> int:
    """The later of states and checkpoint; its step."""
    backend = _kept_backend(folder)
    kept = backend.kept_step() if backend is not None else None
    if kept is None or (newest is not None and newest.step >= kept):
        if newest is None:
            raise ValueError(f"{folder.root} has no weights yet: no step is kept, and there is no checkpoint")
        _require_room(partial, sum(path.stat().st_size for path in newest.model.iterdir()))
        shutil.copytree(newest.model, partial, dirs_exist_ok=True)
        return newest.step
    if kept == 0:
        raise ValueError(f"{folder.root} has no weights yet: no step of it was completed")
    return _from_states(backend, folder, partial)


def _kept_backend(folder: RunFolder) -> StreamingBackend | None:
    """The backend whose states outlive a run, where this one has it."""
    config, prepared = launch.saved_config(folder), launch.read_prepared(folder)
    if prepared is None:
        return None
    setup = systems.setup(config, prepared, folder.root.name, str(folder.root / "swap"))
    if setup.backend != backends.STREAMING:
        return None
    from memascend.memory.ledger import Ledger

    return backends.load(setup.backend)(config, setup.settings, Ledger())


def _from_states(backend: StreamingBackend, folder: RunFolder, partial: Path) -> int:
    from memascend.integrations.pretrained import save_configuration

    prepared = launch.read_prepared(folder)
    source = Path(prepared["model_folder"]) if prepared["model_folder"] else prepared["model_config"]
    step = backend.open_kept(source)
    try:
        _require_room(partial, sum(layout.nbytes for layout in backend.weight_layouts()))
        checkpoint.write_weights(partial, backend)
        save_configuration(backend.model, partial, folder.tokenizer)
    finally:
        backend.engine.close()
    return step


def _require_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"{folder.parent} has {byte_count(free)} free, and the weights take {byte_count(needed)}: "
            f"{byte_count(needed - free)} are missing; name a folder on another drive"
        )

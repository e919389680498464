"""Saves of a streamed model: a folder of files that is written while training continues, and loaded again.

    model.safetensors   parameters, a tied one once, and persistent buffers, by their names in the model
    states.safetensors  `<parameter>.<state>`: "master" and the moments of what is trained, flat, as
                        `StreamingEngine.read_states` gives them
    states.json         steps of each parameter, settings of the groups, the note

The folder is built under another name, synced, and renamed, so that a crash leaves nothing that looks like a save.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memascend.engine.kept_buffers import persistent_buffers
from memascend.engine.layout import numel_of_state
from memascend.engine.runtime import StreamingEngine
from memascend.engine.saving import WEIGHTS, BackgroundSave, Target
from memascend.storage.atomic_write import sync
from memascend.storage.errors import StorageError
from memascend.storage.tensor_file import TensorFileReader, TensorLayout
from memascend.storage.tensor_parts import TensorPartsWriter

MODEL, STATES, FACTS = "model.safetensors", "states.safetensors", "states.json"
_MARK = ".memascend-save"  # marks the folder of an interrupted save, which the next save may remove
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def begin_save(
    engine: StreamingEngine, folder: str | os.PathLike[str], facts: Mapping[str, Any] | None
) -> BackgroundSave:
    """Start saving the last completed step into `folder`, which is new or empty and appears only when complete; the
    result of the save is its path. With `facts` (JSON) the states are saved too, without them only the model. Raises
    ValueError if the folder cannot be used or the disk is full."""
    target = Path(os.path.abspath(folder))
    own = engine.state_store.folder
    if Path(os.path.realpath(own)) in Path(os.path.realpath(target)).parents:
        raise ValueError(f"{target} is inside {own}, the folder of the states: name a folder outside of it")
    engine.wait_for_save()  # it may be building the same folder, which would look like the rest of a killed save
    partial = _require_new(target)
    files: list[TensorPartsWriter] = []

    def end() -> Path:
        for file in files:
            file.close()
        for path in (*partial.iterdir(), partial):
            sync(path)
        if target.exists():
            target.rmdir()
        os.rename(partial, target)
        (target / _MARK).unlink()
        sync(target.parent)
        return target

    def give_up(error: BaseException) -> BaseException:
        for file in files:
            file.abandon()
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            advice = "free space, or name a folder on another drive" if error.errno in _FULL else "name another folder"
            return ValueError(
                f"cannot save {target}: {error.strerror or error}; {advice}. Training itself is not harmed"
            )
        return error

    try:
        partial.mkdir(parents=True)
        (partial / _MARK).touch()
        targets = _model_file(engine, partial, files)
        if facts is not None:
            targets |= _states_file(engine, partial, files)
            (partial / FACTS).write_text(json.dumps(dict(facts) | _kind(engine)))
        return engine.save(targets, end, give_up, what=f"save to {target}")
    except BaseException as error:
        if (final := give_up(error)) is not error:
            raise final from error
        raise


def _require_new(target: Path) -> Path:
    """Return the path under which the folder is built, and remove the rest of an interrupted save from it. Raises
    ValueError if the target is neither new nor empty."""
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: name a new one")
    partial = target.with_name(f".{target.name}.partial")
    if os.path.lexists(partial):
        if partial.is_symlink() or not (partial / _MARK).exists():
            raise ValueError(f"{partial} exists but was not left by a save: move it, or name another folder")
        shutil.rmtree(partial)
    return partial


def _model_file(
    engine: StreamingEngine, folder: Path, files: list[TensorPartsWriter]
) -> dict[tuple[str, str], list[Target]]:
    """Open the model's file, append it to `files`, write the buffers, and return the parameters' targets."""
    parameters, buffers = dict(engine.model.named_parameters()), dict(_buffers(engine))
    layouts = [TensorLayout(name, each.dtype, tuple(each.shape)) for name, each in (parameters | buffers).items()]
    file = TensorPartsWriter(folder / MODEL, layouts, {"format": "pt"})
    files.append(file)
    for name, values in buffers.items():  # written at once, since training may change them
        file.write(name, values.detach().cpu().contiguous().resolve_conj().resolve_neg())
    return {(name, WEIGHTS): [Target(file, name)] for name in parameters}


def _states_file(
    engine: StreamingEngine, folder: Path, files: list[TensorPartsWriter]
) -> dict[tuple[str, str], list[Target]]:
    """Open the file of the states, append it to `files`, and return the targets of all states."""
    names, layout = _state_names(engine), engine.layout
    sizes = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
    layouts = [
        TensorLayout(f"{name}.{state}", layout.dtype_of(state), (numel_of_state(state, sizes[name]),))
        for name in layout.order
        for state in names
    ]
    file = TensorPartsWriter(folder / STATES, layouts)
    files.append(file)
    return {(name, state): [Target(file, f"{name}.{state}")] for name in layout.order for state in names}


def _state_names(engine: StreamingEngine) -> list[str]:
    """Return the names of a parameter's states in a save: "master", then the moments."""
    return list(dict.fromkeys(("master", *engine.layout.state_names)))


def _kind(engine: StreamingEngine) -> dict[str, Any]:
    """Return the counts of steps and the dtypes, which are stored with every save of states."""
    layout = engine.layout
    return {"steps": dict(engine.steps), "weights": str(layout.weights), "states": str(layout.states)}


def _buffers(engine: StreamingEngine) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for _, name, buffer in persistent_buffers(engine.model)]


def saved_facts(engine: StreamingEngine, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts of a save, those given to `begin_save` with the counts of steps and the dtypes, after checking
    that its files fit this model. Raises ValueError for another model's save, or a folder that is not a save."""
    folder = Path(folder)
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        steps, kind = facts["steps"], (facts["weights"], facts["states"])
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no saved states: name a folder that session.save(...) wrote") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FACTS} is damaged ({error}): name another save") from None
    own = _kind(engine)
    if kind != (own["weights"], own["states"]):
        raise ValueError(
            f"{folder} holds weights and states of {' and '.join(kind)}, but this training has "
            f"{own['weights']} and {own['states']}: load it into one of the same kind"
        )
    if other := sorted(steps.keys() ^ own["steps"].keys()):
        raise ValueError(f"{folder} holds the states of another model: {other[0]} is only in one of the two")
    if missing := [name for name in (STATES, MODEL) if not (folder / name).is_file()]:
        raise ValueError(f"{folder} is incomplete, {missing[0]} is missing: name another save")
    with TensorFileReader(folder / STATES) as reader, TensorFileReader(folder / MODEL) as model:
        sizes = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
        for name, state in itertools.product(engine.layout.order, _state_names(engine)):
            reader.require(f"{name}.{state}", engine.layout.dtype_of(state), numel_of_state(state, sizes[name]))
        for name, buffer in _buffers(engine):
            model.require(name, buffer.dtype, buffer.numel())
    return facts


def put_back(engine: StreamingEngine, folder: str | os.PathLike[str], steps: Mapping[str, int]) -> None:
    """Replace the trained weights, their states and the buffers by those of a save that `saved_facts` has checked;
    `StreamingEngine.keep` completes it."""
    names, folder = _state_names(engine), Path(folder)
    layout = engine.layout
    coarser = not layout.own_masters and layout.dtype_of("master") != torch.float32  # bf16 masters of fp16 weights
    with TensorFileReader(folder / STATES) as reader, TensorFileReader(folder / MODEL) as model:

        def states_of(name: str) -> dict[str, torch.Tensor]:
            states = {state: reader.read(f"{name}.{state}") for state in names}
            if coarser and not steps[name]:  # its weights are still the initial ones, not those of its masters
                states[WEIGHTS] = model.read(name)
            return states

        engine.write_states(states_of, steps)
        for name, buffer in _buffers(engine):
            buffer.data.copy_(model.read(name))

"""Creates a store for a model, with as many versions of its states as fit on the disk, or opens an existing one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memascend.engine.errors import NotThisModel
from memascend.engine.in_place_update import store_space, versions_for
from memascend.engine.layout import Layout
from memascend.engine.mmap_tensors import collect_tensor_files
from memascend.engine.options import EngineOptions
from memascend.engine.state_files import owner_of
from memascend.engine.state_store import StateStore, stored_tensors
from memascend.engine.traffic import auxiliary_file_bytes
from memascend.storage.scratch import collect_scratch_files

log = logging.getLogger("memascend")
_ONE_VERSION = {
    "redoes": "gradients are stored with it, so that an interrupted step can be redone; each step writes and reads "
    "them once more",
    "replaces_without_redo": "without gradients to redo a step from: after a kill in the middle of a step training "
    "continues from the last checkpoint",
}


def create_state_store(
    folder: str | os.PathLike[str],
    layout: Layout,
    options: EngineOptions,
    faults: Any = None,
    *,
    buffers: int = 0,
    released: int = 0,
) -> tuple[StateStore, EngineOptions, str]:
    """Create a store, and return it with the options, completed by the number of versions, and the reason for that
    number. `buffers`: bytes of the model's buffers, for which space is added. `released`: see `StateStore.create`.
    Raises StorageError and ValueError."""
    auxiliary_bytes = auxiliary_file_bytes(layout, replace(options, versions=2, redo=True))
    chosen = versions_for(folder, layout, options, auxiliary_bytes=auxiliary_bytes, released=released)
    options = replace(options, versions=chosen.count)
    space = store_space(layout, chosen.count, options.gradients, options.state_slots, redo=options.redo)
    space = replace(space, slack=space.slack + 2 * buffers)
    store = StateStore.create(folder, owner_tag(layout), space, released=released, faults=faults)
    for kind, what in _ONE_VERSION.items():
        if getattr(options, kind):
            joined = ": " if kind == "redoes" else " "
            log.info("memascend: one version of the states (%s)%s%s", chosen.why, joined, what)
    return store, options, chosen.why


def open_state_store(
    folder: str | os.PathLike[str],
    layout: Layout,
    options: EngineOptions,
    faults: Any = None,
) -> tuple[StateStore, EngineOptions, dict[str, Any]]:
    """Open a store, and return it with the options, completed by its number of versions, and the record of its last
    completed step. Raises NotThisModel and InterruptedUpdate."""
    collect_scratch_files(folder, os.fspath(folder))
    try:
        store = StateStore.open(folder, owner_tag(layout), faults=faults)
    except NotThisModel as error:
        if owner_of(folder) is None:
            raise
        raise NotThisModel(
            f"{folder} holds the states of another model: {_difference(stored_tensors(folder), layout)}. Create the "
            "model as it was when they were created (configuration and dtype, blocks=, what is trained, states=), or "
            "name another folder for this one"
        ) from error
    try:
        kept = store.completed()
        if kept is None:
            raise NotThisModel(
                f"{folder} holds no completed step, since the start of the training was interrupted: remove it, and "
                "start again without resume"
            )
        collect_tensor_files(folder)
    except BaseException:
        store.close()
        raise
    return store, replace(options, versions=kept.get("versions", 2), redo=kept.get("redoes", True)), kept


def _difference(there: Mapping[str, tuple[str, int]], layout: Layout) -> str:
    """Describe the first difference between a store's tensors (dtype and bytes) and those of a layout."""
    kinds = {unit.key: ("weights", layout.weights, layout.unit_numel(unit)) for unit in layout.units}
    kinds |= {piece.key: ("states", layout.stored_states, layout.states_numel(piece)) for piece in layout.pieces}
    for key in kinds.keys() & there.keys():
        (what, dtype, _), (found, _) = kinds[key], there[key]
        if found != (wanted := str(dtype).removeprefix("torch.")):
            of_states = {"uint8": "int8"} if what == "states" else {}  # 8-bit moments, by the name of their option
            found, wanted = of_states.get(found, found), of_states.get(wanted, wanted)
            return f"its {what} are {found}, and this model's {wanted}"
    if extra := next((key for key in there if key not in kinds), None):
        return f"it has the part {extra!r} of the weights, which this model has not"
    for key, (_, dtype, numel) in kinds.items():
        if key not in there:
            return f"this model has the part {key!r} of the weights, which it has not"
        if there[key][1] != numel * dtype.itemsize:
            return (
                f"the part {key!r} of the weights takes {there[key][1]} bytes there, and {numel * dtype.itemsize} of "
                "this model"
            )
    return "names, shapes, or what is trained are others"


def matches_layout(folder: str | os.PathLike[str], layout: Layout) -> bool:
    """Return whether the states in the folder are those of this layout."""
    return owner_of(folder) == owner_tag(layout)


def owner_tag(layout: Layout) -> str:
    """Return the string that identifies the layout of a store's states (`owner` of `StateStore`)."""
    return f"streaming engine {layout.digest}"

"""A new home for a model, with as many versions of its states as the disk has room for; or one of an earlier run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memascend.engine.home import NotThisModel, StateHome, owner_of, tensors_in
from memascend.engine.layout import Layout
from memascend.engine.mapped import collect_tensor_files
from memascend.engine.one_version import beside, versions_for
from memascend.engine.options import EngineOptions
from memascend.engine.traffic import file_beside_bytes
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.scratch import collect_scratch_files

log = logging.getLogger("memascend")
_ONE_VERSION = {
    "redoes": "gradients are stored with it, so that an interrupted step can be redone; each step writes and reads "
    "them once more",
    "tears": "without gradients to redo a step from: after a kill in the middle of a step training continues from the "
    "last checkpoint",
}


def new_home(
    folder: str | os.PathLike[str],
    owner: str,
    layout: Layout,
    options: EngineOptions,
    config: DirectEngineConfig | None = None,
    faults: Any = None,
    *,
    buffers: int = 0,
    released: int = 0,
) -> tuple[StateHome, EngineOptions, str]:
    """(the home, the options with the number of versions, why so many), with room for so many bytes of the model's
    buffers. `released`: see `StateHome.create`. Raises StorageError, ValueError."""
    gradients, slots = options.gradients, options.state_slots
    asked = options.versions if options.redo else 1
    beside_two = file_beside_bytes(layout, replace(options, versions=2, redo=True))
    chosen = versions_for(
        folder, layout, asked, gradients, slots, redo=options.redo, beside_two=beside_two, released=released
    )
    options = replace(options, versions=chosen.count)
    extra = beside(layout, chosen.count, gradients, slots, redo=options.redo)
    extra["slack"] = extra.get("slack", 0) + 2 * buffers
    home = StateHome.create(
        folder,
        owned_by(owner, layout),
        layout.nbytes,
        versions=chosen.count,
        **extra,
        released=released,
        config=config,
        faults=faults,
    )
    for kind, what in _ONE_VERSION.items():
        if getattr(options, kind):
            joined = ": " if kind == "redoes" else " "
            log.info("memascend: one version of the states (%s)%s%s", chosen.why, joined, what)
    return home, options, chosen.why


def kept_home(
    folder: str | os.PathLike[str],
    owner: str,
    layout: Layout,
    options: EngineOptions,
    config: DirectEngineConfig | None = None,
    faults: Any = None,
) -> tuple[StateHome, EngineOptions, dict[str, Any]]:
    """(the home, the options with its number of versions, its last completed step). Raises NotThisModel, TornStates."""
    collect_scratch_files(folder, os.fspath(folder))
    try:
        home = StateHome.open(folder, owned_by(owner, layout), config=config, faults=faults)
    except NotThisModel as error:
        if owner_of(folder) is None:
            raise
        raise NotThisModel(
            f"{folder} holds the states of another model: {_difference(tensors_in(folder), layout)}. Create the model "
            "as it was when they were created (configuration and dtype, blocks=, what is trained, states=), or name "
            "another folder for this one"
        ) from error
    try:
        kept = home.completed()
        if kept is None:
            raise NotThisModel(f"{folder} holds no completed step: remove it and start again")
        collect_tensor_files(folder)
    except BaseException:
        home.close()
        raise
    return home, replace(options, versions=kept.get("versions", 2), redo=kept.get("redoes", True)), kept


def _difference(there: Mapping[str, tuple[str, int]], layout: Layout) -> str:
    """The first one between a home's tensors (dtype and bytes) and those of a layout."""
    kinds = {unit.key: ("weights", layout.weights, layout.unit_numel(unit)) for unit in layout.units}
    kinds |= {piece.key: ("states", layout.stored_states, layout.states_numel(piece)) for piece in layout.pieces}
    for key in kinds.keys() & there.keys():
        (what, dtype, _), (found, _) = kinds[key], there[key]
        if found != (wanted := str(dtype).removeprefix("torch.")):
            of_states = {"uint8": "int8"} if what == "states" else {}  # 8-bit moments by the name that asks for them
            found, wanted = of_states.get(found, found), of_states.get(wanted, wanted)
            return f"its {what} are {found}, and this model's {wanted}"
    if extra := next((key for key in there if key not in kinds), None):
        return f"it has {extra}, which this model has not"
    for key, (_, dtype, numel) in kinds.items():
        if key not in there:
            return f"this model has {key}, which it has not"
        if there[key][1] != numel * dtype.itemsize:
            return f"{key} takes {there[key][1]} bytes there, and {numel * dtype.itemsize} of this model"
    return "names, shapes, or what is trained are others"


def lies_as(folder: str | os.PathLike[str], owner: str, layout: Layout) -> bool:
    """Whether the states in the folder are those of this layout."""
    return owner_of(folder) == owned_by(owner, layout)


def owned_by(owner: str, layout: Layout) -> str:
    """What a home's states are of."""
    return f"{owner or 'streaming engine'} {layout.digest}"

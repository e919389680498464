"""The protocol of a system, and the search for systems. Adding a system only takes adding a folder.

`<name>/system.yaml` describes it, and `<name>/system.py` defines `SYSTEM`, an object that implements
`memascend.systems.System` (with the code for plans and simulations in `footprint.py` and `schedule.py`). A system
imports `memascend`, this package and itself, never another system. The folders named by MEMASCEND_SYSTEMS (separated by
colons) hold further systems; nothing else has to be changed for them.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

from memascend.baselines.protocol.deepspeed import DeepSpeedSystem, nvme_offload, scaled, swaps, zero3_config
from memascend.baselines.protocol.described import Described, PlannedSystem, read_description
from memascend.baselines.protocol.footprints import device_only, host_offload, ssd_offload
from memascend.baselines.protocol.runs import RunSpec, Sizes
from memascend.suggestions import did_you_mean
from memascend.systems import System

__all__ = [
    "DeepSpeedSystem",
    "Described",
    "PlannedSystem",
    "RunSpec",
    "Sizes",
    "System",
    "device_only",
    "folders",
    "host_offload",
    "load_system",
    "nvme_offload",
    "read_description",
    "scaled",
    "ssd_offload",
    "swaps",
    "system_names",
    "zero3_config",
]

VARIABLE = "MEMASCEND_SYSTEMS"


def folders() -> dict[str, Path]:
    """Return the folder of every system by name.

    Raises ValueError if two systems have the same name, or if a path in MEMASCEND_SYSTEMS is not a folder.
    """
    return _folders(os.environ.get(VARIABLE, ""))


@functools.cache
def _folders(further: str) -> dict[str, Path]:
    """Find the systems here and in `further`; those folders become part of this package, so that they can be
    imported."""
    package = sys.modules[__name__.rpartition(".")[0]]
    places = [Path(__file__).parents[1], *map(Path, filter(None, further.split(":")))]
    for place in places[1:]:
        if not place.is_dir():
            raise ValueError(f"{VARIABLE} names {place}, which is no folder")
        if str(place) not in package.__path__:
            package.__path__.append(str(place))
    found: dict[str, Path] = {}
    for path in (path.parent for place in places for path in sorted(place.glob("*/system.yaml"))):
        if path.name in found:
            raise ValueError(f"two systems are called {path.name!r}: {found[path.name]} and {path}")
        found[path.name] = path
    return found


def system_names() -> list[str]:
    """Return the names of all systems, sorted. Raises ValueError as `folders` does."""
    return sorted(folders())


def load_system(name: str, arm: str | None = None) -> System:
    """Return the system called `name`. Raises a one-line ValueError if it, or its arm, does not exist."""
    if name not in folders():
        hint = did_you_mean(name, system_names())
        raise ValueError(f"unknown system {name!r}{hint}; known systems: {', '.join(system_names())}")
    system: System = importlib.import_module(f"memascend.baselines.{name}.system").SYSTEM
    if arm is not None and arm not in system.arms:
        hint = did_you_mean(arm, system.arms)
        raise ValueError(f"system {name!r} has no arm {arm!r}{hint}; its arms: {', '.join(system.arms)}")
    return system

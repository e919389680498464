"""The systems that can be planned, simulated and trained, found by entry point: the library imports none of them.

A system is a folder that owns everything about it, in `baselines/` of this repository, which is the package
`memascend.baselines`; its `protocol` lists them. No torch here.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Protocol

from memascend.arrangements import Arrangement

GROUP = "memascend.systems"
_REINSTALL = "reinstall: make setup in a checkout, or install memascend again"


class System(Protocol):
    """What the library asks of a system; `memascend.baselines.protocol` has what systems on DeepSpeed share."""

    name: str
    label: str
    colour: str  # '#rrggbb', the same in every figure

    @property
    def arms(self) -> Mapping[str, Arrangement]:
        """Named variants; the first is the default."""

    def footprint(self, build: Any) -> None:
        """Book every buffer of one rank at the worst instant of a step, by the classes that a run uses.

        `build` is a `memascend.planner.footprint.RankFootprint`.
        """

    def schedule(self, step: Any) -> None:
        """Add the tasks of one optimizer step: what works on what, which buffers it takes, what waits for what.

        `step` is a `memascend.planner.step.Step`.
        """

    def defaults(self, arm: str) -> Mapping[str, Any]:
        """Keys of a training's configuration that an arm takes where the user names none."""

    def refuse(self, config: Any) -> None:
        """ValueError, in one line, for keys of a `memascend.training.config.TrainConfig` that it cannot follow."""

    def trainer(self, config: Any, prepared: dict[str, Any], run_id: str, swap: str) -> Any:
        """How it really trains: a `memascend.training.backends.Setup`, a backend with its settings.

        `prepared` holds facts of the model (`memascend.training.prepare`), `swap` the folder for swap files.
        """


@functools.cache
def provider() -> Any:
    """The module that lists and loads systems, looked up once; ValueError where none is installed."""
    found = list(importlib.metadata.entry_points(group=GROUP))
    if not found:
        raise ValueError(f"no systems are installed (entry point {GROUP}); {_REINSTALL}")
    try:
        return found[0].load()
    except ImportError as error:
        raise ValueError(f"the systems of {found[0].value} cannot be loaded ({error}); {_REINSTALL}") from None


def names() -> list[str]:
    """Every system, in the order in which they are shown."""
    return list(provider().system_names())


def load(name: str, arm: str | None = None) -> System:
    """The system called `name`. Raises ValueError, in one line, for an unknown system or arm."""
    system: System = provider().load_system(name, arm)
    return system


def require_states(name: str, arm: str | None, states: str, dtype: str) -> None:
    """ValueError, in one line, for 8-bit moments where the system, or weights of this type, cannot have them."""
    if states != "int8":
        return
    if not arrangement(name, arm).int8_states:
        what = f"system {name!r}" if arm is None else f"arm {arm!r} of system {name!r}"
        raise ValueError(
            f"states 'int8': {what} keeps no 8-bit moments: set --system lohan (or, in memory, --system in_memory "
            "--arm memascend_adamw), or --states fp32"
        )
    if dtype != "bf16":
        raise ValueError(
            "states 'int8' need bf16 weights, which are rounded stochastically and have no other master, but dtype is "
            f"{dtype!r}: set --dtype bf16, or --states fp32"
        )


def require_versions(name: str, versions: str) -> None:
    """ValueError, in one line, for versions of the states where the system keeps none."""
    if versions != "auto" and not hasattr(load(name), "stored_in"):
        raise ValueError(
            f"state_versions {versions!r}: system {name!r} keeps no versions of its states: remove it, or use --system "
            "lohan"
        )


def require_kept_states(name: str, checkpoints: str) -> None:
    """ValueError, in one line, where a run with less than full checkpoints could not go on."""
    if checkpoints == "full":
        return
    if not hasattr(load(name), "stored_in"):
        raise ValueError(
            f"checkpoints {checkpoints!r}: the states of system {name!r} do not outlive the run, only a full "
            "checkpoint does: remove it, or use --system lohan"
        )


def default_arm(name: str) -> str:
    return next(iter(load(name).arms))


def own_defaults(name: str, arm: str | None) -> Mapping[str, Any]:
    """Keys of a training's configuration that an arm takes where the user names none. Raises as `load` does."""
    return load(name, arm).defaults(arm_of(name, arm))


def arm_of(name: str, arm: str | None) -> str:
    """The arm itself, or the system's default. Raises ValueError for an unknown system or arm."""
    return arm if arm is not None and load(name, arm) else default_arm(name)


def arrangement(name: str, arm: str | None = None) -> Arrangement:
    """Of an arm, or of the system's default one. Raises ValueError, in one line, for what is unknown."""
    return load(name, arm).arms[arm_of(name, arm)]

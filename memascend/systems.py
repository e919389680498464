"""The systems that can be planned, simulated and trained; they are found by entry point, never imported directly.

A system is a folder that owns everything about it. The systems of this repository are in `baselines/`, which is the
package `memascend.baselines`; its `protocol` lists them. This module does not import torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Protocol

from memascend.arrangements import Arrangement

GROUP = "memascend.systems"
_REINSTALL = "reinstall: make setup in a checkout, or install memascend again"


class NoSchedule(ValueError):
    """A system whose steps cannot be simulated; its memory can be planned."""


class System(Protocol):
    """Interface of a system; `memascend.baselines.protocol` holds the code that systems on DeepSpeed share.

    Members that a system may also have, and what they mean to the code that looks for them:

    - `stored_in(versions, work)`: bytes on the SSD with that value of `--state-versions`. Present if the states outlive
      the run; `--state-versions` and `--checkpoints weights` or `none` are accepted then.
    - `states_folder(config)`: the folder of these states.
    - `accumulates_vertically`: present if `--accumulation vertical` is accepted.
    - `deepspeed_config(spec, sizes, swap)`: the DeepSpeed configuration of a timed run of the harness.
    - `planned_config(work, nvme_path)`: the same for a planned run (`plan --write-config`).
    """

    name: str
    label: str
    colour: str  # '#rrggbb', the same in every figure

    @property
    def arms(self) -> Mapping[str, Arrangement]:
        """Named variants of the system; the first is the default."""

    def footprint(self, build: Any) -> None:
        """Book every buffer of one rank at the peak of a step, using the classes that a run uses.

        `build` is a `memascend.planner.footprint.RankFootprint`.
        """

    def schedule(self, step: Any) -> None:
        """Add the tasks of one optimizer step with their work, their buffers and their dependencies.

        `step` is a `memascend.planner.step.Step`.
        """

    def defaults(self, arm: str) -> Mapping[str, Any]:
        """Return the training configuration keys that an arm uses unless the user sets them."""

    def refuse(self, config: Any) -> None:
        """Raise a one-line ValueError for keys of a `memascend.training.config.TrainConfig` that it cannot honour."""

    def trainer(self, config: Any, prepared: dict[str, Any], run_id: str, swap: str) -> Any:
        """Return a `memascend.training.backends.Setup`, the backend with its settings that runs the real training.

        `prepared` holds facts of the model (`memascend.training.prepare`), `swap` the folder for swap files.
        """


@functools.cache
def provider() -> Any:
    """Return the module that lists and loads systems, looked up once.

    Raises ValueError if none is installed or it cannot be imported.
    """
    found = list(importlib.metadata.entry_points(group=GROUP))
    if not found:
        raise ValueError(f"no systems are installed (entry point {GROUP}); {_REINSTALL}")
    try:
        return found[0].load()
    except ImportError as error:
        raise ValueError(f"the systems of {found[0].value} cannot be loaded ({error}); {_REINSTALL}") from None


def names() -> list[str]:
    """Return the names of all systems, in the order in which they are shown."""
    return list(provider().system_names())


def load(name: str, arm: str | None = None) -> System:
    """Return the system called `name`. Raises a one-line ValueError for an unknown system or arm."""
    system: System = provider().load_system(name, arm)
    return system


def require_states(name: str, arm: str | None, states: str, dtype: str) -> None:
    """Raise a one-line ValueError if 8-bit moments are requested and the system or the weights' dtype excludes them."""
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
    """Raise a one-line ValueError if versions of the states are requested and the system keeps none."""
    if versions != "auto" and not hasattr(load(name), "stored_in"):
        raise ValueError(
            f"state_versions {versions!r}: system {name!r} keeps no versions of its states: remove it, or use --system "
            "lohan"
        )


def require_order(name: str, order: str) -> None:
    """Raise ValueError if a system cannot run the micro-batches of a step in the order `order`."""
    if order == "vertical" and not hasattr(load(name), "accumulates_vertically"):
        raise ValueError(
            f"accumulation 'vertical': system {name!r} only supports horizontal accumulation: remove it, or use "
            "--system lohan"
        )


def require_kept_states(name: str, checkpoints: str) -> None:
    """Raise a one-line ValueError if checkpoints are not full and the system's states do not outlive the run."""
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
    """Return the training configuration keys that an arm uses unless the user sets them. Raises as `load` does."""
    return load(name, arm).defaults(arm_of(name, arm))


def arm_of(name: str, arm: str | None) -> str:
    """Return `arm`, or the system's default if it is None. Raises ValueError for an unknown system or arm."""
    return arm if arm is not None and load(name, arm) else default_arm(name)


def arrangement(name: str, arm: str | None = None) -> Arrangement:
    """Return the arrangement of an arm (None: the default one). Raises a one-line ValueError for unknown names."""
    return load(name, arm).arms[arm_of(name, arm)]

"""Systems described by a `system.yaml`: name, label, colour, paper, what runs or is simulated, a sentence per arm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memascend.arrangements import Arrangement
from memascend.deprecation import warn_renamed
from memascend.memory.placement_policy import LATENCY_FIRST, PlacementPolicy
from memascend.systems import NoSchedule

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint
    from memascend.planner.step import Step


@dataclass(frozen=True, kw_only=True)
class Described:
    """A system with the name of its folder, described by the folder's `system.yaml`."""

    name: str

    @property
    def label(self) -> str:
        """Name as written in the paper, which is also the series of the default arm."""
        return self.describe()["label"]

    @property
    def colour(self) -> str:
        """Colour as `#rrggbb`, the same in every figure."""
        return self.describe()["colour"]

    def describe(self) -> dict[str, Any]:
        """Return the checked content of `system.yaml`. Raises a one-line ValueError that names the file and the key."""
        folder = Path(importlib.import_module(f"memascend.baselines.{self.name}.system").__file__).parent
        return read_description(folder)


@dataclass(frozen=True, kw_only=True)
class PlannedSystem(Described):
    """A system with arms, a footprint and a schedule; a system that can be run adds `refuse` and `trainer`."""

    arms: Mapping[str, Arrangement]
    buffers: Callable[[RankFootprint], None]
    tasks: Callable[[Step], None] | None = None  # None: its steps are not simulated yet
    chooses_policies: bool = False  # its schedule follows `Workload.activation_policies`

    @property
    def chooses_fates(self) -> bool:
        """Deprecated name of `chooses_policies`."""
        warn_renamed("PlannedSystem.chooses_fates", "PlannedSystem.chooses_policies")
        return self.chooses_policies

    def defaults(self, arm: str) -> Mapping[str, Any]:
        """Return the training configuration keys that an arm uses unless the user sets them."""
        return {}

    @staticmethod
    def refuse_a_plan_of_states(placement: str | None) -> None:
        """Raise ValueError for the placement `latency_first`, which plans states in host memory.

        Systems with states on the SSD call this.
        """
        if placement is not None and PlacementPolicy.parse(placement).kind == LATENCY_FIRST:
            raise ValueError(
                "placement 'latency_first' plans states in host memory, and these are on the SSD: name nodes, as "
                "'{gradients: 0, weights: 1}'"
            )

    def footprint(self, build: RankFootprint) -> None:
        """Book every buffer of one rank at the peak of a step."""
        self.buffers(build)

    def schedule(self, step: Step) -> None:
        """Add the tasks of one optimizer step. Raises NoSchedule if the system has no schedule."""
        if self.tasks is None:
            raise NoSchedule(f"system {self.name!r} has no schedule: its steps cannot be simulated")
        self.tasks(step)


def _with_former_names(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PlannedSystem.__init__` so that it accepts the deprecated keyword `chooses_fates`, until 2.0."""

    @wraps(init)
    def renamed(self: PlannedSystem, **fields: Any) -> None:
        if "chooses_fates" in fields:
            warn_renamed("PlannedSystem(chooses_fates=...)", "chooses_policies=...")
            fields["chooses_policies"] = fields.pop("chooses_fates")
        init(self, **fields)

    return renamed


PlannedSystem.__init__ = _with_former_names(PlannedSystem.__init__)  # type: ignore[method-assign]


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's system.yaml. Raises ValueError, naming the file and the key, if it is
    incomplete."""
    path = folder / "system.yaml"
    described = yaml.safe_load(path.read_text(encoding="utf-8"))
    missing = [key for key in ("name", "label", "colour", "paper", "runs", "arms") if key not in (described or {})]
    if missing:
        raise ValueError(f"{path}: the key {missing[0]!r} is missing")
    if described["name"] != folder.name:
        raise ValueError(f"{path}: name is {described['name']!r}, and the folder is called {folder.name!r}")
    return described

"""What several storage paths mean for a plan: what lies on each and is written to it, its life, and a step without it.

No torch here. Which path gets what follows from the system's schedule on the described machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memascend.planner.machine import MachineSpec
from memascend.planner.step import step_of
from memascend.planner.step_time import step_time
from memascend.planner.workload import Workload

DAY_S = 86_400
TB = 10**12


@dataclass(frozen=True, kw_only=True)
class PathPlan:
    """One path of a run. `seconds_without`: of a step over the others; None where none is left, or no time known."""

    name: str
    share: float  # of the optimizer states that are on paths
    stored_bytes: int
    write_bytes_per_step: int
    seconds_without: float | None
    days_of_life: float | None


def plan_paths(
    work: Workload, machine: MachineSpec | None, seconds: float | None, rated_tb: float | None
) -> list[PathPlan]:
    """The paths of `work` on `machine`, in its order; none for a system that does not use several.

    `seconds` of a step over all of them; `rated_tb`: what each drive may be written in its life. Raises ValueError
    where the run names another number of paths than the machine has.
    """
    if not work.arrangement.over_paths or machine is None or not machine.described.get("paths"):
        return []
    described = machine.described["paths"]
    named = work.arrangement.parts.get("tiers")
    if named and len(named) != len(described):
        raise ValueError(
            f"the configuration names {len(named)} tiers, the testbed {machine.name} {len(described)} paths: describe "
            "the tiers' rates under `paths`, in the same order"
        )
    step = step_of(work, machine)
    written = [sum(task.needs.get(f"{path['name']}.write", 0.0) for task in step.tasks) for path in described]
    stored, whole = sum(step.stored_bytes.values()), sum(written)
    plans = []
    for number, path in enumerate(described):
        share = written[number] / whole if whole else 0.0
        life = None
        if rated_tb is not None and seconds and written[number]:
            life = rated_tb * TB / written[number] * seconds / DAY_S
        plans.append(
            PathPlan(
                name=named[number] if named else path["name"],
                share=share,
                stored_bytes=round(share * stored),
                write_bytes_per_step=round(written[number]),
                seconds_without=_without(work, machine, number) if seconds and share else None,
                days_of_life=life,
            )
        )
    return plans


def _without(work: Workload, machine: MachineSpec, number: int) -> float | None:
    """Seconds of a step over all paths but that one."""
    left = [path for other, path in enumerate(machine.described["paths"]) if other != number]
    if not left:
        return None
    parts: dict[str, Any] = dict(work.arrangement.parts)
    for key in ("tiers", "tier_placement"):  # a list of folders, or a ratio by hand
        if isinstance(parts.get(key), list | tuple):
            parts[key] = [each for other, each in enumerate(parts[key]) if other != number]
    fewer = dataclasses.replace(machine, described={**machine.described, "paths": left})
    alone = dataclasses.replace(work, parts=dataclasses.replace(work.arrangement, parts=parts))
    return step_time(alone, fewer).seconds

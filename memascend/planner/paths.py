"""Plans over several storage paths: the data on each path, its writes per step, its lifetime, and steps without it.

The distribution over the paths follows from the system's schedule on the described machine. This module does not import
torch.
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
    """One path of a run.

    `seconds_without`: duration of a step without this path; None if it is the only path or is not written, or if times
    are unknown.
    """

    name: str
    share: float  # of the bytes that a step writes to paths, and thus of the bytes stored on them
    stored_bytes: int
    write_bytes_per_step: int
    seconds_without: float | None
    days_of_life: float | None


def plan_paths(
    work: Workload, machine: MachineSpec | None, seconds: float | None, rated_tb: float | None
) -> list[PathPlan]:
    """Return the paths of `work` on `machine`, in the machine's order; empty if the system does not use several.

    `seconds`: duration of a step over all paths. `rated_tb`: lifetime writes of each drive in TB. Raises ValueError if
    the run names a different number of paths than the machine has.
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
    """Return the seconds of a step over all paths except number `number`; None if no path is left."""
    left = [path for other, path in enumerate(machine.described["paths"]) if other != number]
    if not left:
        return None
    parts: dict[str, Any] = dict(work.arrangement.parts)
    for key in ("tiers", "tier_placement"):  # a list of folders, or an explicit ratio
        if isinstance(parts.get(key), list | tuple):
            parts[key] = [each for other, each in enumerate(parts[key]) if other != number]
    fewer = dataclasses.replace(machine, described={**machine.described, "paths": left})
    alone = dataclasses.replace(work, parts=dataclasses.replace(work.arrangement, parts=parts))
    return step_time(alone, fewer).seconds

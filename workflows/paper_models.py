"""What a paper's rows are computed with: its models and constants, steps simulated on testbeds, plans.

A paper's folder says in models.yaml what its models are (keys of a Hugging Face config.json, where no configuration is
committed) and in calibrations.yaml which constants it takes, each with its reason, its reach and what it was solved
from, and which exhibits they, and the planner's, are `behind`; the reason of one that the paper leaves out begins with
"assumed". Those that bear the name of a field of `memascend.planner.machine.Calibrations` are what simulations run
with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from hardware.registry import load_testbed
from memascend.planner import Workload, model_spec
from memascend.planner.machine import Calibrations, MachineSpec, machine_from_testbed
from memascend.planner.spec import ModelSpec, spec_from_config
from memascend.planner.step_time import StepTime, step_time
from memascend.planner.workload import papers
from memascend.simulator.calibration import Calibration
from memascend.simulator.trace import Event
from workflows import registry
from workflows.cases import Row, row

ONE_STEP = "memascend.simulator: one step"


@dataclasses.dataclass(frozen=True)
class Paper:
    """What one paper's rows are made with; `testbed`: theirs, where they name no other."""

    name: str
    testbed: str = ""

    @property
    def constants(self) -> dict[str, Calibration]:
        return constants(self.name)

    def value(self, constant: str) -> float:
        return self.constants[constant].value

    def costs(self, **changes: Any) -> Calibrations:
        """The constants that are fields of `Calibrations`; none of another paper's."""
        fields = {field.name for field in dataclasses.fields(Calibrations)}
        mine = {name: each.value for name, each in self.constants.items() if name in fields}
        return Calibrations(**({"host_seconds_per_parameter": 0.0} | mine | changes))

    def spec(self, model: str) -> ModelSpec:
        return spec(self.name, model)

    def step(
        self, system: str, arm: str | None, model: str, machine: MachineSpec, costs: Calibrations, **work: Any
    ) -> StepTime:
        """A step of an arm, simulated. `work`: fields of `Workload`."""
        mine = Workload(**({"spec": self.spec(model), "system": system, "arm": arm, "dtype": "bf16"} | work))
        return step_time(papers(mine), machine, calibrations=costs)

    def shown(self, exhibit: str, metric: str, value: float | str, unit: str, source: str, **cells: Any) -> Row:
        """A row of the modelled lane."""
        return row(exhibit, metric, value, unit, "modelled", source, **{"testbed": self.testbed} | cells)

    def bars(
        self, exhibit: str, found: dict[tuple[str, str], list[float]], source: str = ONE_STEP, **cells: Any
    ) -> Iterator[Row]:
        """What `spans` found, as a timeline's rows."""
        for (line, name), (begin, end) in found.items():
            yield self.shown(exhibit, name, end - begin, "s", source, series=line, x=("begin (s)", begin), **cells)

    def assumptions(self) -> Iterator[Row]:
        """A row for each constant in each exhibit that it is behind: captions list them."""
        for group in registry.read(registry.file_of(self.name, "calibrations.yaml"))["behind"]:
            for exhibit in group["exhibits"]:
                for name in group.get("constants", []):
                    named = dataclasses.replace(self.constants[name], name=name.replace("_", " "))
                    yield assumption(f"{self.name}-{exhibit}", group["testbed"], named)


def assumption(exhibit: str, testbed: str, each: Calibration) -> Row:
    cells = {"testbed": testbed, "x": ("constant", each.name)}
    source = f"{each.reason}. Reach: {each.reach}"
    return row(exhibit, "calibration", each.value, each.unit, "modelled", source, **cells)


@cache
def constants(paper: str) -> dict[str, Calibration]:
    """calibrations.yaml of a paper's folder, by name; empty where there is none."""
    said = registry.read(registry.file_of(paper, "calibrations.yaml")) or {}
    made = {}
    for name, each in said.items():
        if name == "behind":
            continue
        given = {**each, "value": float(each["value"]), "solved_from": tuple(each.get("solved_from", ()))}
        made[name] = Calibration(name=name, **given)
    return made


@cache
def spec(paper: str, model: str) -> ModelSpec:
    known = registry.read(registry.file_of(paper, "models.yaml")) or {}
    return spec_from_config(known[model], name=model, display=model) if model in known else model_spec(model)


@cache
def machine(testbed: str) -> MachineSpec:
    return machine_from_testbed(load_testbed(testbed))


def spans(
    events: Iterable[Event], named: Callable[[Event], tuple[str, str] | None]
) -> dict[tuple[str, str], list[float]]:
    """First begin and last end of the events with one name, as `named` gives it: (line, bar), or None for none."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = named(event)
        if name is not None:
            span = found.setdefault(name, [event.begin_s, event.end_s])
            span[:] = min(span[0], event.begin_s), max(span[1], event.end_s)
    return found


def block_of(event: Event) -> int | None:
    """The block that an event is of, from 1."""
    number = event.name.partition("block ")[2].partition(".")[0]
    return int(number) + 1 if number else None

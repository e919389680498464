"""What a paper's rows are computed with: its models and constants, steps played on testbeds, plans.

A paper's folder says in models.yaml what its models are (keys of a Hugging Face config.json, where no configuration is
committed) and in calibrations.yaml which constants it takes, each with its reason, its reach and what it was solved
from; the reason of one that the paper leaves out begins with "assumed". Those that bear the name of a field of
`memascend.planner.machine.Calibrations` are what plays run with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from hardware.registry import load_testbed
from memascend.planner import Workload, model_spec
from memascend.planner.machine import Calibrations, Machine, machine_from_testbed
from memascend.planner.spec import ModelSpec, spec_from_config
from memascend.planner.step_time import StepTime, step_time
from memascend.planner.workload import papers
from memascend.simulator.calibration import Calibration
from memascend.simulator.trace import Event
from memascend.systems import arrangement
from workflows import registry
from workflows.cases import Row, row


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
        self, system: str, arm: str | None, model: str, machine: Machine, costs: Calibrations, **work: Any
    ) -> StepTime:
        """A step of an arm, played. `work`: fields of `Workload`."""
        mine = Workload(**({"spec": self.spec(model), "system": system, "arm": arm, "dtype": "bf16"} | work))
        return step_time(papers(mine), machine, calibrations=costs)

    def shown(self, exhibit: str, metric: str, value: float | str, unit: str, source: str, **cells: Any) -> Row:
        """A row of the modelled lane."""
        return row(exhibit, metric, value, unit, "modelled", source, **{"testbed": self.testbed} | cells)

    def assumptions(self, exhibits: dict[str, str], names: list[str] | None = None) -> Iterator[Row]:
        """A row for each constant (of those named) in each exhibit, whose testbed is given: captions list them."""
        for exhibit, testbed in exhibits.items():
            for name in names if names is not None else self.constants:
                each = self.constants[name]
                cells = {"testbed": testbed, "x_name": "constant", "x_value": name.replace("_", " ")}
                source = f"{each.reason}. Reach: {each.reach}"
                yield row(exhibit, "calibration", each.value, each.unit, "modelled", source, **cells)


@cache
def constants(paper: str) -> dict[str, Calibration]:
    """calibrations.yaml of a paper's folder, by name; empty where there is none."""
    said = registry.read(registry.file_of(paper, "calibrations.yaml")) or {}
    made = {}
    for name, each in said.items():
        given = {**each, "value": float(each["value"]), "solved_from": tuple(each.get("solved_from", ()))}
        made[name] = Calibration(name=name, **given)
    return made


@cache
def spec(paper: str, model: str) -> ModelSpec:
    known = registry.read(registry.file_of(paper, "models.yaml")) or {}
    return spec_from_config(known[model], name=model, display=model) if model in known else model_spec(model)


@cache
def machine(testbed: str) -> Machine:
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


def label(system: str, arm: str) -> str:
    return arrangement(system, arm).label

"""Inputs of a paper's rows: its models and constants, steps simulated on testbeds, and plans.

A paper's folder defines its models in models.yaml (keys of a Hugging Face config.json, where no configuration is
committed) and its constants in calibrations.yaml. Each constant has a reason, a reach and the numbers it was solved
from; `behind` lists the exhibits that use these constants and the planner's. If the paper does not state a constant,
its reason begins with "assumed". Constants named after a field of `memascend.planner.machine.Calibrations` are passed
to the simulations.
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
    """Models, constants and defaults that one paper's rows are computed with; `testbed` is used where a row names no
    other."""

    name: str
    testbed: str = ""

    @property
    def constants(self) -> dict[str, Calibration]:
        """Constants of the paper, by name."""
        return constants(self.name)

    def value(self, constant: str) -> float:
        """Return the value of a constant."""
        return self.constants[constant].value

    def costs(self, **changes: Any) -> Calibrations:
        """Return the paper's constants that are fields of `Calibrations`, with `changes` applied; other papers' are not
        used."""
        fields = {field.name for field in dataclasses.fields(Calibrations)}
        mine = {name: each.value for name, each in self.constants.items() if name in fields}
        return Calibrations(**({"host_seconds_per_parameter": 0.0} | mine | changes))

    def spec(self, model: str) -> ModelSpec:
        """Return a model of the paper, by the name in its models.yaml or a committed name."""
        return spec(self.name, model)

    def step(
        self, system: str, arm: str | None, model: str, machine: MachineSpec, costs: Calibrations, **work: Any
    ) -> StepTime:
        """Simulate one step of an arm. `work` sets fields of `Workload`."""
        mine = Workload(**({"spec": self.spec(model), "system": system, "arm": arm, "dtype": "bf16"} | work))
        return step_time(papers(mine), machine, calibrations=costs)

    def shown(self, exhibit: str, metric: str, value: float | str, unit: str, source: str, **cells: Any) -> Row:
        """Return a row of the modelled lane."""
        return row(exhibit, metric, value, unit, "modelled", source, **{"testbed": self.testbed} | cells)

    def bars(
        self, exhibit: str, found: dict[tuple[str, str], list[float]], source: str = ONE_STEP, **cells: Any
    ) -> Iterator[Row]:
        """Yield the result of `spans` as the rows of a timeline."""
        for (line, name), (begin, end) in found.items():
            yield self.shown(exhibit, name, end - begin, "s", source, series=line, x=("begin (s)", begin), **cells)

    def assumptions(self) -> Iterator[Row]:
        """Yield one row per constant and exhibit that uses it, for the captions to list."""
        for group in registry.read(registry.file_of(self.name, "calibrations.yaml"))["behind"]:
            for exhibit in group["exhibits"]:
                for name in group.get("constants", []):
                    named = dataclasses.replace(self.constants[name], name=name.replace("_", " "))
                    yield assumption(f"{self.name}-{exhibit}", group["testbed"], named)


def assumption(exhibit: str, testbed: str, each: Calibration) -> Row:
    """Return the row that states a constant behind an exhibit, with its reason and reach."""
    cells = {"testbed": testbed, "x": ("constant", each.name)}
    source = f"{each.reason}. Reach: {each.reach}"
    return row(exhibit, "calibration", each.value, each.unit, "modelled", source, **cells)


@cache
def constants(paper: str) -> dict[str, Calibration]:
    """Return the constants in calibrations.yaml of a paper's folder by name; empty if the paper has no such file."""
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
    """Return a model by the name in the paper's models.yaml, else a committed one."""
    known = registry.read(registry.file_of(paper, "models.yaml")) or {}
    return spec_from_config(known[model], name=model, display=model) if model in known else model_spec(model)


@cache
def machine(testbed: str) -> MachineSpec:
    """Return the machine of a testbed by its name."""
    return machine_from_testbed(load_testbed(testbed))


def spans(
    events: Iterable[Event], named: Callable[[Event], tuple[str, str] | None]
) -> dict[tuple[str, str], list[float]]:
    """Return the first begin and last end in seconds of the events that share a name.

    `named` returns (line, bar) for an event, or None to skip it.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = named(event)
        if name is not None:
            span = found.setdefault(name, [event.begin_s, event.end_s])
            span[:] = min(span[0], event.begin_s), max(span[1], event.end_s)
    return found


def block_of(event: Event) -> int | None:
    """Return the number of the transformer block that an event belongs to, counted from 1, or None."""
    number = event.name.partition("block ")[2].partition(".")[0]
    return int(number) + 1 if number else None

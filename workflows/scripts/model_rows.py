"""Rows of the modelled lane, and the names that its exhibits share."""

from __future__ import annotations

from typing import Any

from memascend.planner import Plan, Workload, model_spec, plan
from memascend.planner.footprint import GIB
from memascend.planner.workload import papers
from workflows.scripts import tidy

C1, C2, C3 = "memascend-c1", "memascend-c2", "memascend-c3"
DENSE = ("llama3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
FOUR = "4 dense models"

Row = dict[str, Any]


def row(exhibit: str, metric: str, value: float | str, unit: str, source: str, **cells: str) -> Row:
    """One row of the tidy table; numbers with nine significant digits."""
    shown = value if isinstance(value, str) else f"{value:.9g}"
    own = {"exhibit_id": exhibit, "metric": metric, "value": shown, "unit": unit, "lane": "modelled", "source": source}
    return dict.fromkeys(tidy.COLUMNS, "") | own | cells


def planned(exhibit: str, made: Plan, metric: str, nbytes: float, testbed: str, **cells: str) -> Row:
    """A row of one plan, in GiB."""
    work = made.work
    source = f"memascend.planner: {work.system}/{work.arm_name}, {work.dtype}"
    own = {"series": made.label, "model": work.spec.display, "testbed": testbed} | cells
    return row(exhibit, metric, nbytes / GIB, "GiB", source, **own)


def paper_plan(model: str, system: str, arm: str | None = None, dtype: str = "fp16", ranks: int = 1) -> Plan:
    """With the sizes that the papers' totals describe, and without activation checkpoints."""
    spec = model_spec(model)
    return plan(papers(Workload(spec=spec, system=system, arm=arm, dtype=dtype, ranks=ranks, context=0)))


def pair(model: str, dtype: str = "fp16", ranks: int = 1) -> tuple[Plan, Plan]:
    """(as published, MemAscend) for one model."""
    before, after = (paper_plan(model, system, dtype=dtype, ranks=ranks) for system in ("zero_infinity", "memascend"))
    return before, after

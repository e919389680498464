"""The rows of MemAscend's exhibits, in both lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workflows.cases import Row, join_seeds
from workflows.papers.memascend.rows import checks, data_flow, machines, measured_times, memory, nvme, sweeps, times
from workflows.records import Run


def modelled() -> Iterator[Row]:
    """Yield every row of the planner. Tables III and V have none, since they describe machines."""
    yield from memory.planned()
    yield from sweeps.planned()
    yield from times.rows()
    yield from data_flow.rows()


def measured(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield rows of run records; values that a fitted line gives for sizes that were not run have the lane
    ``modelled``."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    runs = [Run(record, record["_path"]) for record in kinds.get("training", [])]
    good = {kind: [r for r in found if r["status"] == "ok"] for kind, found in kinds.items()}
    rows = [*memory.measured([run for run in runs if not run.is_sweep and not run.is_curve]), *sweeps.measured(runs)]
    rows += measured_times.rows(good.get("step-times", []))
    checked = [r for r in good.get("bench", []) if r["benchmark"] == "overflow"] + good.get("bench-overflow", [])
    rows += [row for bench in checked for row in checks.each_way(bench)]
    rows += [row for record in kinds.get("testbed", []) for row in machines.rows(record)]
    yield from join_seeds(rows)
    benches = {"overflow": checks.rows, "nvme": nvme.rows}
    for record in good.get("bench", []):
        yield from benches.get(record["benchmark"], lambda _: ())(record)

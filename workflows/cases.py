"""The cases that an exhibit's rows are computed from, in both lanes: a plan on a paper's testbed, or a run of a twin.

A case knows its series, model, testbed, source and bytes. Bytes of a run become two rows: as measured, and times k², at
the original's size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from memascend.planner import Plan, Workload, model_spec, plan
from memascend.planner.footprint import GIB, PEAK
from memascend.planner.workload import papers
from workflows import tidy
from workflows.records import Run
from workflows.tidy import MEMASCEND, SCALED

Row = dict[str, Any]
X = tuple[str, float | str]  # name and value
FAILED = {"oom": "N/A (out of memory)", "timeout": "N/A (time-out)", "failed": "N/A (failed)"}
FOUR = "4 dense models"
LARGEST_SPREAD = 0.1  # spread of a time twin's ratio between the quartiles of its rounds, as a fraction
_FORMULA = "100 (1 - MemAscend / as published)"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan on the testbed of a paper's exhibit, with the same attribute names as `workflows.records.Run`."""

    made: Plan
    series: str
    model: str  # display name in figures
    testbed: str
    source: str
    peak_bytes: int
    check_bytes: int  # requested by the overflow check in addition to the gradient buffer
    lane = "modelled"
    ok = True
    k = 1

    @property
    def place(self) -> str:
        """The label under which averages over models are grouped."""
        return self.testbed

    def owned(self, owner: str) -> int:
        """Return the bytes that an owner requested in host memory."""
        return self.made.requested_bytes(owner)

    def components(self) -> dict[str, int]:
        """Return the bytes by component of Fig. 8."""
        return self.made.components()


Case = Planned | Run


def paper_plan(
    model: str, system: str, testbed: str, arm: str | None = None, dtype: str = "fp16", ranks: int = 1
) -> Planned:
    """Plan with the sizes that the papers' totals describe, and without activation checkpoints."""
    work = Workload(spec=model_spec(model), system=system, arm=arm, dtype=dtype, ranks=ranks, context=0)
    made = plan(papers(work))
    sizes = {"peak_bytes": made.host_bytes, "check_bytes": made.requested_bytes("overflow_check")}
    source = f"memascend.planner: {system}/{made.work.arm_name}, {dtype}"
    return Planned(made=made, series=made.label, model=work.spec.display, testbed=testbed, source=source, **sizes)


def row(
    exhibit: str, metric: str, value: float | str, unit: str, lane: str, source: str, x: X = ("", ""), **cells: str
) -> Row:
    """Return one row of the tidy table; numbers have nine significant digits."""
    shown = value if isinstance(value, str) else f"{value:.9g}"
    own = {"exhibit_id": exhibit, "metric": metric, "value": shown, "unit": unit, "lane": lane, "source": source}
    own |= {"x_name": x[0], "x_value": f"{x[1]:.6g}" if isinstance(x[1], float) else str(x[1])}
    return dict.fromkeys(tidy.COLUMNS, "") | own | cells


def of_record(record: dict[str, Any], exhibit: str, metric: str, value: float | str, unit: str, **cells: Any) -> Row:
    """Return a row of a record, with its host as the testbed unless `cells` names one."""
    own = {"lane": record.get("lane", "measured"), "source": record["key"], "testbed": record["host"]["name"]}
    return row(exhibit, metric, value, unit, **own | cells)


def of_case(
    exhibit: str, case: Case, metric: str, value: float | str, unit: str, formula: str = "", **cells: Any
) -> Row:
    """Return a row of a case. `formula` says how the modelled lane computes it; a run's source is always its record."""
    own = {"series": case.series, "model": case.model, "testbed": case.testbed} | cells
    source = formula if formula and case.lane == "modelled" else case.source
    return row(exhibit, metric, value, unit, case.lane, source, **own)


def in_bytes(exhibit: str, case: Case, metric: str, nbytes: float, **cells: Any) -> Iterator[Row]:
    """Yield bytes in GiB: for a plan as planned, for a run as measured and at the original's size."""
    yield of_case(exhibit, case, metric, nbytes / GIB, "GiB", **cells)
    if case.lane == "measured":
        yield of_case(exhibit, case, metric + SCALED, nbytes * case.k**2 / GIB, "GiB", **cells)


def reductions(exhibit: str, pairs: Iterable[tuple[Case, Case]], amount: Callable[[Case], float]) -> Iterator[Row]:
    """Yield the reduction in percent from the first to the second case of each pair, and the mean over models.

    The mean is given per place, and only where all four models of the paper are present.
    """
    by_place: dict[str, list[tuple[Case, Case]]] = defaultdict(list)
    for before, after in pairs:
        by_place[before.place].append((before, after))
    for place in sorted(by_place):
        found, keys = defaultdict(list), defaultdict(list)
        for before, after in by_place[place]:
            percent = 100 * (1 - amount(after) / amount(before))
            modelled = before.lane == "modelled"
            source = _FORMULA if modelled else f"{before.source} {after.source}"
            found[before.model].append((percent, before.k))
            keys[before.model].append(source)
            cells = {"series": MEMASCEND, "model": before.model, "testbed": before.testbed}
            yield row(exhibit, "reduction", percent, "%", before.lane, source, **cells)
        if all(model in found for model in tidy.DENSE):
            best = [[p for p, k in found[m] if k == min(k for _, k in found[m])] for m in tidy.DENSE]
            source = f"mean of {_FORMULA}" if modelled else " ".join(key for m in tidy.DENSE for key in keys[m])
            mean = sum(median(each) for each in best) / len(best)
            cells = {"series": MEMASCEND, "model": FOUR, "testbed": place}
            yield row(exhibit, "average reduction", mean, "%", before.lane, source, **cells)


def largest_under(
    exhibit: str, metric: str, unit: str, curve: Iterable[tuple[Case, int, float]], caps: dict[str, float], limit: int
) -> Iterator[Row]:
    """Yield the largest power of two among the x values whose peak is under each cap.

    `curve` has (case, x, GiB) entries. No row is given if the curve ends before `limit` while still below the cap.
    """
    sizes: dict[str, dict[int, tuple[Case, float]]] = defaultdict(dict)
    for case, x, size in curve:
        if x & (x - 1) == 0:
            sizes[case.series][x] = case, size
    for mine in sizes.values():
        for name, cap in caps.items():
            fits = [x for x, (_, size) in mine.items() if size <= cap]
            if fits and (max(fits) == limit or max(fits) < max(mine)):
                formula = "last power of two whose peak is under the cap"
                x = "memory cap (GiB)", name
                yield of_case(exhibit, mine[max(fits)][0], metric, max(fits), unit, formula, x=x)


def step_seconds(point: dict[str, Any]) -> list[float]:
    """Return the seconds of each whole step of an arm that took turns with others."""
    phases = (point[f"{phase}_s"] for phase in ("forward", "backward", "optimizer"))
    return [sum(step) for step in zip(*phases, strict=True)]


def ratio_by_rounds(one: Iterable[float], other: Iterable[float]) -> float:
    """Return the median ratio of `one` to `other`, taken round by round so that drift of the machine affects both
    alike."""
    return median(a / b for a, b in zip(one, other, strict=True))


def steady_ratio(one: Iterable[float], other: Iterable[float]) -> float | str:
    """Return the median ratio of `one` to `other` round by round, or why there is none: its quartiles are further apart
    than LARGEST_SPREAD of it."""
    low, middle, high = quartiles([a / b for a, b in zip(one, other, strict=True)])
    noise = f"N/A (quartiles {low:.2f} and {high:.2f}: the machine was busy)"
    return middle if high - low <= LARGEST_SPREAD * middle else noise


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile."""
    return tuple(quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3


def failed(exhibit: str, case: Any) -> Row:
    """Return the row that stands for the peak of a run that has none."""
    return of_case(exhibit, case, PEAK, FAILED.get(case.record["status"], "N/A"), "GiB")


def join_seeds(rows: list[Row]) -> list[Row]:
    """Merge rows that differ only in value and source into their median; a text (a failure) takes precedence over
    numbers."""
    same = defaultdict(list)
    for each in rows:
        same[tuple((c, each.get(c, "")) for c in tidy.COLUMNS if c not in ("value", "source"))].append(each)
    out = []
    for group in same.values():
        numbers = [tidy.numeric(each["value"]) for each in group]
        texts = [each["value"] for each, number in zip(group, numbers, strict=True) if number is None]
        value = texts[0] if texts else f"{median(n for n in numbers if n is not None):.9g}"
        sources = dict.fromkeys(key for each in group for key in each["source"].split())
        out.append({**group[0], "value": value, "source": " ".join(sources)})
    return out

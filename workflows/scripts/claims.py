"""Decide the papers' claims: one verdict for each lane, ``reproduced``, ``deviates`` or ``not checkable here``.

The form of a claim is described at the top of ``workflows/config/claims.yaml``. Each lane is computed from its own rows
alone.
"""

from __future__ import annotations

import argparse
import html
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import yaml

from workflows.scripts import tidy

LANES = ("modelled", "measured")
REPRODUCED, DEVIATES, NOT_CHECKABLE = "reproduced", "deviates", "not checkable here"
JOINS = {"mean": mean, "max": max, "min": min}
TWIN = re.compile(r"-k(\d+)(-r\d+)?$")


class Missing(Exception):
    """The rows that a claim needs are not in this lane's table; the message says which."""


@dataclass(frozen=True)
class Verdict:
    """A line of claims.csv."""

    claim_id: str
    exhibit_id: str
    lane: str
    verdict: str
    value: str
    expected: str
    tolerance: str
    unit: str
    reason: str
    testbed: str
    sentence: str


def twin_k(testbed: str) -> int:
    """The factor of a twin's testbed ``<host>/<model>-k<k>``; 1 for a full-size one."""
    found = TWIN.search(testbed)
    return int(found[1]) if found else 1


def select(rows: pd.DataFrame, selector: dict[str, Any]) -> pd.Series:
    """The one row that matches; of several twins on one host the largest, with one rank."""
    unknown = [column for column in selector if column not in tidy.COLUMNS]
    if unknown:
        raise tidy.TableError(f"claims: selector {selector}: {unknown[0]!r} is no column of the tidy table")
    mask = pd.Series(True, index=rows.index)
    for column, value in selector.items():
        mask &= rows[column] == str(value)
    found = rows[mask & ~rows["testbed"].str.contains(r"-r\d+$")]
    if found.empty:
        raise Missing(described(selector))
    if len(found) > 1:
        factor = found["testbed"].map(twin_k)
        hosts = found["testbed"].str.split("/").str[0]
        found = found[factor == factor.min()]
        if len(found) > 1 or hosts.nunique() > 1:
            raise tidy.TableError(
                f"claims: selector {selector} is ambiguous: it matches {len(found)} rows of one twin or several hosts"
            )
    return found.iloc[0]


def described(selector: dict[str, Any]) -> str:
    """The row that a selector asks for, in words."""
    given = dict(selector)
    what = given.pop("metric", "a row")
    series, place = given.pop("series", None), given.pop("x_name", None)
    of = [str(name) for name in (series, given.pop("model", None)) if name]
    at = f" at {place or 'x'} {given.pop('x_value')}" if "x_value" in given else ""
    rest = "".join(f", {column} {value}" for column, value in given.items())
    return f"{what}{' of ' if of else ''}{', '.join(of)}{at}{rest}"


class Computation:
    """The value of one claim in one lane; remembers the testbeds it read."""

    def __init__(self, rows: pd.DataFrame, claim: dict[str, Any], twin_scale: bool) -> None:
        self.rows, self.claim, self.twin_scale = rows, claim, twin_scale
        self.testbeds: list[str] = []

    def value(self) -> float:
        over = self.claim.get("over")
        if over is None:
            return self._once({})
        ((column, values),) = over.items()
        results, missing = [], []
        for value in values:
            try:
                results.append(self._once({column: value}))
            except Missing:
                missing.append(str(value))
        if missing:
            raise Missing(f"{column} {', '.join(missing)}")
        return JOINS[self.claim["join"]](results)

    def _once(self, fixed: dict[str, Any]) -> float:
        compute = self.claim["compute"]
        number = {name: self._operand(compute[name], fixed) for name in compute if name != "operation"}
        match compute["operation"]:
            case "value":
                return number["of"]
            case "ratio":
                return number["of"] / number["to"]
            case "difference":
                return number["of"] - number["minus"]
            case "percent":
                return 100 * number["of"] / number["to"]
            case "reduction_percent":
                return 100 * (1 - number["to"] / number["from"])
        raise tidy.TableError(f"claims: {self.claim['id']}: unknown operation {compute['operation']!r}")

    def _operand(self, selectors: Any, fixed: dict[str, Any]) -> float:
        return sum(
            self._number({**selector, **fixed})
            for selector in (selectors if isinstance(selectors, list) else [selectors])
        )

    def _number(self, selector: dict[str, Any]) -> float:
        found = select(self.rows, selector)
        number = tidy.numeric(found["value"])
        if number is None:
            raise Missing(f"{described(selector)} is {found['value']}")
        if found["testbed"] not in self.testbeds:
            self.testbeds.append(found["testbed"])
        return number * (twin_k(found["testbed"]) ** 2 if self.twin_scale else 1)


def expected_ends(claim: dict[str, Any], lane: dict[str, Any]) -> tuple[float, float]:
    """(lowest, highest) accepted value before the tolerance; an open end is infinite."""
    source = lane if "expected" in lane or "expected_range" in lane else claim
    if "expected" in source:
        return float(source["expected"]), float(source["expected"])
    low, high = source["expected_range"]
    return (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))


def with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}".rstrip()


def points(amount: float) -> str:
    return f"{amount:g} {'point' if amount == 1 else 'points'}"


def expected_text(low: float, high: float, unit: str, tolerance: dict[str, float] | None) -> str:
    """An expectation as a reader wants it, with its unit; a tolerance of 0 makes one value an exact one."""
    if low == high:
        exactly = "exactly " if tolerance is not None and not any(tolerance.values()) else ""
        return exactly + with_unit(f"{low:,.6g}", unit)
    if math.isinf(low):
        return with_unit(f"at most {high:,.6g}", unit)
    return with_unit(f"at least {low:,.6g}" if math.isinf(high) else f"{low:,.6g} to {high:,.6g}", unit)


def widened(low: float, high: float, tolerance: dict[str, float]) -> tuple[float, float]:
    """Both ends moved outwards by the tolerance."""
    ((kind, amount),) = tolerance.items()
    margins = [abs(end) * amount / 100 if kind == "relative_percent" else amount for end in (low, high)]
    return low - margins[0], high + margins[1]


def tolerance_text(low: float, high: float, unit: str, tolerance: dict[str, float] | None) -> str:
    """What is accepted beside the expectation; empty where nothing is."""
    ((kind, amount),) = (tolerance or {"absolute": 0}).items()
    if amount == 0:
        return ""
    if kind == "relative_percent":
        margin = f"{amount:g} % of it" if unit == "%" else f"{amount:g} %"
    else:
        margin = points(amount) if unit == "%" else with_unit(f"{amount:g}", unit)
    if low == high:
        return f"± {margin}"
    if math.isinf(low) or math.isinf(high):
        return f"or up to {margin} {'more' if math.isinf(low) else 'less'}"
    return f"± {margin} at either end"


def decide(claim: dict[str, Any], lane_name: str, table: pd.DataFrame) -> Verdict:
    """The verdict of one claim in one lane of its exhibit's table."""
    lane = claim["lanes"][lane_name]
    low, high = expected_ends(claim, lane)
    common = {name: claim[name] for name in ("exhibit_id", "unit", "sentence")}
    common |= {"claim_id": claim["id"], "lane": lane_name}
    texts = low, high, claim["unit"], lane.get("tolerance")
    common |= {"expected": expected_text(*texts), "tolerance": tolerance_text(*texts)}
    undecided = {**common, "verdict": NOT_CHECKABLE, "value": "", "testbed": ""}
    if "not_checkable" in lane:
        return Verdict(**undecided, reason=lane["not_checkable"])
    low, high = widened(low, high, lane["tolerance"])
    computation = Computation(table[table["lane"] == lane_name], claim, lane.get("scale") == "twin")
    try:
        value = computation.value()
    except Missing as missing:
        return Verdict(**undecided, reason=f"not in this lane: {missing}")
    verdict = REPRODUCED if low - 1e-12 <= value <= high + 1e-12 else DEVIATES
    testbeds = " ".join(computation.testbeds)
    return Verdict(**common, verdict=verdict, value=f"{value:.6g}", reason=lane.get("why", ""), testbed=testbeds)


def of_built(claims: list[dict[str, Any]], registry: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Claims whose exhibit is built; those of the others are only committed, before their first run."""
    built = {entry["id"] for entry in registry if entry["status"] == "built"}
    return [claim for claim in claims if claim["exhibit_id"] in built]


def decide_all(claims: list[dict[str, Any]], tables: Path) -> list[Verdict]:
    """Both lanes of every claim; tables are ``<tables>/<exhibit id>.csv``."""
    read: dict[str, pd.DataFrame] = {}
    out = []
    for claim in claims:
        exhibit = claim["exhibit_id"]
        if exhibit not in read:
            read[exhibit] = tidy.read_table(tables / f"{exhibit}.csv")
        out += [decide(claim, lane, read[exhibit]) for lane in LANES]
    return out


COARSE_TWIN = 32  # from this divisor on, pages and Python objects are no longer small beside the buffers
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Claims and verdicts</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}}
.wide{{overflow-x:auto}}table{{border-collapse:collapse;width:100%}}
th,td{{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #ddd}}
td.n{{text-align:right;white-space:nowrap}}.v{{white-space:nowrap;font-weight:600}}
.reproduced{{color:#00674f}}.deviates{{color:#b34700}}.not{{color:#666;font-weight:400}}small{{color:#555}}
</style></head><body>
<h1>Claims and verdicts</h1>
<p>{summary} Tolerances were committed before the first run that they judge. <a href="index.html">All exhibits</a></p>
{sections}
</body></html>
"""


def value_text(value: float) -> str:
    """Four digits, and all of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def verdict_rows(verdicts: list[Verdict]) -> str:
    """HTML rows, one a claim and lane; also used by the report."""
    cells = []
    for v in verdicts:
        value = with_unit(value_text(float(v.value)), v.unit) if v.value else ""
        columns = (
            f"<td>{html.escape(v.sentence)}<br><small>{html.escape(v.claim_id)}</small></td>",
            f"<td>{v.lane}<br><small>{html.escape(v.testbed)}</small></td>",
            f"<td class=n>{html.escape(value)}</td>",
            f"<td class=n>{html.escape(v.expected)}<br><small>{html.escape(v.tolerance)}</small></td>",
            f"<td class='v {v.verdict.split()[0]}'>{v.verdict}</td>",
            f"<td><small>{html.escape(v.reason)}</small></td>",
        )
        cells.append(f"<tr>{''.join(columns)}</tr>")
    head = "<tr><th>The paper says</th><th>Lane</th><th>Value</th><th>Expected</th><th>Verdict</th><th>Note</th></tr>"
    return f"<div class=wide><table>{head}{''.join(cells)}</table></div>"


def coarse_twins(verdicts: list[Verdict]) -> str:
    """A sentence where small twins were judged; empty otherwise."""
    divisors = [int(k) for v in verdicts for k in re.findall(r"-k(\d+)", v.testbed)]
    if not divisors or max(divisors) < COARSE_TWIN:
        return ""
    return (
        f" Some twins here are of k = {max(divisors)}: one page of memory then stands for"
        f" {4 * max(divisors) ** 2 / 1024:.0f} MiB, so bytes are coarse; judge the paper by larger ones."
    )


def page(verdicts: list[Verdict]) -> str:
    """The claims as one HTML page without outside resources."""
    count = Counter((v.lane, v.verdict) for v in verdicts)
    summary = " ".join(
        f"{lane.capitalize()}: "
        + f"{count[lane, REPRODUCED]} {REPRODUCED}, "
        + f"{count[lane, DEVIATES]} {DEVIATES if count[lane, DEVIATES] == 1 else 'deviate'}, "
        + f"{count[lane, NOT_CHECKABLE]} {NOT_CHECKABLE}."
        for lane in LANES
    )
    summary += coarse_twins(verdicts)
    sections = []
    for exhibit in dict.fromkeys(v.exhibit_id for v in verdicts):
        mine = [v for v in verdicts if v.exhibit_id == exhibit]
        sections.append(f"<h2 id='{exhibit}'><a href='index.html#{exhibit}'>{exhibit}</a></h2>{verdict_rows(mine)}")
    return PAGE.format(summary=summary, sections="\n".join(sections))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=Path, required=True, help="workflows/config/claims.yaml")
    parser.add_argument("--registry", type=Path, required=True, help="workflows/config/exhibits.yaml")
    parser.add_argument("--tables", type=Path, required=True, help="folder of the exhibits' tidy tables")
    parser.add_argument("--out", type=Path, required=True, help="claims.csv")
    parser.add_argument("--page", type=Path, required=True, help="claims.html")
    args = parser.parse_args()
    try:
        document = yaml.safe_load(args.claims.read_text())
        tidy.check(document, "claims.schema.json", str(args.claims))
        registry = yaml.safe_load(args.registry.read_text())["exhibits"]
        verdicts = decide_all(of_built(document["claims"], registry), args.tables)
        tidy.write_table([asdict(v) for v in verdicts], args.out, [f.name for f in fields(Verdict)])
        tidy.atomically(args.page, lambda path: path.write_text(page(verdicts)))
    except (tidy.TableError, OSError, yaml.YAMLError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

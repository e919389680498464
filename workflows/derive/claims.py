"""Decide the papers' claims: one verdict for each lane, and what it rests on.

``reproduced`` or ``deviates``; ``no result`` where a run failed, timed out or was too noisy; ``not checkable here``
where nothing that runs here could decide. Only verdicts whose basis is ``held out`` count in the score; all are shown.
The form of a claim is described at the top of ``workflows/papers/memascend/claims.yaml``. Each lane is computed from
its own rows alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from memascend.planner.machine import CALIBRATIONS, PROCESS_OVERHEAD
from memascend.simulator.calibration import Calibration, CircularClaim, require_held_out
from workflows import registry, tidy
from workflows.derive import tolerances
from workflows.derive.table import paper_of, twin_k
from workflows.derive.tolerances import Tolerance
from workflows.paper_models import constants

LANES = ("modelled", "measured")
REPRODUCED, DEVIATES, NO_RESULT, NOT_CHECKABLE = "reproduced", "deviates", "no result", "not checkable here"
HELD_OUT, TWIN = "held out", "twin"
# What the papers' rows check before a time twin gets a number.
OF_A_TWIN = {
    "lohan": "a time twin whose device takes as long relative to its SSD as the testbed's in the model, within 10 %; "
    "host work is not compared",
    "mlpoffload": "a time twin whose paths' rates, relative to one another, and share of states in host memory are the "
    "testbed's within 10 %, and whose drive is busy for the share of a step that it is in the model, within 10 points; "
    "host work is not compared",
}
JOINS = {"mean": mean, "max": max, "min": min}
PLANNER = {each.name: each for each in (*CALIBRATIONS, PROCESS_OVERHEAD)}


class Missing(Exception):
    """The rows that a claim needs are missing from this lane's table; the message names them."""


class NoResult(Exception):
    """A run that the claim needs was made without a result; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """A line of claims.csv.

    `history` is empty unless the claim was changed, or written, after its result was known; `deviates_because` unless
    the verdict is *deviates* and the cause is known.
    """

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
    basis: str
    rests_on: str
    history: str
    deviates_because: str = ""

    @property
    def shown(self) -> str:
        """The value with its unit for readers; empty if there is none."""
        return with_unit(value_text(float(self.value)), self.unit) if self.value else ""

    @property
    def note(self) -> str:
        """Reason and history in one text; empty if there are none."""
        return ". ".join(filter(None, (self.reason, self.history)))


def select(rows: pd.DataFrame, selector: dict[str, Any]) -> pd.Series:
    """Return the one row that matches; among several twins on one host, the largest with one rank.

    Raises Missing if none matches, and TableError if the selector is ambiguous.
    """
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
    """Return in words the row that a selector asks for."""
    given = dict(selector)
    what = given.pop("metric", "a row")
    series, place = given.pop("series", None), given.pop("x_name", None)
    of = [str(name) for name in (series, given.pop("model", None)) if name]
    at = f" at {place or 'x'} {given.pop('x_value')}" if "x_value" in given else ""
    rest = "".join(f", {column} {value}" for column, value in given.items())
    return f"{what}{' of ' if of else ''}{', '.join(of)}{at}{rest}"


def failed_run(rows: pd.DataFrame, selector: dict[str, Any]) -> str | None:
    """Return why a measured row is missing if a run that it comes from failed: the text in place of its result.

    A failed run leaves one row with "N/A (...)" in place of its peak; that row fits if it differs only in the metric.
    """
    failed = rows[(rows["lane"] == "measured") & rows["value"].str.startswith("N/A")]
    for column, value in selector.items():
        if column != "metric":
            failed = failed[failed[column].isin(("", str(value)))]
    return None if failed.empty else str(failed.iloc[0]["value"])


class Computation:
    """The value of one claim in one lane; `testbeds` collects the testbeds of the rows that it read."""

    def __init__(self, rows: pd.DataFrame, claim: dict[str, Any], twin_scale: bool) -> None:
        self.rows, self.claim, self.twin_scale = rows, claim, twin_scale
        self.testbeds: list[str] = []

    def value(self) -> float:
        """Return the value, joined over the column of `over` if there is one. Raises Missing, NoResult, or TableError
        for an invalid claim."""
        over = self.claim.get("over")
        if over is None:
            return self._once({})
        ((column, values),) = over.items()
        results, missing = [], []
        for value in values:
            try:
                results.append(self._once({column: value}))
            except Missing:
                missing.append(str(value))  # a run without a result raises NoResult, which is not caught
        if missing:
            raise Missing(f"{self._named(column)} {', '.join(missing)}")
        return JOINS[self.claim["join"]](results)

    def _named(self, column: str) -> str:
        """Return a column by the name that readers know: for x its name, such as "context (tokens)"."""
        operands = [each for name, each in self.claim["compute"].items() if name != "operation"]
        selectors = [one for each in operands for one in (each if isinstance(each, list) else [each])]
        names = [one["x_name"] for one in selectors if "x_name" in one]
        return names[0] if column == "x_value" and names else column

    def _once(self, fixed: dict[str, Any]) -> float:
        """Compute the claim's operation, with the cells in `fixed` added to its selectors."""
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
        """Return the sum of the rows that the selectors choose."""
        several = selectors if isinstance(selectors, list) else [selectors]
        return sum(self._number({**selector, **fixed}) for selector in several)

    def _number(self, selector: dict[str, Any]) -> float:
        """Return the number of one row, and note its testbed; times k^2 if the claim scales a twin. Raises Missing or
        NoResult."""
        try:
            found = select(self.rows, selector)
        except Missing:
            failed = failed_run(self.rows, selector)
            if failed is None:
                raise
            raise NoResult(f"{described(selector)}: {failed}") from None
        number = tidy.numeric(found["value"])
        if number is None:
            ran = found["lane"] == "measured"
            raise (NoResult if ran else Missing)(f"{described(selector)} is {found['value']}")
        if found["testbed"] not in self.testbeds:
            self.testbeds.append(found["testbed"])
        return number * (twin_k(found["testbed"]) ** 2 if self.twin_scale else 1)


def expected_ends(claim: dict[str, Any], lane: dict[str, Any]) -> tuple[float, float]:
    """Return (lowest, highest) expected value before the tolerance; an open end is infinite."""
    source = lane if "expected" in lane or "expected_range" in lane else claim
    if "expected" in source:
        return float(source["expected"]), float(source["expected"])
    low, high = source["expected_range"]
    return (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))


def with_unit(number: str, unit: str) -> str:
    """Return a number with its unit, or alone if it has none."""
    return f"{number} {unit}".rstrip()


def expected_text(low: float, high: float, unit: str, tolerance: Tolerance | None) -> str:
    """Return an expectation with its unit for readers; with a tolerance of 0, a single value is called exact."""
    if low == high:
        exactly = "exactly " if tolerance is not None and not tolerance.margin(low) else ""
        return exactly + with_unit(f"{low:,.6g}", unit)
    if math.isinf(low):
        return with_unit(f"at most {high:,.6g}", unit)
    return with_unit(f"at least {low:,.6g}" if math.isinf(high) else f"{low:,.6g} to {high:,.6g}", unit)


def basis_of(claim: dict[str, Any], lane: str) -> str:
    """Return the basis of the claim's verdict in that lane."""
    return claim["basis"] if isinstance(claim["basis"], str) else claim["basis"][lane]


def rests_on(claim: dict[str, Any], lane: str, testbeds: Sequence[str] = ()) -> str:
    """Return what a verdict presupposes.

    This is the claim's own words or, in the modelled lane, the constants behind its exhibit on the testbeds that it
    read.
    """
    own = claim.get("rests_on", "")
    if basis_of(claim, lane) == TWIN:
        return OF_A_TWIN[paper_of(claim["exhibit_id"])]
    if basis_of(claim, lane) != HELD_OUT:
        return own
    if lane != "modelled":  # a measured verdict does not depend on the model's constants
        return ""
    if own and basis_of(claim, "measured") in (HELD_OUT, TWIN):
        return own
    found = constants_behind(claim, testbeds)
    return "; ".join(f"{name.replace('_', ' ')} ({found_how(each)})" for name, each in found.items())


def constants_behind(claim: dict[str, Any], testbeds: Sequence[str] = ()) -> dict[str, Calibration]:
    """Return the constants that calibrations.yaml lists behind a claim, the paper's own and the planner's, by name.

    A group names exhibits and, where only some of their rows use the constants, the `metrics` or testbeds (`rows_of`)
    of these rows. A claim that read no rows, since nothing decided it, gets the constants of all testbeds.
    """
    paper = paper_of(claim["exhibit_id"])
    if paper not in registry.PAPERS:
        return {}
    groups = (registry.read(registry.file_of(paper, "calibrations.yaml")) or {}).get("behind", [])
    metrics = {selector.get("metric") for selector in selectors(claim)}
    found: dict[str, Calibration] = {}
    for group in groups:
        named = claim["exhibit_id"].removeprefix(f"{paper}-") in group["exhibits"]
        if named and meets(group, "metrics", metrics) and meets(group, "rows_of", testbeds):
            found |= {name: constants(paper)[name] for name in group.get("constants", [])}
            found |= {name: PLANNER[name] for name in group.get("planner", [])}
    return found


def meets(group: dict[str, Any], key: str, read: Collection[str]) -> bool:
    """Return whether a group of constants applies to what was read: it names some of it, or restricts nothing."""
    return key not in group or not read or not set(group[key]).isdisjoint(read)


def found_how(each: Calibration) -> str:
    """Return in words where a constant comes from: solved from exhibits, assumed, or from a source."""
    if each.solved_from:
        places = dict.fromkeys(row.partition(":")[0].partition("-")[2] for row in each.solved_from)
        return f"solved from {', '.join(places)}"
    return "assumed" if each.reason.startswith("assumed") else "from a source"


def rows_expected(claim: dict[str, Any]) -> list[str]:
    """Return the ids of the published rows that a claim's expectation comes from, as in `Calibration.solved_from`.

    An id has exhibit (with the subfigure, if the claim names one), series, model, x and metric.
    """
    ids = []
    for row in selectors(claim):
        cells = (row.get(column, "") for column in ("series", "model", "x_value", "metric"))
        ids.append(":".join((claim["exhibit_id"] + row.get("subfigure", ""), *map(str, cells))))
    return ids


def selectors(claim: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the selector of every row that a claim is computed from, including the column of `over`."""
    fixed = [{c: v} for c, values in claim["over"].items() for v in values] if "over" in claim else [{}]
    operands = [operand for name, operand in claim["compute"].items() if name != "operation"]
    several = [selector for operand in operands for selector in (operand if isinstance(operand, list) else [operand])]
    return [{**selector, **more} for selector in several for more in fixed]


def refuse_circular(claim: dict[str, Any]) -> None:
    """Raise TableError if a modelled verdict counts as held out although a constant behind it was
    solved from its rows."""
    if basis_of(claim, "modelled") == HELD_OUT:
        try:
            mine = constants(paper_of(claim["exhibit_id"])).values()
            require_held_out(claim["id"], rows_expected(claim), (*PLANNER.values(), *mine))
        except CircularClaim as error:
            raise tidy.TableError(f"claims: {error}; its modelled basis is `calibrated`") from None


def history(claim: dict[str, Any], lane: str) -> str:
    """Return when a claim was committed, and when it or its tolerance was changed and how; empty if nothing was
    changed."""

    def when(stamp: dict[str, str]) -> str:
        return stamp["at"] + (f" ({stamp['commit']})" if "commit" in stamp else "")

    changes = claim.get("changed", [])
    parts = [f"{when(each)}: {each['what']}" for each in (changes if isinstance(changes, list) else [changes])]
    if "committed" in claim:
        parts[0] = f"committed {when(claim['committed'])}, changed {parts[0]}"
    return "; ".join(filter(None, (*parts, tolerances.history(claim["id"], lane))))


def decide(claim: dict[str, Any], lane_name: str, table: pd.DataFrame) -> Verdict:
    """Return the verdict of one claim in one lane of its exhibit's table."""
    lane = claim["lanes"][lane_name]
    low, high = expected_ends(claim, lane)
    common = {name: claim[name] for name in ("exhibit_id", "unit", "sentence")}
    common |= {"claim_id": claim["id"], "lane": lane_name, "history": history(claim, lane_name)}
    basis = basis_of(claim, lane_name)
    common |= {"basis": basis, "rests_on": rests_on(claim, lane_name)}
    tolerance = None if "not_checkable" in lane else tolerances.of(claim, lane_name, low, high)
    common |= {"expected": expected_text(low, high, claim["unit"], tolerance)}
    common |= {"tolerance": tolerance.text(low, high, claim["unit"]) if tolerance else ""}
    undecided = {**common, "verdict": NOT_CHECKABLE, "value": "", "testbed": ""}
    if tolerance is None:
        return Verdict(**undecided, reason=lane["not_checkable"])
    low, high = tolerance.widened(low, high)
    own = table[(table["lane"] == lane_name) & ~tidy.is_reference(table)]
    computation = Computation(
        own, claim | {"compute": lane.get("compute", claim["compute"])}, lane.get("scale") == "twin"
    )
    try:
        value = computation.value()
    except NoResult as failed:
        return Verdict(**undecided | {"verdict": NO_RESULT}, reason=str(failed))
    except Missing as missing:
        return Verdict(**undecided, reason=f"not in this lane: {missing}")
    verdict = REPRODUCED if low - 1e-12 <= value <= high + 1e-12 else DEVIATES
    because = lane.get("deviates_because", "") if verdict == DEVIATES else ""
    reason = ". ".join(filter(None, (lane.get("why"), lane.get("tolerance_because"))))
    common |= {"verdict": verdict, "reason": reason, "deviates_because": because}
    common |= {"rests_on": rests_on(claim, lane_name, computation.testbeds)}
    return Verdict(**common, value=f"{value:.6g}", testbed=" ".join(computation.testbeds))


def of_built(claims: list[dict[str, Any]], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims whose exhibit is built; the others are only committed, before their first run."""
    built = {entry["id"] for entry in entries if entry["status"] == "built"}
    return [claim for claim in claims if claim["exhibit_id"] in built]


def decide_modelled(claims: list[dict[str, Any]], table: Path) -> list[Verdict]:
    """Decide the modelled lane of every claim from that lane's table of all exhibits."""
    rows = tidy.read_table(table)
    for claim in claims:
        refuse_circular(claim)
    return [decide(claim, "modelled", rows[rows["exhibit_id"] == claim["exhibit_id"]]) for claim in claims]


def decide_all(claims: list[dict[str, Any]], tables: Path) -> list[Verdict]:
    """Decide both lanes of every claim; the tables are ``<tables>/<exhibit id>.csv``."""
    read: dict[str, pd.DataFrame] = {}
    out = []
    for claim in claims:
        refuse_circular(claim)
        exhibit = claim["exhibit_id"]
        if exhibit not in read:
            read[exhibit] = tidy.read_table(tables / f"{exhibit}.csv")
        out += [decide(claim, lane, read[exhibit]) for lane in LANES]
    return out


def value_text(value: float) -> str:
    """Format a value with four digits, or all integer digits of a number from 1000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def score(verdicts: list[Verdict], lane: str, basis: str = HELD_OUT) -> str:
    """Return a lane's verdicts of one basis in words."""
    return registry.scored(v.verdict for v in verdicts if v.lane == lane and v.basis == basis)


def read_verdicts(path: Path) -> list[Verdict]:
    """Return the lines of claims.csv."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [Verdict(**{f.name: line[f.name] for f in fields(Verdict)}) for line in table.to_dict("records")]


def write(verdicts: list[Verdict], out: Path) -> None:
    """Write claims.csv."""
    tidy.write_table([asdict(v) for v in verdicts], out, [f.name for f in fields(Verdict)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="claims.csv")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tables", type=Path, help="folder of the exhibits' tidy tables")
    source.add_argument("--modelled", type=Path, help="PAPER.csv, a paper's modelled lane, decided alone")
    args = parser.parse_args()
    try:
        claims = registry.claims()
        tidy.check({"claims": claims}, "claims.schema.json", "workflows/papers/*/claims.yaml")
        if args.modelled:
            if (paper := args.modelled.stem) not in registry.PAPERS:
                raise ValueError(f"{args.modelled}: name the table as its paper: {', '.join(registry.PAPERS)}")
            verdicts = decide_modelled([c for c in claims if c["exhibit_id"].startswith(f"{paper}-")], args.modelled)
        else:
            verdicts = decide_all(of_built(claims, registry.exhibits()), args.tables)
        write(verdicts, args.out)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

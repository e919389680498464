"""The modelled lane as the exhibits and the claims read it."""

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from hardware.registry import known_testbeds
from memascend.planner import Workload, plan
from memascend.planner.workload import papers
from tests.modelled_lane import modelled
from workflows import registry, tidy
from workflows.derive import claims, table
from workflows.papers.memascend.rows import sweeps, times
from workflows.trends import RELEASES

COMPUTED = [paper for paper in registry.PAPERS if table.rows_of(paper)]

ROOT = Path(__file__).parents[2]
# Exhibits whose modelled rows are drawn through measured ones, and are tested with those.
FROM_RECORDS = {"memascend-fig12"}


def rows(paper: str = "memascend") -> tuple[dict, ...]:
    return modelled(paper)


def claims_of(paper: str) -> list[dict]:
    return [claim for claim in registry.claims() if claim["exhibit_id"].startswith(f"{paper}-")]


@pytest.mark.parametrize("paper", COMPUTED)
def test_every_built_exhibit_with_a_modelled_lane_has_rows(paper):
    exhibits = [entry for entry in registry.exhibits() if entry["paper"] == paper]
    wanted = {e["id"] for e in exhibits if e["status"] == "built" and "modelled" in e["lanes"]}
    assert wanted - FROM_RECORDS <= {row["exhibit_id"] for row in rows(paper)} <= {e["id"] for e in exhibits}


@pytest.mark.parametrize("paper", COMPUTED)
def test_rows_name_their_lane_source_and_a_known_testbed(paper):
    for row in rows(paper):
        assert set(row) <= set(tidy.COLUMNS)
        if row["lane"] == "author":  # values from a tool's own pages, not a model's numbers
            assert row["source"].startswith("https://")
            continue
        assert row["lane"] == "modelled"
        assert row["source"]
        assert row["testbed"] in {*known_testbeds(), RELEASES}


@pytest.mark.parametrize("paper", COMPUTED)
def test_rows_have_unique_keys(paper):
    columns = ("exhibit_id", "subfigure", "series", "model", "x_name", "x_value", "metric")
    keys = Counter(tuple(row.get(c, "") for c in columns) for row in rows(paper))
    assert max(keys.values()) == 1


@pytest.mark.parametrize("paper", COMPUTED)
def test_each_selector_of_a_decidable_claim_finds_one_row(paper):
    modelled_exhibits = {row["exhibit_id"] for row in rows(paper)}
    for claim in claims_of(paper):
        if "not_checkable" in claim["lanes"]["modelled"] or claim["exhibit_id"] not in modelled_exhibits:
            continue
        fixed = [{c: v} for c, values in claim["over"].items() for v in values] if "over" in claim else [{}]
        operands = [value for key, value in claim["compute"].items() if key != "operation"]
        selectors = [s for operand in operands for s in (operand if isinstance(operand, list) else [operand])]
        for wanted in ({**selector, **more} for selector in selectors for more in fixed):
            found = [
                row
                for row in rows(paper)
                if row["exhibit_id"] == claim["exhibit_id"] and all(row.get(c, "") == v for c, v in wanted.items())
            ]
            assert len(found) == 1, (claim["id"], wanted)


@pytest.mark.parametrize("paper", [paper for paper in COMPUTED if claims_of(paper)])
def test_committed_verdicts_match_the_modelled_lane(paper):
    """results/reference/modelled is the record against which the README's score is tested."""
    made_rows = pd.DataFrame(rows(paper)).reindex(columns=tidy.COLUMNS).fillna("").astype(str)
    record = claims.read_verdicts(ROOT / f"results/reference/modelled/{paper}-claims.csv")
    committed = {verdict.claim_id: verdict for verdict in record}
    for claim in claims_of(paper):
        mine = made_rows[made_rows["exhibit_id"] == claim["exhibit_id"]]
        made = claims.decide(claim, "modelled", mine)
        assert made == committed.get(claim["id"]), "make the record again as its README says"


def test_components_of_figure_8_add_up_to_the_peak():
    mine = [row for row in rows() if row["exhibit_id"] == "memascend-fig08" and row["unit"] == "GiB"]
    for series in {row["series"] for row in mine}:
        parts = {row["metric"]: float(row["value"]) for row in mine if row["series"] == series}
        peak = parts.pop("peak system memory")
        assert sum(parts.values()) == pytest.approx(peak, rel=1e-6)


def test_table_ii_shows_which_models_run_out_of_memory():
    outcome = {
        (row["series"], row["model"]): row["value"]
        for row in rows()
        if row["exhibit_id"] == "memascend-tab02" and row["metric"] == "outcome"
    }
    assert outcome["All in GPU", "Llama3.2-1B"] == "fits"
    assert outcome["All in GPU", "Llama3.2-3B"] == "VRAM OOM"
    assert outcome["ZeRO-Offload", "Llama3.1-8B"] == "DRAM OOM"
    assert outcome["ZeRO-Infinity (as published)", "Llama3.1-8B"] == "fits"
    assert len(outcome) == 9


def number(**where: str) -> float:
    (found,) = (row for row in rows() if all(row[column] == value for column, value in where.items()))
    return float(found["value"])


@pytest.mark.parametrize("system", ["zero_infinity", "memascend"])
@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (1, 40_960), (3, 4096)])
def test_sweep_point_equals_the_plan_of_its_batch_and_context(system, batch, context):
    x_name = "batch" if context == 4096 else "context (tokens)"
    points = sweeps.curves("llama3.1-8b", x_name, [batch if context == 4096 else context])
    point = next(p for p in points if p.case.made.work.system == system)
    whole = plan(papers(Workload(spec=point.case.made.work.spec, system=system, ranks=2, batch=batch, context=context)))
    assert point.peak_bytes == whole.host_bytes


def test_batch_and_context_axes_agree_where_they_meet():
    for series in (tidy.AS_PUBLISHED, tidy.MEMASCEND):
        where = {"model": "Llama3.1-8B", "series": series, "metric": "peak system memory"}
        by_batch = number(exhibit_id="memascend-fig17", x_value="32", **where)
        assert by_batch == number(exhibit_id="memascend-fig16", x_value="131072", **where)


def test_hypothesis_h1_adds_the_same_to_both_systems():
    at = {"exhibit_id": "memascend-fig18", "subfigure": "a", "x_value": "4096"}
    added = [
        number(series=s, metric=sweeps.HYPOTHESIS, **at) - number(series=s, metric="peak system memory", **at)
        for s in (tidy.AS_PUBLISHED, tidy.MEMASCEND)
    ]
    assert added == pytest.approx([72.0, 72.0])  # 18,432 matrices, 2 MiB for each of two ranks


def test_improvements_are_given_for_the_sixteen_cells_of_each_table():
    for exhibit in ("memascend-tab04", "memascend-tab06"):
        series = times.TABLES[exhibit][0]  # the other reading of III-C has a separate series
        cells = [r for r in rows() if r["exhibit_id"] == exhibit and r["metric"] == "throughput improvement"]
        cells = [r for r in cells if r["series"] in (f"{series}, C1", f"{series}, C2")]
        assert Counter(r["testbed"] for r in cells) == {"memascend-c1": 8, "memascend-c2": 8}
        smallest = min(float(r["value"]) for r in cells)
        where = {"exhibit_id": exhibit, "metric": "smallest improvement"}
        assert number(series=series, **where) == smallest


def test_the_program_writes_the_tidy_table(tmp_path, monkeypatch):
    out = tmp_path / "derived" / "modelled.csv"
    monkeypatch.setattr("sys.argv", ["table", "--modelled-lane-of", "memascend", "--out", str(out)])
    table.main()
    assert len(tidy.read_table(out)) == len(rows())

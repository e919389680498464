"""Verdicts."""

from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import pytest
import yaml

from workflows.scripts import claims, tidy

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = yaml.safe_load((ROOT / "workflows/config/exhibits.yaml").read_text())["exhibits"]
CLAIM = {
    "id": "x-fig01-peak",
    "exhibit_id": "x-fig01",
    "sentence": "The peak is 100 GiB.",
    "quote": "100 GiB",
    "unit": "GiB",
    "compute": {"operation": "value", "of": {"series": "A", "metric": "peak"}},
    "expected": 100,
    "lanes": {
        "modelled": {"tolerance": {"relative_percent": 1}},
        "measured": {"tolerance": {"relative_percent": 1}, "scale": "twin"},
    },
}


def table(*rows: tuple[str, str, str, str]) -> pd.DataFrame:
    """Rows of (lane, series, value, testbed) with metric "peak" and model "M"."""
    cells = [{"lane": a, "series": s, "value": v, "testbed": t, "metric": "peak", "model": "M"} for a, s, v, t in rows]
    return pd.DataFrame(cells).reindex(columns=tidy.COLUMNS, fill_value="").fillna("")


def changed(**more: object) -> dict:
    return copy.deepcopy(CLAIM) | more


@pytest.mark.parametrize(
    ("value", "verdict"), [("100.9", claims.REPRODUCED), ("99.0", claims.REPRODUCED), ("101.2", claims.DEVIATES)]
)
def test_within_the_tolerance_or_not(value: str, verdict: str) -> None:
    found = claims.decide(CLAIM, "modelled", table(("modelled", "A", value, "c1"), ("measured", "A", "1", "h/m-k8")))
    assert (found.verdict, found.value) == (verdict, f"{float(value):g}")


def test_no_row_in_the_lane_is_not_checkable_and_says_which() -> None:
    found = claims.decide(CLAIM, "measured", table(("modelled", "A", "100", "c1")))
    assert found.verdict == claims.NOT_CHECKABLE
    assert "series A" in found.reason


def test_a_claim_that_cannot_be_checked_gives_its_reason_whatever_the_rows() -> None:
    claim = changed(lanes={"modelled": {"not_checkable": "needs two H100"}, "measured": CLAIM["lanes"]["measured"]})
    found = claims.decide(claim, "modelled", table(("modelled", "A", "100", "c1")))
    assert (found.verdict, found.reason) == (claims.NOT_CHECKABLE, "needs two H100")


def test_a_failed_run_is_not_checkable() -> None:
    found = claims.decide(CLAIM, "measured", table(("measured", "A", "N/A (time-out)", "h/m-k8")))
    assert found.verdict == claims.NOT_CHECKABLE
    assert "time-out" in found.reason


def test_twin_scale_and_the_largest_twin_with_one_rank() -> None:
    rows = (
        ("measured", "A", "1.5625", "h/m-k8"),
        ("measured", "A", "9", "h/m-k16"),
        ("measured", "A", "7", "h/m-k8-r2"),
    )
    found = claims.decide(CLAIM, "measured", table(*rows))
    assert (found.verdict, found.value, found.testbed) == (claims.REPRODUCED, "100", "h/m-k8")


def test_two_rows_of_one_twin_are_an_error() -> None:
    with pytest.raises(tidy.TableError, match="ambiguous"):
        claims.decide(CLAIM, "modelled", table(("modelled", "A", "1", "c1"), ("modelled", "A", "2", "c1")))


def test_a_lane_may_expect_another_value() -> None:
    lanes = copy.deepcopy(CLAIM["lanes"])
    lanes["measured"] |= {"expected": 98.4, "why": "without process overhead"}
    found = claims.decide(changed(lanes=lanes), "measured", table(("measured", "A", "1.5375", "h/m-k8")))
    assert (found.verdict, found.expected, found.reason) == (claims.REPRODUCED, "98.4", "without process overhead")


@pytest.mark.parametrize(
    ("operation", "operands", "value"),
    [
        ("ratio", ("of", "to"), 4.0),
        ("difference", ("of", "minus"), 75.0),
        ("percent", ("of", "to"), 400.0),
        ("reduction_percent", ("from", "to"), 75.0),
    ],
)
def test_operations(operation: str, operands: tuple[str, str], value: float) -> None:
    first, second = ({"series": s, "metric": "peak"} for s in "AB")
    claim = changed(compute={"operation": operation, operands[0]: first, operands[1]: second}, expected=value)
    found = claims.decide(claim, "modelled", table(("modelled", "A", "100", "c1"), ("modelled", "B", "25", "c1")))
    assert (found.verdict, float(found.value)) == (claims.REPRODUCED, value)


def test_a_list_of_selectors_is_summed() -> None:
    both = [{"series": "A", "metric": "peak"}, {"series": "B", "metric": "peak"}]
    claim = changed(compute={"operation": "value", "of": both})
    found = claims.decide(claim, "modelled", table(("modelled", "A", "60", "c1"), ("modelled", "B", "40", "c1")))
    assert found.verdict == claims.REPRODUCED


def test_over_needs_all_its_values() -> None:
    claim = changed(over={"model": ["M", "N"]}, join="mean")
    found = claims.decide(claim, "modelled", table(("modelled", "A", "100", "c1")))
    assert found.verdict == claims.NOT_CHECKABLE
    assert "N" in found.reason


@pytest.mark.parametrize(
    ("ends", "value", "verdict"),
    [
        ([None, 100], "90", claims.REPRODUCED),
        ([None, 100], "102", claims.DEVIATES),
        ([100, None], "99.5", claims.REPRODUCED),
    ],
)
def test_ranges(ends: list, value: str, verdict: str) -> None:
    claim = changed(expected_range=ends)
    del claim["expected"]
    assert claims.decide(claim, "modelled", table(("modelled", "A", value, "c1"))).verdict == verdict


@pytest.mark.parametrize(
    "change",
    [
        {
            "lanes": {
                "modelled": {"tolerance": {"relative_percent": 1, "absolute": 1}},
                "measured": {"not_checkable": "x"},
            }
        },
        {"expected_range": [0, 1]},
        {"compute": {"operation": "median", "of": {"series": "A"}}},
        {"over": {"model": ["M"]}},
        {"tolerance": 3},
    ],
)
def test_the_schema_refuses(change: dict) -> None:
    with pytest.raises(tidy.TableError, match="claims/0"):
        tidy.check({"claims": [changed(**change)]}, "claims.schema.json", "claims.yaml")


def test_the_committed_claims_fit_the_schema_and_get_every_kind_of_verdict(full: Path) -> None:
    document = yaml.safe_load((ROOT / "workflows/config/claims.yaml").read_text())
    tidy.check(document, "claims.schema.json", "claims.yaml")
    verdicts = claims.decide_all(claims.of_built(document["claims"], REGISTRY), full / "exhibits")
    assert len(verdicts) == 2 * len(claims.of_built(document["claims"], REGISTRY))
    assert {v.verdict for v in verdicts if v.lane == "measured"} == {
        claims.REPRODUCED,
        claims.DEVIATES,
        claims.NOT_CHECKABLE,
    }
    peak = next(v for v in verdicts if v.claim_id == "memascend-fig08-reduction" and v.lane == "measured")
    assert peak.verdict == claims.REPRODUCED


def test_the_page_needs_nothing_from_outside(full: Path) -> None:
    document = yaml.safe_load((ROOT / "workflows/config/claims.yaml").read_text())
    text = claims.page(claims.decide_all(claims.of_built(document["claims"], REGISTRY), full / "exhibits"))
    assert "http" not in text
    assert text.count("<tr>") > 2 * len(claims.of_built(document["claims"], REGISTRY))


def test_claims_of_an_exhibit_that_is_not_built_wait() -> None:
    registry = [{"id": "x-fig01", "status": "planned"}, {"id": "x-fig02", "status": "built"}]
    later = changed(id="x-fig02-peak", exhibit_id="x-fig02")
    assert claims.of_built([CLAIM, later], registry) == [later]

"""Verdicts on claims."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from markupsafe import Markup

from memascend.simulator.calibration import same_row
from workflows import registry, tidy
from workflows.derive import claims
from workflows.derive import errata as errata_page
from workflows.derive.site import content, judged, pages
from workflows.derive.table import paper_of
from workflows.derive.tolerances import Tolerance
from workflows.paper_models import constants

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = registry.exhibits()
CLAIM = {
    "id": "x-fig01-peak",
    "exhibit_id": "x-fig01",
    "sentence": "The peak is 100 GiB.",
    "quote": "100 GiB",
    "unit": "GiB",
    "quantity": "memory",
    "basis": "held out",
    "compute": {"operation": "value", "of": {"series": "A", "metric": "peak"}},
    "expected": 100,
    "lanes": {"modelled": {}, "measured": {"scale": "twin"}},
}


CLAIMS = registry.claims()


def table(*rows: tuple[str, str, str, str]) -> pd.DataFrame:
    """Return rows of (lane, series, value, testbed) with metric "peak" and model "M"."""
    cells = [{"lane": a, "series": s, "value": v, "testbed": t, "metric": "peak", "model": "M"} for a, s, v, t in rows]
    return pd.DataFrame(cells).reindex(columns=tidy.COLUMNS, fill_value="").fillna("")


def changed(**more: object) -> dict:
    return copy.deepcopy(CLAIM) | more


def page_of(verdicts: list[claims.Verdict], claim: dict = CLAIM) -> str:
    """Return the page of claims with these verdicts on one claim, as if its exhibit were built."""
    where = "memascend-fig03"
    shown = [judged.judged(dataclasses.replace(each, exhibit_id=where), claim) for each in verdicts]
    one = content.Exhibit(where, "memascend", "Figure 3", "A title", Markup(""), [], [], shown, [], Markup(""), [])
    return pages.claims(content.Site([content.Paper("memascend", "MemAscend", {}, [one], [])], "smoke", ""))


@pytest.mark.parametrize(
    ("value", "verdict"), [("101.9", claims.REPRODUCED), ("98.0", claims.REPRODUCED), ("102.2", claims.DEVIATES)]
)
def test_value_is_reproduced_within_the_tolerance_and_deviates_beyond(value: str, verdict: str) -> None:
    found = claims.decide(CLAIM, "modelled", table(("modelled", "A", value, "c1"), ("measured", "A", "1", "h/m-k8")))
    assert (found.verdict, found.value) == (verdict, f"{float(value):g}")


def test_claim_without_a_row_in_its_lane_is_not_checkable() -> None:
    found = claims.decide(CLAIM, "measured", table(("modelled", "A", "100", "c1")))
    assert found.verdict == claims.NOT_CHECKABLE
    assert found.reason == "not in this lane: peak of A"


def test_missing_points_are_named_by_their_axis() -> None:
    peak = {"operation": "value", "of": {"series": "A", "metric": "peak", "x_name": "context (tokens)"}}
    claim = changed(compute=peak, over={"x_value": [512, 4096]}, join="mean")
    found = claims.decide(claim, "measured", table(("modelled", "A", "100", "c1")))
    assert found.reason == "not in this lane: context (tokens) 512, 4096"


def test_uncheckable_claim_gives_its_reason_despite_matching_rows() -> None:
    claim = changed(lanes={"modelled": {"not_checkable": "needs two H100"}, "measured": CLAIM["lanes"]["measured"]})
    found = claims.decide(claim, "modelled", table(("modelled", "A", "100", "c1")))
    assert (found.verdict, found.reason) == (claims.NOT_CHECKABLE, "needs two H100")


@pytest.mark.parametrize("text", ["N/A (time-out)", "N/A (out of memory)", "N/A", "N/A (quartiles 20 points apart)"])
def test_failed_or_scattered_run_gives_no_result_with_its_reason(text: str) -> None:
    found = claims.decide(CLAIM, "measured", table(("measured", "A", text, "h/m-k8")))
    assert found.verdict == claims.NO_RESULT
    assert text in found.reason


def test_other_metrics_of_a_failed_run_have_no_result() -> None:
    pool = changed(compute={"operation": "value", "of": {"series": "A", "model": "M", "metric": "pool"}})
    failed = table(("measured", "A", "N/A (time-out)", "h/m-k8"))
    found = claims.decide(pool, "measured", failed)
    assert (found.verdict, found.reason) == (claims.NO_RESULT, "pool of A, M: N/A (time-out)")
    other = table(("measured", "B", "N/A (time-out)", "h/m-k8"))
    assert claims.decide(pool, "measured", other).verdict == claims.NOT_CHECKABLE


def test_model_that_does_not_fit_is_not_checkable() -> None:
    found = claims.decide(CLAIM, "modelled", table(("modelled", "A", "N/A (VRAM OOM)", "c1")))
    assert found.verdict == claims.NOT_CHECKABLE


def test_only_held_out_verdicts_count_in_the_score() -> None:
    rows = table(("modelled", "A", "100", "c1"))
    bases = ("held out", "calibrated", "by construction", "alternate reading")
    verdicts = [claims.decide(changed(basis=b, rests_on="why"), "modelled", rows) for b in bases]
    assert {v.verdict for v in verdicts} == {claims.REPRODUCED}
    assert [v.rests_on for v in verdicts] == ["why"] * 4
    assert claims.score(verdicts, "modelled") == "1 of 1 held-out claim reproduced, 0 deviate"
    verdicts.append(claims.decide(CLAIM, "modelled", table(("modelled", "A", "120", "c1"))))
    assert claims.score(verdicts, "modelled") == "1 of 2 held-out claims reproduced, 1 deviates"
    text = page_of(verdicts)
    assert all(f'<td data-label="Basis">{basis}</td>' in text for basis in bases)


def test_claim_that_calibrated_a_constant_must_be_marked_calibrated() -> None:
    where = {"series": "MemAscend", "model": "Qwen2.5-32B", "x_name": "batch", "metric": "throughput"}
    fitted = changed(exhibit_id="memascend-fig17", compute={"operation": "value", "of": where})
    with_batch = {"over": {"x_value": ["1", "8"]}, "join": "mean"}
    claims.refuse_circular(fitted)
    with pytest.raises(tidy.TableError, match="used to calibrate gpu_efficiency"):
        claims.refuse_circular(fitted | with_batch)
    with pytest.raises(tidy.TableError, match="its modelled basis is `calibrated`"):
        claims.decide_all([fitted | with_batch], Path("nowhere"))
    claims.refuse_circular(fitted | with_batch | {"basis": {"modelled": "calibrated", "measured": "held out"}})


def test_exactly_six_claims_of_figure_8_are_calibrated() -> None:
    mine = [claim for claim in CLAIMS if claim["id"].startswith("memascend-")]
    calibrated = {claim["id"] for claim in mine if claims.basis_of(claim, "modelled") == "calibrated"}
    assert {name.removeprefix("memascend-fig08-") for name in calibrated if "fig08" in name} == {
        "pinned-zero-infinity",
        "pinned-reduction",
        "peak-memascend",
        "minimum",
        "minimum-share",
        "reduction",
    }


@pytest.mark.parametrize("paper", registry.PAPERS)
def test_exactly_the_claims_behind_a_constant_are_calibrated(paper: str) -> None:
    mine = [claim for claim in CLAIMS if claim["exhibit_id"].startswith(f"{paper}-")]
    calibrated = [claim for claim in mine if claims.basis_of(claim, "modelled") == "calibrated"]
    assert calibrated or not constants(paper), "constants, but no claim that they were solved from"
    for claim in calibrated:
        with pytest.raises(tidy.TableError, match="was used to calibrate"):
            claims.refuse_circular(claim | {"basis": "held out"})
    for claim in mine:
        claims.refuse_circular(claim)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("f:LoHan (Eqs. 1 to 5)::forward:time", "f:LoHan:13B:forward:time", True),
        ("f:LoHan::768:largest", "f:LoHan:276B:768:largest", True),
        ("f:naive CXL (1 AIC):7B:STEP:latency", "f:naive CXL (2 AIC):7B:STEP:latency", False),
        ("f:LoHan:13B:forward:time", "f:LoHan:70B:forward:time", False),
        ("f:LoHan:13B:forward:time", "f:LoHan:13B:backward:time", False),
    ],
)
def test_same_row_recognises_two_names_of_one_number(one: str, other: str, same: bool) -> None:
    assert same_row(one, other) == same_row(other, one) == same


def test_held_out_claim_names_the_constants_behind_its_exhibit() -> None:
    claim = next(claim for claim in CLAIMS if claim["id"] == "lohan-fig02b-busy")
    assert claims.basis_of(claim, "modelled") == "held out"
    assert "ssd read gb per s (solved from fig01c)" in claims.rests_on(claim, "modelled")
    assert claims.rests_on(claim, "measured") == ""
    claim = next(claim for claim in CLAIMS if claim["id"] == "lohan-fig12-larger")
    assert "dit batch (assumed)" in claims.rests_on(claim, "modelled")


def test_claim_changed_after_a_result_shows_its_history() -> None:
    stamps = {"committed": {"commit": "09faedd", "at": "2026-11-21 13:41"}}
    stamps["changed"] = {"commit": "0eb24dc", "at": "2026-11-21 14:25", "what": "moved after a trial"}
    found = claims.decide(changed(**stamps), "modelled", table(("modelled", "A", "100", "c1")))
    words = "committed 2026-11-21 13:41 (09faedd), changed 2026-11-21 14:25 (0eb24dc): moved after a trial"
    assert found.history == words
    assert words in page_of([found])
    assert "committed before" not in page_of([found])


def test_claims_of_section_iii_c_are_alternate_readings() -> None:
    shares = [c for c in CLAIMS if c["id"].startswith("memascend-fig03-latency-share")]
    cells = [c for c in CLAIMS if c["id"].startswith("memascend-tab04-c1-")]
    assert (len(shares), len(cells)) == (2, 16)
    assert {claims.basis_of(claim, "modelled") for claim in shares + cells} == {"alternate reading"}
    assert all("erratum M5" in claim["rests_on"] for claim in shares + cells)


def test_every_cell_of_tables_iv_and_vi_is_a_claim() -> None:
    printed = pd.read_csv(ROOT / "results/published/memascend.csv", dtype=str, keep_default_na=False)
    printed = printed[
        printed["exhibit_id"].isin(["memascend-tab04", "memascend-tab06"]) & (printed["x_name"] == "batch")
    ]
    columns = ["exhibit_id", "series", "model", "x_value", "value"]
    cells = {tuple(line) for line in printed[columns].to_numpy().tolist()}
    claimed = set()
    for claim in CLAIMS:
        of = claim["compute"].get("of", {})
        if isinstance(of, dict) and of.get("metric") == "throughput improvement" and "not halved" not in of["series"]:
            names = (claim["exhibit_id"], of["series"], of["model"], of["x_value"])
            claimed.add((*names, f"{claim['expected']:g}"))
    assert len(cells) == 32
    assert claimed == cells


def test_errata_page_is_current_and_names_existing_claims() -> None:
    assert (ROOT / "docs/errata.md").read_text() == errata_page.page(), "python -m workflows.derive.errata"
    ids = {claim["id"] for claim in CLAIMS}
    for paper in (paper for paper in registry.PAPERS if errata_page.errata_of(paper)):
        found = errata_page.errata_of(paper)["errata"]
        assert len({entry["id"] for entry in found}) == len(found)
        for entry in found:
            assert set(entry.get("claims", [])) <= ids, entry["id"]
            assert entry["grade"] in "ABC"


SCORED = {claim["exhibit_id"].rpartition("-")[0] for claim in CLAIMS}


@pytest.mark.parametrize("paper", sorted(SCORED))
def test_status_page_and_readme_quote_the_committed_score(paper: str) -> None:
    verdicts = claims.read_verdicts(ROOT / f"results/reference/modelled/{paper}-claims.csv")
    assert {v.claim_id for v in verdicts} == {c["id"] for c in CLAIMS if c["id"].startswith(f"{paper}-")}
    assert {v.lane for v in verdicts} == {"modelled"}
    said = f"{registry.PAPERS[paper]}, modelled: {claims.score(verdicts, 'modelled')}"
    assert said in " ".join((ROOT / "docs/status.md").read_text().split())
    reproduced, of = said.partition(": ")[2].split(" held-out")[0].split(" of ")
    name = registry.PAPERS[paper].removesuffix("-aware allocation")
    assert f"{name} {reproduced} of {of}" in (ROOT / "README.md").read_text()


BECAUSE = "The model has no such thing."
RECORDED = [v for path in sorted(ROOT.glob("results/reference/*/*claims.csv")) for v in claims.read_verdicts(path)]


def causes(claim: dict) -> dict[str, str]:
    """Return why the claim deviates, by lane, where a reason is given."""
    return {lane: said["deviates_because"] for lane, said in claim["lanes"].items() if "deviates_because" in said}


def test_cause_of_deviation_is_shown_only_for_a_deviating_verdict() -> None:
    claim = changed()
    claim["lanes"]["modelled"]["deviates_because"] = BECAUSE
    off, on = (claims.decide(claim, "modelled", table(("modelled", "A", value, "c1"))) for value in ("120", "100"))
    assert (off.verdict, off.deviates_because) == (claims.DEVIATES, BECAUSE)
    assert (on.verdict, on.deviates_because) == (claims.REPRODUCED, "")
    assert BECAUSE in page_of([off], claim)
    assert BECAUSE not in page_of([on], claim)


def test_every_committed_deviation_has_a_cause() -> None:
    said = {claim["id"]: causes(claim) for claim in CLAIMS}
    silent = {
        f"{v.claim_id}, {v.lane}"
        for v in RECORDED
        if v.verdict == claims.DEVIATES and not (v.deviates_because and said[v.claim_id].get(v.lane))
    }
    assert not silent, "lanes.<lane>.deviates_because in claims.yaml, then the record again"


def test_every_cause_belongs_to_a_committed_deviation() -> None:
    deviating = {(v.claim_id, v.lane) for v in RECORDED if v.verdict == claims.DEVIATES}
    assert {(claim["id"], lane) for claim in CLAIMS for lane in causes(claim)} <= deviating


def test_causes_have_at_most_two_sentences_and_name_existing_errata() -> None:
    for claim in CLAIMS:
        known = {each["id"] for each in errata_page.errata_of(paper_of(claim["exhibit_id"]))["errata"]}
        for text in causes(claim).values():
            assert len(re.findall(r"[.?!](?= [A-Z]|$)", text)) <= 2, claim["id"]
            assert set(re.findall(r"errat(?:um|a) ([A-Z]\d+)", text)) <= known, claim["id"]


def test_measured_claim_uses_the_largest_single_rank_twin_scaled_up() -> None:
    rows = (
        ("measured", "A", "1.5625", "h/m-k8"),
        ("measured", "A", "9", "h/m-k16"),
        ("measured", "A", "7", "h/m-k8-r2"),
    )
    found = claims.decide(CLAIM, "measured", table(*rows))
    assert (found.verdict, found.value, found.testbed) == (claims.REPRODUCED, "100", "h/m-k8")


def test_two_matching_rows_are_ambiguous() -> None:
    with pytest.raises(tidy.TableError, match="ambiguous"):
        claims.decide(CLAIM, "modelled", table(("modelled", "A", "1", "c1"), ("modelled", "A", "2", "c1")))


def test_a_lane_may_expect_another_value() -> None:
    lanes = copy.deepcopy(CLAIM["lanes"])
    lanes["measured"] |= {"expected": 98.4, "why": "without process overhead"}
    found = claims.decide(changed(lanes=lanes), "measured", table(("measured", "A", "1.5375", "h/m-k8")))
    assert (found.verdict, found.expected, found.reason) == (
        claims.REPRODUCED,
        "98.4 GiB",
        "without process overhead",
    )


@pytest.mark.parametrize(
    ("operation", "operands", "value"),
    [
        ("ratio", ("of", "to"), 4.0),
        ("difference", ("of", "minus"), 75.0),
        ("percent", ("of", "to"), 400.0),
        ("reduction_percent", ("from", "to"), 75.0),
    ],
)
def test_operations_compute_their_values(operation: str, operands: tuple[str, str], value: float) -> None:
    first, second = ({"series": s, "metric": "peak"} for s in "AB")
    compute = {"operation": operation, operands[0]: first, operands[1]: second}
    claim = changed(compute=compute, expected=value, quote=f"{value:g} times")
    found = claims.decide(claim, "modelled", table(("modelled", "A", "100", "c1"), ("modelled", "B", "25", "c1")))
    assert (found.verdict, float(found.value)) == (claims.REPRODUCED, value)


def test_a_list_of_selectors_is_summed() -> None:
    both = [{"series": "A", "metric": "peak"}, {"series": "B", "metric": "peak"}]
    claim = changed(compute={"operation": "value", "of": both})
    found = claims.decide(claim, "modelled", table(("modelled", "A", "60", "c1"), ("modelled", "B", "40", "c1")))
    assert found.verdict == claims.REPRODUCED


def test_claim_over_models_needs_a_row_of_each() -> None:
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
def test_expected_ranges_are_widened_by_the_tolerance(ends: list, value: str, verdict: str) -> None:
    claim = changed(expected_range=ends)
    del claim["expected"]
    assert claims.decide(claim, "modelled", table(("modelled", "A", value, "c1"))).verdict == verdict


@pytest.mark.parametrize(
    ("ends", "unit", "tolerance", "texts"),
    [
        ((100, 100), "GiB", Tolerance(relative_percent=1), ("100 GiB", "± 1 %")),
        ((100, 100), "GiB", Tolerance(absolute=0.5), ("100 GiB", "± 0.5 GiB")),
        ((50.9, 50.9), "%", Tolerance(relative_percent=1), ("50.9 %", "± 1 % of it")),
        ((73, 73), "%", Tolerance(absolute=1), ("73 %", "± 1 point")),
        ((73, 73), "%", Tolerance(absolute=1.5), ("73 %", "± 1.5 points")),
        ((131072, 131072), "tokens", Tolerance(absolute=0), ("exactly 131,072 tokens", "")),
        ((131072, 131072), "tokens", None, ("131,072 tokens", "")),
        ((1, 1), "", Tolerance(absolute=0.1), ("1", "± 0.1")),
        ((2, 2), "x", Tolerance(relative_percent=10, absolute=0.5), ("2 x", "± 0.5 x")),
        ((30, 30), "x", Tolerance(relative_percent=10, absolute=0.5), ("30 x", "± 10 %")),
        ((40, None), "% faster", Tolerance(absolute=0.5), ("at least 40 % faster", "or up to 0.5 points less")),
        ((0.1, None), "%", Tolerance(absolute=0), ("at least 0.1 %", "")),
        ((0, None), "%", Tolerance(absolute=1), ("at least 0 %", "or up to 1 point less")),
        ((None, 128), "GiB", Tolerance(relative_percent=2), ("at most 128 GiB", "or up to 2 % more")),
        ((1, 1.25), "x", Tolerance(absolute=0), ("1 to 1.25 x", "")),
        ((1, 1.25), "x", Tolerance(absolute=0.1), ("1 to 1.25 x", "± 0.1 x at either end")),
    ],
)
def test_expectation_and_tolerance_read_as_plain_text(ends, unit, tolerance, texts) -> None:
    low, high = (math.inf * sign if end is None else end for sign, end in zip((-1, 1), ends, strict=True))
    assert claims.expected_text(low, high, unit, tolerance) == texts[0]
    assert tolerance is None or tolerance.text(low, high, unit) == texts[1]


def test_committed_expectations_read_as_plain_text(full: Path) -> None:
    document = {"claims": registry.claims()}
    for verdict in claims.decide_all(claims.of_built(document["claims"], REGISTRY), full / "exhibits"):
        texts = (verdict.expected, verdict.tolerance, claims.value_text(float(verdict.value or 0)))
        assert not [text for text in texts if re.search(r"or more|± 0( |$)|\b1 points|  | $|inf|e\+", text)]
        assert verdict.expected.endswith(verdict.unit)


def test_page_shows_counts_as_whole_numbers() -> None:
    rows = table(("modelled", "A", "131072", "c1"))
    claim = changed(unit="tokens", quantity="exact", expected=131072)
    text = page_of([claims.decide(claim, "modelled", rows)], claim)
    assert re.search(r'<td data-label="Value here" class="n"><span>131,072 tokens<', text)
    assert "<b>Modelled:</b> 1 of 1 held-out claim reproduced, 0 deviate." in text


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (
            {"series": "A", "model": "M", "x_name": "context (tokens)", "x_value": 4096, "metric": "peak"},
            "peak of A, M at context (tokens) 4096",
        ),
        ({"series": "A", "metric": "write latency", "x_value": 7}, "write latency of A at x 7"),
        ({"model": "M", "testbed": "h/m-k8"}, "a row of M, testbed h/m-k8"),
    ],
)
def test_missing_row_is_described_by_its_selector(selector: dict, words: str) -> None:
    assert claims.described(selector) == words


@pytest.mark.parametrize(
    "change",
    [
        {
            "lanes": {
                "modelled": {"tolerance": {"relative_percent": 1, "absolute": 1}, "tolerance_because": "it is " * 9},
                "measured": {"not_checkable": "x"},
            }
        },
        {"lanes": {"modelled": {"tolerance": {"absolute": 1}}, "measured": {}}},
        {
            "lanes": {
                "modelled": {"tolerance_because": "of the rule " * 9},
                "measured": {"not_checkable": "x", "why": ""},
            }
        },
        {"printed": "about 3"},
        {"changed": []},
        {"expected_range": [0, 1]},
        {"compute": {"operation": "median", "of": {"series": "A"}}},
        {"over": {"model": ["M"]}},
        {"tolerance": 3},
    ],
)
def test_schema_refuses_invalid_claims(change: dict) -> None:
    with pytest.raises(tidy.TableError, match="claims/0"):
        tidy.check({"claims": [changed(**change)]}, "claims.schema.json", "claims.yaml")


def test_committed_claims_fit_the_schema_and_get_all_three_verdicts(full: Path) -> None:
    document = {"claims": registry.claims()}
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


def test_claims_of_planned_exhibits_are_left_out() -> None:
    registry = [{"id": "x-fig01", "status": "planned"}, {"id": "x-fig02", "status": "built"}]
    later = changed(id="x-fig02-peak", exhibit_id="x-fig02")
    assert claims.of_built([CLAIM, later], registry) == [later]


def test_modelled_table_of_no_paper_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.csv").write_text("")
    monkeypatch.setattr("sys.argv", ["claims", "--modelled", str(tmp_path / "mine.csv"), "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match="name the table as its paper: memascend, lohan"):
        claims.main()
    assert not (tmp_path / "o").exists()

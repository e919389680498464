"""The modelled lane as the exhibits and the claims read it."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from hardware.registry import known_testbeds
from workflows.scripts import tidy
from workflows.scripts.model_lane import main, modelled

CONFIG = Path(__file__).parents[2] / "workflows" / "config"
ROWS = modelled()
# Exhibits whose modelled rows are drawn through measured ones, and are tested with those.
FROM_RECORDS = {"memascend-fig12"}


def test_every_built_exhibit_with_a_modelled_lane_has_rows():
    exhibits = yaml.safe_load((CONFIG / "exhibits.yaml").read_text())["exhibits"]
    wanted = {e["id"] for e in exhibits if e["status"] == "built" and "modelled" in e["lanes"]}
    assert wanted - FROM_RECORDS == {row["exhibit_id"] for row in ROWS}


def test_rows_keep_their_lane_their_origin_and_a_real_testbed():
    for row in ROWS:
        assert set(row) <= set(tidy.COLUMNS)
        assert row["lane"] == "modelled"
        assert row["source"]
        assert row["testbed"] in known_testbeds()


def test_no_two_rows_say_the_same_thing():
    keys = Counter(
        tuple(row.get(c, "") for c in ("exhibit_id", "series", "model", "x_name", "x_value", "metric")) for row in ROWS
    )
    assert max(keys.values()) == 1


def test_every_selector_of_a_claim_that_the_lane_can_decide_finds_one_row():
    modelled_exhibits = {row["exhibit_id"] for row in ROWS}
    for claim in yaml.safe_load((CONFIG / "claims.yaml").read_text())["claims"]:
        if "not_checkable" in claim["lanes"]["modelled"] or claim["exhibit_id"] not in modelled_exhibits:
            continue
        fixed = [{c: v} for c, values in claim["over"].items() for v in values] if "over" in claim else [{}]
        operands = [value for key, value in claim["compute"].items() if key != "operation"]
        selectors = [s for operand in operands for s in (operand if isinstance(operand, list) else [operand])]
        for wanted in ({**selector, **more} for selector in selectors for more in fixed):
            found = [
                row
                for row in ROWS
                if row["exhibit_id"] == claim["exhibit_id"] and all(row.get(c, "") == v for c, v in wanted.items())
            ]
            assert len(found) == 1, (claim["id"], wanted)


def test_components_of_figure_8_add_up_to_the_peak():
    mine = [row for row in ROWS if row["exhibit_id"] == "memascend-fig08" and row["unit"] == "GiB"]
    for series in {row["series"] for row in mine}:
        parts = {row["metric"]: float(row["value"]) for row in mine if row["series"] == series}
        peak = parts.pop("peak system memory")
        assert sum(parts.values()) == pytest.approx(peak, rel=1e-6)


def test_table_ii_names_what_does_not_fit():
    outcome = {
        (row["series"], row["model"]): row["value"]
        for row in ROWS
        if row["exhibit_id"] == "memascend-tab02" and row["metric"] == "outcome"
    }
    assert outcome["All in GPU", "Llama3.2-1B"] == "fits"
    assert outcome["All in GPU", "Llama3.2-3B"] == "VRAM OOM"
    assert outcome["ZeRO-Offload", "Llama3.1-8B"] == "DRAM OOM"
    assert outcome["ZeRO-Infinity (as published)", "Llama3.1-8B"] == "fits"
    assert len(outcome) == 9


def test_the_program_writes_the_tidy_table(tmp_path, monkeypatch):
    out = tmp_path / "derived" / "modelled.csv"
    monkeypatch.setattr("sys.argv", ["model_lane", "--out", str(out)])
    main()
    assert len(tidy.read_table(out)) == len(ROWS)

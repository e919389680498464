"""The committed comparison of fp32, bf16 and 8-bit states, its picture, and the pages that quote it."""

import json
from pathlib import Path
from statistics import mean

import pytest

from workflows.derive import moments
from workflows.run.moments import FORMATS, summary

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "results/reference/epyc-genoa-2core"
RECORD = json.loads((HOST / "moments-10m.json").read_text())


@pytest.fixture(scope="module")
def ends():
    found = {states: {} for states in FORMATS}
    for run in RECORD["points"]:
        found[run["states"]][run["seed"]] = run["evaluated"][-1]
    return found


def test_committed_picture_of_moments_matches_the_record(tmp_path):
    assert moments.main([str(HOST / "moments-10m.json"), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == (ROOT / "docs/img/moments-10m.svg").read_text()


def test_record_of_moments_has_what_was_asked_for(ends):
    assert RECORD["summary"] == summary(RECORD["points"])
    assert {states: sorted(seeds) for states, seeds in ends.items()} == {key: [0, 1, 2, 3, 4] for key in FORMATS}
    assert all(len(run["losses"]) == 2000 for run in RECORD["points"])
    assert all(row["within"] for row in RECORD["summary"])


def test_reference_page_has_a_row_for_each_format(ends):
    page = (HOST / "README.md").read_text()
    for states, by_seed in ends.items():
        values = list(by_seed.values())
        row = f"| {states} | {mean(values):.3f} | {min(values):.3f} to {max(values):.3f} |"
        if states != "fp32":
            apart = [loss - ends["fp32"][seed] for seed, loss in by_seed.items()]
            row += f" {min(apart):.3f} to +{max(apart):.3f} |"
            assert sum(each < 0 for each in apart) == 4
        assert row in page


def test_how_to_quotes_the_comparison_of_moments(ends):
    page = " ".join((ROOT / "docs/how-to/fine-tune-with-almost-no-host-memory.md").read_text().split())
    fp32, bf16, int8 = (list(ends[states].values()) for states in FORMATS)
    apart = [loss - ends["fp32"][seed] for seed, loss in ends["int8"].items()]
    for words in (
        f"is {mean(fp32):.3f} with fp32 states ({min(fp32):.3f} to {max(fp32):.3f}), {mean(bf16):.3f} with bf16 states "
        f"and {mean(int8):.3f} with int8 states",
        f"int8 ends between {-min(apart):.3f} below and {max(apart):.3f} above fp32",
    ):
        assert words in page

"""The picture of a flagship's record."""

import json
from pathlib import Path

from workflows.derive import flagship

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results/reference/epyc-genoa-2core/flagship-llama3.1-8b.json"


def test_the_committed_picture_is_that_of_the_committed_record(tmp_path):
    assert flagship.main([str(RECORD), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == (ROOT / "docs/img/flagship.svg").read_text()


def test_published_peaks_are_what_the_claims_quote_and_none_for_another_model():
    assert flagship.published_gib("llama3.1-8b") == {"ZeRO-Infinity": 91.06, "MemAscend": 44.71}
    record = json.loads(RECORD.read_text())
    assert flagship.published_gib(record["points_requested"]["model"] + "-other") == {}

"""The picture of a flagship's record."""

import json
from pathlib import Path

from workflows.derive import flagship

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results/reference/epyc-genoa-2core/flagship-llama3.1-8b.json"


def test_committed_picture_matches_the_committed_record(tmp_path):
    assert flagship.main([str(RECORD), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == (ROOT / "docs/img/flagship.svg").read_text()


def test_published_peaks_are_known_only_for_quoted_models():
    assert flagship.published_gib("llama3.1-8b") == {"ZeRO-Infinity": 91.06, "MemAscend": 44.71}
    record = json.loads(RECORD.read_text())
    assert flagship.published_gib(record["points_requested"]["model"] + "-other") == {}


def test_how_to_quotes_the_flagship_record():
    page = (ROOT / "docs/how-to/train-8b-in-4-gib.md").read_text()
    record = json.loads(RECORD.read_text())
    found, step = record["summary"], record["points"]["steps"][-1]
    said = [
        f"| {found['parameters'] / 1e9:.2f} billion |",
        f"| {found['host_peak_bytes'] / 2**30:.2f} GiB, in a control group of {found['limit_bytes'] / 2**30:.0f} GiB |",
        f"| {found['disk_bytes_a_parameter']:.2f} bytes per parameter |",
        f"| {found['step_s']:.1f} s (median of the steps) |",
        f"| {found['compute_bound_s']:.1f} s |",
        f"| {step['read_bytes'] / 1e9:.1f} GB and {step['written_bytes'] / 1e9:.1f} GB |",
        f"| {', '.join(f'{loss:.2f}' for loss in found['held_out_losses'])} |",
    ]
    assert [cell for cell in said if cell not in page] == []
    assert found["losses_equal"]
    assert (found["kills"], found["steps_compared"]) == (3, [1, 2, 3, 4])

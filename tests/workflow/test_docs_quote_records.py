"""What the how-to says of the streaming engine's speed is what the committed records say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = (ROOT / "docs/how-to/fine-tune-with-almost-no-host-memory.md").read_text()
RECORDS = sorted((ROOT / "results/reference").glob("*/bench-engine-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_ratio_of_a_record_is_a_row_of_the_how_to(path):
    record = json.loads(path.read_text())
    assert f"`{path.stem}`" in HOW_TO
    rows = [row for row in record["summary"] if row["method"] != "memory"]
    assert rows
    for row in rows:
        seconds, ratio = row["seconds"]["median"], row["of_memory"]
        cells = [
            f"`{path.stem}`",
            str(row["context"]),
            row["method"],
            f"{seconds:.2f}",
            f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})",
            f"{row['bound_share']:.0%}",
        ]
        assert f"| {' | '.join(cells)} |" in HOW_TO
        assert row["losses_apart"] < 1e-3


def test_there_are_records_at_both_lengths():
    lengths = {row["context"] for path in RECORDS for row in json.loads(path.read_text())["summary"]}
    assert {256, 1024} <= lengths

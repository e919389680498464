"""The comparison of fp32, bf16 and 8-bit states: runs that resume where they were cut off, and the record."""

import json
from pathlib import Path

import jsonschema
import pytest

from workflows.derive import moments as derived
from workflows.run import moments

pytestmark = pytest.mark.slow  # twelve trainings

SCHEMA = Path(__file__).resolve().parents[2] / "workflows" / "schemas" / "record.schema.json"


def words(folder, out, *more):
    return [
        *("--size", "tiny", "--steps", "6", "--batch", "2", "--context", "16", "--every", "3", "--seeds", "0", "1"),
        *("--folder", str(folder), "--out", str(out), *more),
    ]


def losses(record):
    return {(run["states"], run["seed"]): (run["losses"], run["evaluated"]) for run in record["points"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moments")
    assert moments.main(words(folder / "kept", folder / "whole.json")) == 0
    return folder


def test_record_has_every_run_and_fits_the_schema(whole):
    record = json.loads((whole / "whole.json").read_text())
    jsonschema.validate(record, json.loads(SCHEMA.read_text()) | {"$id": SCHEMA.as_uri()})
    assert set(losses(record)) == {(states, seed) for states in moments.FORMATS for seed in (0, 1)}
    assert all(run["evaluated_after"] == [3, 6] and len(run["losses"]) == 6 for run in record["points"])
    first = {seed: {run["losses"][0] for run in record["points"] if run["seed"] == seed} for seed in (0, 1)}
    assert len(first[0]) == len(first[1]) == 1  # one model and one batch for all formats
    assert first[0] != first[1]
    ends = {
        states: [run["evaluated"][-1] for run in record["points"] if run["states"] == states]
        for states in ("fp32", "int8")
    }
    row = next(row for row in record["summary"] if row["states"] == "int8")
    assert row["mean"] == pytest.approx(sum(ends["int8"]) / 2)
    assert row["within"] == (min(ends["fp32"]) <= row["mean"] <= max(ends["fp32"]))
    assert not list((whole / "kept").glob("*.pt"))


def test_interrupted_run_resumes_to_the_same_losses(whole, tmp_path, monkeypatch):
    advance = moments._Training.advance
    done = []

    def until_the_fifth(training, step):
        if training.states == "int8" and training.seed == 0:
            if step == 5 and len(done) < 5:
                raise KeyboardInterrupt
            done.append(step)
        advance(training, step)

    monkeypatch.setattr(moments._Training, "advance", until_the_fifth)
    (tmp_path / "kept").mkdir()
    for made in (whole / "kept").glob("stdlib*"):
        (tmp_path / "kept" / made.name).write_bytes(made.read_bytes())
    with pytest.raises(KeyboardInterrupt):
        moments.main(words(tmp_path / "kept", tmp_path / "again.json", "--formats", "int8"))
    done.append(None)  # from here on it may continue
    assert moments.main(words(tmp_path / "kept", tmp_path / "again.json", "--formats", "int8")) == 0
    assert done == [1, 2, 3, 4, None, 4, 5, 6]
    expected = losses(json.loads((whole / "whole.json").read_text()))
    again = losses(json.loads((tmp_path / "again.json").read_text()))
    assert again == {key: value for key, value in expected.items() if key[0] == "int8"}


def test_too_little_text_is_refused(whole, capsys):
    arguments = words(whole / "kept", whole / "never.json")
    arguments[arguments.index("--context") + 1] = "9000000"
    with pytest.raises(ValueError, match="tokens are too few for 64 held-out sequences: use a shorter --context"):
        moments.main(arguments)


def test_picture_of_the_record_has_both_panels(whole, tmp_path):
    assert derived.main([str(whole / "whole.json"), "--out", str(tmp_path / "curves.svg")]) == 0
    assert (tmp_path / "curves.svg").stat().st_size > 1000

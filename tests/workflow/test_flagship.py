"""The flagship run: a training under a memory limit, killed on the way, and the limits of its steps."""

import json
import os
import shutil
from pathlib import Path

import jsonschema
import pytest

from workflows.run import flagship

SCHEMA = Path(__file__).resolve().parents[2] / "workflows" / "schemas" / "record.schema.json"


def words(folder, *more):
    named = {"model": "llama3.1-8b", "twin": 64, "context": 16, "steps": 4, "compared": 2, "kills": 1}
    every = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*every, "--evaluate-every", "2", "--folder", str(folder / "nvme"), "--out", str(folder / "r.json"), *more]


def found(losses, others, step_s=2.0):
    def steps(of):
        return [
            {"step": number, "loss": loss, "seconds": step_s, "read_bytes": 30, "written_bytes": 10}
            for number, loss in of
        ]

    return {
        "compared": {"steps": steps(enumerate(losses, 1))},
        "calls": [{"killed": True, "host_peak_bytes": 7}, {"killed": False, "host_peak_bytes": 5}],
        "steps": steps(enumerate(others, 1)),
        "evaluations": [{"loss": 3.0}, {"loss": 2.5}],
        "disk_bytes": 61,
        "report": {"parameters": 10},
        "products": [{"seconds": 1.0}, {"seconds": 1.5}],
        "drive": [{"bytes_per_s": 25.0}, {"bytes_per_s": 15.0}],
        "used": {"text": "def f", "as_exported": "def f"},
        "pretrained": {"steps": [{"loss": 1.0}]},
    }


def test_step_is_compared_with_the_larger_of_both_bounds(tmp_path):
    args = flagship.parse(words(tmp_path))
    summary = flagship.summary(args, found([3.0, 2.0], [3.0, 2.0, 1.0]))
    assert summary["compute_bound_s"] == 1.25
    assert summary["drive_bound_s"] == 2.0
    assert summary["of_the_bound"] == 1.0
    assert summary["disk_bytes_a_parameter"] == 6.1
    assert (summary["kills"], summary["host_peak_bytes"]) == (1, 7)
    assert summary["losses_equal"]
    assert summary["steps_compared"] == [1, 2]
    assert summary["held_out_losses"] == [3.0, 2.5]
    assert summary["text_equal"]
    assert summary["loss_from_export"] == 1.0


def test_losses_differing_in_a_compared_step_are_not_equal(tmp_path):
    args = flagship.parse(words(tmp_path))
    assert not flagship.summary(args, found([3.0, 2.0], [3.0, 2.0000001, 1.0]))["losses_equal"]


def test_products_cover_every_matrix_of_the_model(tmp_path):
    args = flagship.parse(words(tmp_path))
    products = flagship.product_seconds(args)
    in_blocks = sum(row["count"] for row in products["matrices"] if row["in_block"])
    assert in_blocks == 32 * 7  # four of attention, three of the MLP
    assert [row["count"] for row in products["matrices"] if not row["in_block"]] == [1]  # the head
    assert products["seconds"] > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--compared", "5"], "--compared: from 1 to --steps"), (["--kills", "3"], "at most one in each")],
)
def test_contradictory_options_are_refused(tmp_path, capsys, more, said):
    with pytest.raises(SystemExit):
        flagship.parse(words(tmp_path, *more))
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("fio"), reason="needs root for a control group, and fio")
def test_small_twin_completes_the_whole_flagship_run(tmp_path, monkeypatch):
    monkeypatch.setattr(flagship, "_FIO_S", 1)
    monkeypatch.setattr(flagship, "_FIO_BYTES", 64 << 20)
    monkeypatch.setattr(flagship, "_FIRST_STEP_S", 1.0)
    assert flagship.main(words(tmp_path, "--steps", "8", "--evaluate-every", "4")) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    jsonschema.validate(record, json.loads(SCHEMA.read_text()) | {"$id": SCHEMA.as_uri()})
    assert [row["step"] for row in record["points"]["steps"]] == list(range(1, 9))
    assert [call["killed"] for call in record["points"]["calls"]] == [True, False]
    assert record["summary"]["losses_equal"]
    assert record["summary"]["text_equal"]
    assert len(record["points"]["pretrained"]["steps"]) == 2
    assert len(record["summary"]["held_out_losses"]) == 2
    assert "/" not in record["points"]["report"]["config"]["output"]
    assert not [name for name in record["points"]["report"]["config"]["data"] if "/" in name]
    assert not list((tmp_path / "nvme").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("fio"), reason="needs root for a control group, and fio")
def test_training_only_run_keeps_one_version_of_states(tmp_path, monkeypatch):
    monkeypatch.setattr(flagship, "_FIO_S", 1)
    monkeypatch.setattr(flagship, "_FIO_BYTES", 64 << 20)
    more = ("--steps", "3", "--evaluate-every", "3", "--training-only", "--states", "int8")
    assert flagship.main(words(tmp_path, *more)) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [row["step"] for row in record["points"]["steps"]] == [1, 2, 3]
    assert record["points"]["report"]["config"]["state_versions"] == "checkpoint"
    assert "losses_equal" not in record["summary"]
    assert record["summary"]["limit_bytes"] == 4 << 30
    assert not list((tmp_path / "nvme").iterdir())

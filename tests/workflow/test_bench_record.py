"""A benchmark's result becomes a record that is valid by the schema."""

import json
import os
from pathlib import Path

import jsonschema
import pytest

from hardware.throttled import CannotThrottleError
from tests import forked
from workflows.run import bench as bench_record

SCHEMAS = Path(__file__).resolve().parents[2] / "workflows" / "schemas"


def test_schema_lists_every_benchmark_part():
    clauses = json.loads((SCHEMAS / "record.schema.json").read_text())["allOf"]
    fields = [clause["then"].get("properties", {}).get("benchmark") for clause in clauses]
    assert [set(field["enum"]) for field in fields if field] == [set(bench_record.PARTS)]


def slow(part, options):
    return pytest.param(part, options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("overflow", ["--dtypes", "fp16", "--numels", "1000", "--repeats", "1"]),
        slow("unscale", ["--dtypes", "bf16", "--numels", "1000", "--repeats", "1"]),
        slow("adamw", ["--numels", "1000", "--repeats", "1"]),
        slow("pinned", ["--mib", "1", "--repeats", "1"]),
        ("pool", ["--model", "llama3.2-1b", "--repeats", "1"]),
        slow(
            "activations",
            [
                "--folder",
                ".",
                "--model",
                "ssdtrain:H16384-L2",
                "--twin",
                "64",
                "--context",
                "16",
                "--repeats",
                "1",
                "--batches",
                "16",
            ],
        ),
        slow(
            "engine",
            ["--folder", ".", "--model", "llama3.2-1b", "--twin", "32", "--contexts", "16", "--repeats", "1"],
        ),
        slow("latency", ["--kib", "64,1024", "--repeats", "1"]),
        ("placement", ["--twin", "32", "--context", "16", "--repeats", "1", "--placements", "node"]),
        ("nvme", ["--folder", ".", "--questions", "sizes", "--mib", "1", "--repeats", "1"]),
    ],
)
def test_every_part_makes_a_valid_record(tmp_path, monkeypatch, part, options):
    out = tmp_path / f"bench-{part}.json"
    if part != "nvme":  # its program keeps DeepSpeed's import messages out of its output
        monkeypatch.setattr(bench_record, "subprocess", forked.FORKING)
    assert bench_record.main(["--part", part, "--out", str(out), "--", *options]) == 0
    record = json.loads(out.read_text())
    schema = json.loads((SCHEMAS / "record.schema.json").read_text())
    for clause in schema["allOf"]:  # the ledger's schema, in a separate file, is for training records
        clause["then"].get("properties", {}).pop("ledger", None)
    jsonschema.validate(record, schema)
    assert (record["kind"], record["benchmark"], record["run_id"]) == ("bench", part, f"bench-{part}")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="throttled paths need root")
def test_benchmark_record_notes_the_throttled_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMASCEND_NVME", str(tmp_path / "nvme"))
    (tmp_path / "nvme").mkdir()
    out = tmp_path / "bench-nvme.json"
    asked = ["--part", "nvme", "--out", str(out), "--throttle", "20000000"]
    try:
        assert bench_record.main([*asked, "--", "--questions", "stream", "--repeats", "1", "--region-mib", "64"]) == 0
    except CannotThrottleError as error:
        pytest.skip(str(error))
    record = json.loads(out.read_text())
    assert record["points_requested"]["throttle"] == 20_000_000
    assert list((tmp_path / "nvme").iterdir()) == []


def test_failed_benchmark_leaves_no_record(tmp_path, capfd):
    out = tmp_path / "bench-overflow.json"
    assert bench_record.main(["--part", "overflow", "--out", str(out), "--", "--dtypes", "fp64"]) == 2
    assert "unknown 'fp64'" in capfd.readouterr().err
    assert not out.exists()

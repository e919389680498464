"""A run that times out, crashes or refuses leaves a record of that, and its claims have no result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workflows import tidy
from workflows.configuration import Configuration
from workflows.derive import claims, figure, table
from workflows.records import load
from workflows.run import no_result

ROOT = Path(__file__).resolve().parents[2]
CLAIM = {
    "id": "memascend-fig12-x",
    "exhibit_id": "memascend-fig12",
    "unit": "%",
    "quantity": "share",
    "quote": "97%",
    "sentence": "",
    "basis": "held out",
    "compute": {"operation": "value", "of": {"metric": "average overflow check latency reduction", "x_name": ""}},
    "expected": 97,
    "lanes": {"measured": {}},
}


def ended(folder: Path, words: str, limit: float | None, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Return the record that the rule's command line leaves for a benchmark that does not finish."""
    (folder / "logs").mkdir()
    run = {"module": "bench", "words": words, "alone": False, "environments": [], "time_limit_s": limit}
    known = SimpleNamespace(run=lambda _: run, raw=str(folder), lock=f"{folder}/.machine.lock", node=None)
    command = Configuration.command(known, "bench-x")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("MEMASCEND_EXHIBITS", json.dumps({"bench-x": ["memascend-fig12"]}))
    script = f"set -euo pipefail; ({command}) > {folder}/logs/bench-x.log 2>&1"
    assert subprocess.run(["bash", "-c", script], cwd=ROOT, check=False).returncode == 0
    (record,) = load([folder / "bench-x.json"])
    return record


@pytest.mark.parametrize(
    ("words", "limit", "status", "reason"),
    [
        ("--part overflow -- --numels 30000000 --repeats 1000", 0.3, "timeout", "exit status 124, no output"),
        ("--part overflow -- --dtypes fp64", None, "failed", "unknown 'fp64'"),
    ],
)
def test_the_record_says_how_a_run_ended(tmp_path, monkeypatch, words, limit, status, reason) -> None:
    record = ended(tmp_path, words, limit, monkeypatch)
    assert (record["kind"], record["status"]) == ("no-result", status)
    assert reason in record["reason"]
    rows = table.measured_rows("memascend", [record])
    verdict = claims.decide(CLAIM, "measured", rows)
    assert (verdict.verdict, verdict.value) == ("no result", "")
    assert "measured" not in figure.provenance(rows, rows)
    no_result.forget_failures(tmp_path)
    assert (tmp_path / "bench-x.json").exists() is (status == "timeout")


def test_run_ended_by_the_user_leaves_no_record(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("half a line")
    words = ["--run-id", "bench-x", "--out", str(tmp_path / "x.json"), "--log", str(tmp_path / "log")]
    assert no_result.main([*words, "--exit-status", "143"]) == 143
    assert not (tmp_path / "x.json").exists()


def test_record_of_a_killed_run_names_the_signal(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    words = ["--run-id", "bench-x", "--out", str(tmp_path / "x.json"), "--log", str(tmp_path / "log")]
    assert no_result.main([*words, "--exit-status", "137"]) == 0
    assert no_result.reason(tmp_path / "x.json") == "failed: ended by SIGKILL"
    assert tidy.validator("record.schema.json").is_valid(json.loads((tmp_path / "x.json").read_text()))


def test_a_run_without_a_result_removes_the_samples_of_an_earlier_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "bench-x.trace.csv").write_text("seconds,bytes\n")
    ended(tmp_path, "--part overflow -- --dtypes fp64", None, monkeypatch)
    assert not (tmp_path / "bench-x.trace.csv").exists()


def test_a_limited_run_ends_with_the_lock_that_it_holds(tmp_path, monkeypatch) -> None:
    """Ctrl-C reaches flock, but not `timeout`, which leads a process group of its own."""
    run = {"module": "bench", "words": "", "alone": True, "environments": [], "time_limit_s": 60}
    known = SimpleNamespace(run=lambda _: run, raw=str(tmp_path), lock=f"{tmp_path}/.machine.lock", node=None)
    command = Configuration.command(known, "bench-x").partition(" python ")[0]
    started = subprocess.Popen([*command.split(), "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 61"])
    while not (tmp_path / "pid").exists() or not (text := (tmp_path / "pid").read_text()):
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    assert started.wait() == -signal.SIGINT
    # If the run went on, the limit of a test would end this one.
    while _is_running(int(text)):
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False

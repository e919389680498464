"""The real rules with stand-ins for measurements.

After a kill they resume, a second run does nothing, and a deleted record is made again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = '''"""Writes a made-up record after half a second."""
import argparse, json, sys, time
from pathlib import Path

sys.path.insert(0, "tests/workflow")
import workflow_fixtures as fixtures
from workflows import tidy

parser = argparse.ArgumentParser(allow_abbrev=False)
for word in ("run-id", "system", "arm", "model", "dtype", "out"):
    parser.add_argument(f"--{word}")
parser.add_argument("--k", type=int)
args, _ = parser.parse_known_args()
time.sleep(0.5)
out = Path(args.out)
if Path("fails").exists() and Path("fails").read_text() == out.stem:
    sys.exit("no memory left for this one")
arm = next(a for a, names in fixtures.ARMS.items() if names == (args.system, args.arm))
record = fixtures.training(tidy.DISPLAY[args.model], arm, args.dtype, abs(hash(out.stem)) % 10**9, k=args.k)
tidy.atomically(out, lambda path: path.write_text(json.dumps({**record, "run_id": out.stem})))
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a copy of the pipeline in which nothing is measured."""
    for name in ("workflows", "profiles", "tests/workflow"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Snakefile", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/published").symlink_to(ROOT / "results/published")
    for name in ("memascend", "hardware", "baselines"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "workflows/run/training.py").write_text(STAND_IN)
    return tmp_path


def start(project: Path, *words: str, retry: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *words, "--config", "profile=smoke"]
    command += ["retry=1"] * retry
    environment = {**os.environ, "HOME": str(project), "XDG_CACHE_HOME": str(project / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=project, text=True, env=environment, start_new_session=True, **pipes)


def records(project: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (project / "results/raw").glob("*-*.json")}


@pytest.mark.slow
def test_killed_workflow_resumes_and_only_deleted_records_are_repeated(project: Path) -> None:
    first = start(project, "memascend-fig11")
    deadline = time.monotonic() + 60
    while len(records(project)) < 3 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    before = records(project)
    assert 3 <= len(before) < 8

    second = start(project, "memascend-fig11")
    text, _ = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert (project / "figures/memascend-fig11.svg").exists()
    kept = [name for name, when in before.items() if records(project)[name] == when]
    assert len(kept) >= len(before) - 1  # at most the one that was being written is made again

    third = start(project, "memascend-fig11")
    text, _ = third.communicate(timeout=60)
    assert third.returncode == 0
    assert "Nothing to be done" in text

    gone = next((project / "results/raw").glob("train-*.json"))
    gone.unlink()
    fourth = start(project, "memascend-fig11")
    text, _ = fourth.communicate(timeout=60)
    assert fourth.returncode == 0, text
    assert gone.exists(), "a deleted record that an exhibit needs is made again"


@pytest.mark.slow
def test_crashed_run_is_reported_stops_no_other_and_is_retried(project: Path) -> None:
    bad = "train-qwen2.5-7b-k64-fp16-today"
    (project / "fails").write_text(bad)
    first = start(project, "memascend-fig04", "memascend-fig11")
    text, _ = first.communicate(timeout=120)
    assert first.returncode == 0, text
    assert f"{bad}: no result, failed: no memory left for this one" in text
    record = json.loads((project / f"results/raw/{bad}.json").read_text())
    assert (record["kind"], record["status"]) == ("no-result", "failed")
    assert f"run without a result: {bad}" in (project / "figures/memascend-fig11.md").read_text()

    (project / "fails").unlink()
    second = start(project, "memascend-fig11")
    text, _ = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert "Nothing to be done" in text
    third = start(project, "memascend-fig11", retry=True)
    text, _ = third.communicate(timeout=120)
    assert third.returncode == 0, text
    assert json.loads((project / f"results/raw/{bad}.json").read_text())["status"] == "ok"

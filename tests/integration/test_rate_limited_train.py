"""A training whose paths are drives of known speed: on every system, no transfer is faster than its drive."""

import json
import subprocess
import sys

import pytest

from memascend.simulator import read_trace
from memascend.simulator.side_by_side import step_of_trace
from memascend.simulator.trace import busy_s
from tests import train_runs

READ, WRITE = 40e6, 30e6  # bytes per second, slower than any path of ours


@pytest.mark.parametrize(
    ("system", "arm"),
    [
        ("memascend", "memascend"),
        pytest.param("zero_infinity", "as_published", marks=pytest.mark.slow),
        pytest.param("lohan", "optimized", marks=pytest.mark.slow),
        pytest.param("mlp_offload", "zero3", marks=pytest.mark.slow),
    ],
)
def test_transfers_are_no_faster_than_the_drives_rates(tmp_path, system, arm):
    (drive := tmp_path / "drive").mkdir()
    text = train_runs.text_folder(tmp_path)
    work = [*train_runs.MODEL, "--data", text, "--files", "*.py", "--context", "16", "--steps", "2"]
    work += ["--eval-sequences", "0", "--clip", "0", "--system", system, "--arm", arm]
    work += ["--nvme", drive, "--output", tmp_path / "run", "--trace", tmp_path / "trace.json"]
    command = [sys.executable, "-m", "workflows.run.rate_limited_train", json.dumps({str(drive): [READ, WRITE]})]
    done = subprocess.run([*command, *map(str, work)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    events, facts = read_trace(tmp_path / "trace.json")
    moved = step_of_trace(events, facts).amounts
    for resource, rate in (("ssd.read", READ), ("ssd.write", WRITE)):
        nbytes = sum(of_phase.get(resource, 0.0) for of_phase in moved.values())
        assert nbytes > 4e6
        assert sum(of_phase.get(resource, 0.0) for of_phase in busy_s(events).values()) >= 0.98 * nbytes / rate

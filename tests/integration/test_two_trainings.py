"""Two trainings in one process: the second finds the disk, the threads and the descriptors as the first one did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.deepspeed
SCRIPT = Path(__file__).parent / "scripts" / "two_trainings.py"


def test_destroyed_and_disabled_training_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "direct", "file"]
    done = forked.run(command, cwd=SCRIPT.parents[3], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    probe, *trainings = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(trainings) == 4
    assert all(each["losses"] == trainings[0]["losses"] for each in trainings)
    assert [bool(each["during"]["files"]) for each in trainings] == [True] * 4
    assert [bool(each["during"]["shared"]) for each in trainings] == [True, True, False, False]
    for each in trainings[:2]:  # pool, swap-out and optimizer buffers are registered with the ring
        if probe["can_register"]:
            assert each["during"]["registered"] == each["during"]["long_lived"] > 0
            assert each["during"]["pinned"] >= each["during"]["registered"]
    for each in trainings:
        assert (each["after"]["registered"], each["after"]["pinned"]) == (0, 0)
        assert (each["after"]["files"], each["after"]["shared"]) == ([], [])
        assert each["after"]["threads"] < each["during"]["threads"]
    for first, second in (trainings[:2], trainings[2:]):
        assert second["after"]["descriptors"] <= first["after"]["descriptors"]
        assert second["after"]["threads"] <= first["after"]["threads"]

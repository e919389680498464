"""The picture of the simulator's errors: every error is in it, and a record of another kind is refused."""

import json
import subprocess
import sys

import pytest

from workflows import registry
from workflows.derive import simulator
from workflows.run import validation

HOST = {"name": "here", "cpu": "some processor", "cores": 2}


def record():
    rows = [
        {"system": "toy", "arm": arm, "k": 4, "context": 32, "batch": 1, "drive": "faster", "phase": phase}
        | {"simulated_s": 1.1, "measured_s": 1.0, "error_percent": error}
        for arm, error in (("toy", 10.0), ("plain", -30.0))
        for phase in ("forward", "backward", "optimizer", "step")
    ]
    spreads = {
        what: validation._distribution([row["error_percent"] for row in rows if (row["phase"] == "step") == step])
        for what, step in (("phases", False), ("steps", True))
    }
    return {"kind": "simulation-validation", "host": HOST, "model": "m", "dtype": "bf16", "rows": rows} | spreads


def drawn(tmp_path, made):
    (tmp_path / "r.json").write_text(json.dumps(made))
    command = [sys.executable, "-m", "workflows.derive.simulator", str(tmp_path / "r.json"), "--draw-in", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT)


def test_every_error_is_a_mark_titled_with_its_seconds(tmp_path):
    assert drawn(tmp_path, record()).returncode == 0
    svg = (tmp_path / "simulator.svg").read_text()
    assert svg.count("<title>1.1 s simulated, 1 s measured</title>") == 8
    assert (tmp_path / "simulator.png").stat().st_size > 10_000


def test_legend_gives_the_error_of_half_and_nine_tenths():
    figure = simulator.draw(record())
    words = [text.get_text() for axis in figure.axes for text in (axis.get_legend() or figure.legends[0]).get_texts()]
    assert "6 phases: half within 20 %,\nnine of ten within 30 %" in words
    assert "2 steps: half within 20 %,\nnine of ten within 30 %" in words


def test_run_without_a_result_is_a_picture_with_its_reason(tmp_path):
    made = {"kind": "no-result", "status": "timeout", "reason": "exit status 124, no output", "host": HOST}
    assert drawn(tmp_path, made).returncode == 0
    assert "exit status 124" in (tmp_path / "simulator.svg").read_text()


@pytest.mark.parametrize("made", [{"kind": "bench"}, []])
def test_other_record_kinds_are_refused_in_one_line(tmp_path, made):
    done = drawn(tmp_path, made)
    assert done.returncode != 0
    assert "is no record of workflows.run.validation" in done.stderr
    assert done.stderr.count("\n") == 1

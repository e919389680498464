"""The simulator's validation: steps that last as simulated have no error, and rates come from no judged step."""

import json
from pathlib import Path

import pytest

from memascend.simulator import Event, write_trace
from workflows.run import validation


def device(k: int, context: int, batch: int) -> dict:
    sizes = {"k": k, "context": context, "batch": batch, "block_flops": 1e9}
    outside = {"outside_forward_s": 0.05, "outside_both_s": 0.15}
    return sizes | {"block_forward_s": 0.01, "block_both_s": 0.03} | outside


FOUND = {
    "memory_bytes_per_s": 20e9,
    "copy_bytes_per_s": 8e9,
    "paths": [each | {"read_gb_per_s": 4, "write_gb_per_s": 2} for each in validation.PATHS],
    "adamw_bytes_per_s": 15e9,
    "tiny": device(*validation.TINY),
    "points": [device(*point) for point in validation.POINTS],
}


def traces(folder: Path, point: dict, run: validation.Run, own_s: dict, slower: float) -> None:
    """As if each step had taken `slower` times what is simulated, but for one that something held up; the last of the
    updates in a backward pass are waited for after it."""
    simulated = validation.simulated_s(FOUND, point, run, own_s)
    if run == validation.UPDATES_IN_BACKWARD:
        simulated |= {"backward": 0.75 * simulated["backward"], "optimizer": 0.25 * simulated["backward"]}
    for path in validation.traces_of(folder, run, point["k"], point["context"], point["batch"]):
        at, events = 0.0, []
        for phase in (phase for phase in simulated if phase != "step"):
            end = at + slower * simulated[phase] + (9 if path.stem.endswith("-2") else 0)
            events.append(Event(name=phase, phase=phase, resource="main", begin_s=at, end_s=end))
            at = end
        write_trace(path, events, lane="measured", source="here", system=run[0], arm=run[1])


@pytest.mark.parametrize(("slower", "error"), [(1.0, 0.0), (2.0, -50.0)])
def test_the_error_of_every_phase_is_simulated_over_the_median_measured(tmp_path, slower, error):
    (tmp_path / "rates.json").write_text(json.dumps(FOUND))
    for run in validation.RUNS:
        simulated = validation.simulated_s(FOUND, FOUND["tiny"], run, {})
        own_s = {phase: 0.2 for phase in validation.PHASES if phase in simulated}
        traces(tmp_path, FOUND["tiny"], run, own_s, 1.0)
        found = validation.own_seconds(tmp_path, FOUND, run)
        assert found == pytest.approx(own_s, rel=0.1)  # some of it passes while the SSD is waited for
        for point in FOUND["points"]:
            traces(tmp_path, point, run, found, slower)
    record = validation.judge(tmp_path)
    assert {(row["system"], row["arm"]) for row in record["rows"]} == set(validation.RUNS)
    assert [row["error_percent"] for row in record["rows"]] == pytest.approx([error] * len(record["rows"]), abs=1e-6)
    assert record["steps"]["count"] == len(validation.RUNS) * len(validation.POINTS)
    assert record["phases"]["median_size_percent"] == pytest.approx(-error, abs=1e-6)
    assert f"median {error:.0f} %" in validation.as_text(record).replace("-0 %", "0 %")

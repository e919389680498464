"""The simulator's validation: steps that last as simulated have no error, and no rate comes from a judged step."""

import json
import subprocess
from pathlib import Path

import pytest

from memascend.simulator import Event, write_trace
from workflows.run import validation

FOUND = {"memory_bytes_per_s": 20e9, "copy_bytes_per_s": 8e9, "adamw_bytes_per_s": 15e9}
HOST = {
    "forward": {"each_block": 0.01, "outside": 0.05},
    "backward": {"each_block": 0.03, "outside": 0.1},
    "optimizer": {"each_block": 0.02, "outside": 0.04},
}


def trace(folder: Path, run: validation.Run, point: validation.Point, called: str, seconds: dict, waits_s=0.0) -> None:
    """Write traces of steps that took so long, and `waits_s` more in each phase, except for one that was delayed."""
    for path in validation.traces_of(folder, run, point, called):
        at, events = 0.0, []
        for phase, lasts in seconds.items():
            end = at + lasts + waits_s + (9 if path.stem.endswith("-2") else 0)
            events.append(Event(name=phase, phase=phase, resource="main", begin_s=at, end_s=end))
            if waits_s:
                events.append(Event(name="wait", phase=phase, resource="wait", begin_s=at, end_s=at + waits_s))
            if run == validation.UPDATES_IN_BACKWARD and phase == "optimizer":  # that of another thread, in backward
                began = events[-1].begin_s if waits_s else at
                events.append(Event(name="AdamW", phase="backward", resource="cpu", begin_s=began, end_s=began + lasts))
            at = end
        write_trace(path, events, lane="measured", source="here", system=run[0], arm=run[1])


def smaller_models(folder: Path) -> None:
    (folder / "rates.json").write_text(json.dumps(FOUND))
    for run in validation.RUNS:
        for point in validation.POINTS:
            for blocks in validation.BLOCKS:
                seconds = {phase: each["outside"] + blocks * each["each_block"] for phase, each in HOST.items()}
                for when in validation.ROUNDS:
                    trace(folder, run, point, f"{blocks}-{when}", seconds, waits_s=0.3)


def test_seconds_per_block_are_the_slope_between_two_models(tmp_path):
    smaller_models(tmp_path)
    for run in validation.RUNS:
        found = validation.host_seconds(tmp_path, run, validation.POINTS[0])
        for phase, each in HOST.items():
            assert found[phase] == pytest.approx(each | {"hook": 0.0}), (run, phase)


def test_hook_seconds_are_the_usual_compute_time_before_a_read(tmp_path):
    run, point = ("memascend", "memascend"), validation.POINTS[0]
    for blocks in validation.BLOCKS:
        for when in validation.ROUNDS:
            for path in validation.traces_of(tmp_path, run, point, f"{blocks}-{when}"):
                events = []
                # before the last one another module computes
                for number, hook in enumerate((0.004, 0.004, 0.004, 0.05)):
                    for resource, begin, end in (("gpu0", 0.0, 0.06), ("ssd.read", hook, 0.08)):
                        span = {"begin_s": number + begin, "end_s": number + end}
                        events.append(Event(name="", phase="forward", resource=resource, **span))
                write_trace(path, events, lane="measured", source="here", system=run[0], arm=run[1])
    assert validation.hook_seconds(tmp_path, run, point, "forward") == pytest.approx(0.004)
    assert validation.hook_seconds(tmp_path, run, point, "backward") == 0.0


def test_computation_of_a_hook_does_not_overlap_its_read():
    run, point = ("memascend", "memascend"), validation.POINTS[1]
    with_hooks = {phase: each | {"hook": 0.0005} for phase, each in HOST.items()}
    made = [validation.simulated(FOUND, run, point, "slower", host) for host in (HOST, with_hooks)]
    without, seconds = (validation.thread_seconds(each) for each in made)
    assert seconds["forward"] > 1.05 * without["forward"]
    computing = [sum(e.end_s - e.begin_s for e in each.simulated.events if e.resource == "gpu0") for each in made]
    assert computing[1] == pytest.approx(computing[0], rel=0.01)  # the time is a part of that


@pytest.mark.parametrize(("slower", "error"), [(1.0, 0.0), (2.0, -50.0)])
def test_error_of_every_phase_is_simulated_over_median_measured(tmp_path, slower, error):
    smaller_models(tmp_path)
    for run in validation.RUNS:
        for point in validation.POINTS:
            for drive in validation.drives_of(run):
                made = validation.simulated(FOUND, run, point, drive, validation.host_seconds(tmp_path, run, point))
                seconds = {phase: slower * s for phase, s in validation.thread_seconds(made).items() if phase != "step"}
                if run == validation.UPDATES_IN_BACKWARD:  # the last of them are waited for after the backward pass
                    seconds |= {"backward": 0.75 * seconds["backward"], "optimizer": 0.25 * seconds["backward"]}
                trace(tmp_path, run, point, drive, seconds)
    record = validation.judge(tmp_path)
    assert {(row["system"], row["arm"]) for row in record["rows"]} == set(validation.RUNS)
    assert [row["error_percent"] for row in record["rows"]] == pytest.approx([error] * len(record["rows"]), abs=1e-6)
    assert record["steps"]["count"] == 42  # six systems on two drives, two that use none, at three points
    assert record["phases"]["half_within_percent"] == pytest.approx(abs(error), abs=1e-6)
    assert f"nine of ten within {abs(error):.0f} %" in validation.as_text(record)


def test_slower_drive_and_slower_products_lengthen_dependent_phases(tmp_path):
    run, point = ("zero_infinity", "as_published"), validation.POINTS[1]
    faster, slower = (
        validation.thread_seconds(validation.simulated(FOUND, run, point, drive, HOST)) for drive in validation.DRIVES
    )
    assert slower["optimizer"] > 1.5 * faster["optimizer"]
    products = HOST | {"backward": {"each_block": 0.3, "outside": 0.1}}
    longer = validation.thread_seconds(validation.simulated(FOUND, run, point, "faster", products))
    assert longer["backward"] > 3 * faster["backward"]
    assert longer["forward"] == pytest.approx(faster["forward"], rel=0.2)


def judged_once(tmp_path: Path) -> Path:
    """Write a record in which every simulated phase is off by a quarter."""
    rows = []
    for run in validation.RUNS:
        for point in validation.POINTS:
            for drive in validation.drives_of(run):
                made = validation.thread_seconds(validation.simulated(FOUND, run, point, drive, HOST))
                rows += [
                    validation._named(run, point) | {"drive": drive, "phase": phase, "measured_s": seconds / 1.25}
                    for phase, seconds in made.items()
                ]
    hosts = [validation._named(run, point) | HOST for run in validation.RUNS for point in validation.POINTS]
    when = {"commit": "abc", "dirty": False, "started_at": "2026-01-01T00:00:00Z"}
    record = tmp_path / "old.json"
    record.write_text(json.dumps({"rates": FOUND, "host_s": hosts, "rows": rows} | when))
    return record


def test_record_judged_again_keeps_its_measurements_and_their_date(tmp_path):
    again = validation.judge_again(judged_once(tmp_path))
    assert again["measured"] == {"commit": "abc", "dirty": False, "started_at": "2026-01-01T00:00:00Z"}
    assert [row["error_percent"] for row in again["rows"]] == pytest.approx([25.0] * len(again["rows"]))
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps(again | {"commit": "def", "dirty": True, "started_at": "2026-02-02T00:00:00Z"}))
    assert validation.judge_again(twice) == again


def test_foreign_and_incomplete_records_are_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"kind": "bench"}')
    with pytest.raises(ValueError, match=r"other.json: not a record of this program"):
        validation.judge_again(tmp_path / "other.json")
    record = judged_once(tmp_path)
    less = json.loads(record.read_text())
    less["rows"] = [row for row in less["rows"] if row["phase"] != "backward"]
    record.write_text(json.dumps(less))
    with pytest.raises(ValueError, match=r"has no backward of zero_infinity-as_published, k = 8, faster"):
        validation.judge_again(record)
    with pytest.raises(ValueError, match="leave one of them out"):
        validation.main(["--out", str(tmp_path / "x.json"), "--record", str(record), "--folder", str(tmp_path)])


@pytest.mark.deepspeed
@pytest.mark.slow
def test_training_stops_after_its_last_trace_and_leaves_nothing_else(tmp_path):
    paths = {tmp_path / "drives" / "path0": [400e6, 300e6]}
    model = validation._fewer_blocks(tmp_path, 4)
    run, point = ("zero_infinity", "as_published"), (32, 32, 1)
    validation.train(tmp_path, paths, run, point, "slow", model)
    traces = validation.traces_of(tmp_path, run, point, "slow")
    assert sorted(tmp_path.iterdir()) == sorted([*traces, Path(model)])
    assert len(validation.steps_of(tmp_path, run, point, "slow")) == validation.STEPS - 1
    made = [trace.stat().st_mtime_ns for trace in traces]
    validation.train(tmp_path, paths, run, point, "slow", model)
    assert [trace.stat().st_mtime_ns for trace in traces] == made


def test_failed_training_raises_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        validation.train(
            tmp_path, {tmp_path / "drives" / "path0": None}, ("lohan", "optimized"), (32, 32, 1), "x", "nobody"
        )

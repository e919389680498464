"""If a stop cuts the last evaluation short, the run is stopped, not done, and its report says whose loss it has."""

import json

import pytest

from memascend.training import launch, preparation, recorded_text, report
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder
from memascend.training.info import as_text, info
from memascend.training.processes import FINISHED, STOPPED
from memascend.training.progress import read_metrics
from memascend.training.worker import Worker

STEP = {"kind": "step", "tokens": 8, "skipped": 0, "loss": 1.0, "seconds": 1.0, "read_bytes": 0, "written_bytes": 0}


def last_step(stop_in_step: bool, stop_in_evaluation: bool) -> str:
    """Return how a run ends that is asked to stop in its last step, or in the evaluation after it."""
    run = Worker.__new__(Worker)
    run.config = TrainConfig(model="m", data=["d"], save_every=0, eval_every=0, eval_sequences=2)
    run.step, run.steps, run.saved, run.evaluated = 1, 2, 0, 0
    run.ranks, run.eval_data = 1, [0, 1]
    run._write_checkpoint = lambda: None
    run._keep = lambda: None

    def evaluate():
        run.evaluated = 0 if stop_in_evaluation else run.step
        return stop_in_evaluation

    def step():
        run.step += 1
        return stop_in_step

    run._evaluate, run._one_step = evaluate, step
    return run._train()


@pytest.mark.parametrize(("in_step", "in_evaluation"), [(True, False), (False, True)])
def test_stop_before_or_in_last_evaluation_stops_the_run(in_step, in_evaluation):
    assert last_step(in_step, in_evaluation) == STOPPED


def test_run_without_a_stop_finishes():
    assert last_step(False, False) == FINISHED


def test_report_says_which_step_was_evaluated():
    rows = [STEP | {"step": 1}, {"kind": "eval", "step": 1, "loss": 2.5}, STEP | {"step": 2}]
    summary = report.summary(rows)
    assert (summary["eval_step"], summary["steps"]) == (1, 2)
    assert report._losses(summary) == [
        "- loss 1.0000 at the first step, 1.0000 at the last; 2.5000 on the evaluation text after step 1"
    ]
    assert report._losses(report.summary([*rows, {"kind": "eval", "step": 2, "loss": 2.0}])) == [
        "- loss 1.0000 at the first step, 1.0000 at the last; 2.0000 on the evaluation text"
    ]
    assert report._losses(report.summary(rows[1:2])) == ["- loss 2.5000 on the evaluation text"]


@pytest.fixture
def run(tmp_path):
    """Make a run of two steps whose states are not kept, and whose last evaluation is missing."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    launch.save_config(folder, TrainConfig(model="m", data=["d"], system="in_memory", steps=2, eval_sequences=2))
    prepared = {"train_tokens": 4, "eval_tokens": 4, "eval_sequences": 2, "parameters": 10, "context": 2}
    folder.prepared.write_text(json.dumps(prepared))
    folder.metrics.write_text("".join(json.dumps(STEP | {"step": step}) + "\n" for step in (1, 2)))
    return folder


def test_info_suggests_resume_if_last_evaluation_is_missing(run):
    assert f"memascend train --output {run.root} --resume" in as_text(info(run.root)).splitlines()[-1]


def test_info_suggests_resume_if_the_last_step_is_not_saved(run):
    with run.metrics.open("a") as file:
        file.write(json.dumps({"kind": "eval", "step": 2, "loss": 1.0}) + "\n")
    said = as_text(info(run.root))
    assert "done" not in said
    assert f"memascend train --output {run.root} --resume" in said


def test_info_reports_incomplete_states_under_both_names(run, monkeypatch):
    monkeypatch.setattr("memascend.training.info._kept", lambda _: (None, True))
    found = info(run.root)
    assert found["states_are_partial"] is found["states_are_torn"] is True
    assert "states       incomplete: a step was interrupted" in as_text(found)


def test_info_of_a_run_that_trains_leaves_its_states_alone(run, monkeypatch):
    """A second process that opens them stalls the training."""

    def opened(_):
        raise AssertionError("the states were opened")

    monkeypatch.setattr("memascend.training.info._kept", opened)
    with run.held(resume=True) as lock:
        lock.say("process 12")
        found = info(run.root)
    assert (found["trains"], found["kept_step"], found["step"]) == ("process 12", None, 2)
    said = as_text(found)
    assert "starts from the beginning" not in said
    assert said.splitlines()[-1] == "next         wait: it trains (process 12)"


def test_info_without_preparation_does_not_announce_a_fresh_start(run):
    run.prepared.unlink()
    said = as_text(info(run.root))
    assert "prepared.json is missing" in said
    assert "starts from the beginning" not in said


@pytest.mark.parametrize("text", ["5", "{}", '{"kind": "step"}', '{"kind": "step", "step": "x"}', "[1]", '{"kind": 1}'])
def test_invalid_line_of_the_metrics_is_left_out(run, text):
    with run.metrics.open("a") as file:
        file.write(text + "\n")
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2]


@pytest.mark.parametrize("text", ["{}", "[]", '"x"', "5"])
def test_malformed_preparation_is_reported_as_damaged(run, text):
    run.prepared.write_text(text)
    with pytest.raises(ValueError, match=r"prepared\.json is damaged .*: remove .*--resume prepares"):
        preparation.read_prepared(run)


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"train.tokens": 5, "eval.tokens": 5}', '{"train.tokens": {"size": 1}, "eval.tokens": {"size": 1}}', "{}"],
)
def test_malformed_text_record_is_reported_as_damaged(run, text):
    run.text.write_text(text)
    with pytest.raises(ValueError, match=r"text\.json is damaged"):
        recorded_text.recorded(run)

"""After --resume a completed step has its row in the metrics and its
evaluation, even if a kill came before they were written."""

import json
import os
import subprocess

import pytest

from tests.train_runs import STEPS, command, environment, evaluations, finished_run, losses, options_for, train

# Python imports this file when it starts; a rank then kills itself at the place that DIES_IN names.
KILLER = r"""
import os, signal, sys

if "memascend.training.worker" in sys.orig_argv:
    from memascend.engine.state_store import StateStore
    from memascend.training.progress import Progress

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_in_an_update(self, record, commit=StateStore.commit):
        commit(self, record)
        redo = record.get("redo", {})
        if len(redo.get("done", ())) == 3 and redo["facts"]["step"] == 3:
            die()

    def dies_as_it_evaluates(self, step, *found, evaluation=Progress.evaluation):
        evaluation(self, step, *found) if step < 4 else die()

    def dies_before_the_row(self, record, step=Progress.step):
        step(self, record) if record.step < 3 else die()

    if os.environ["DIES_IN"] == "update":
        StateStore.commit = dies_in_an_update
    elif os.environ["DIES_IN"] == "row":
        Progress.step = dies_before_the_row
    else:
        Progress.evaluation = dies_as_it_evaluates
"""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.deepspeed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "at", "versions"),
    [slow("update", 3, "one"), slow("row", 3, "one"), slow("evaluation", 4, "one"), slow("evaluation", 4, "two")],
)
def test_resume_adds_missing_row_and_evaluation_of_killed_step(tmp_path, tmp_path_factory, place, at, versions):
    """With one version of the states a step is committed before its row is
    written, with two after it; evaluations follow."""
    reference, more = finished_run(tmp_path_factory, "lohan"), ("--state-versions", versions)
    output, options = tmp_path / "run", options_for(reference.parent / "text", "lohan", *more)
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    killer = {**environment(), "PYTHONPATH": os.pathsep.join(paths), "DIES_IN": place}
    died = subprocess.run(command(output, *options), env=killer, capture_output=True, text=True, timeout=280)
    assert died.returncode != 0
    assert max(losses(output)) == (at if place == "evaluation" else at - 1)
    assert at not in evaluations(output)

    done = train(output, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resume  from step {at}, whose states are on the SSD" in done.stdout
    assert losses(output) == losses(reference)
    assert evaluations(output) == evaluations(reference)
    report = json.loads((output / "report.json").read_text())
    assert report["summary"]["steps"] == STEPS
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "step" and row["step"] == at]
    known = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    (same,) = [row for row in known if row["kind"] == "step" and row["step"] == at]
    for name in ("loss", "learning_rate", "loss_scale", "skipped", "tokens"):
        assert row[name] == same[name], name
    assert row.keys() == same.keys()
    assert (row["seconds"] is None) == (place != "evaluation")

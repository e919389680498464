"""A run of stages continues after a failure, reports the result of each, and restarts where it was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from workflows import gpu, stages
from workflows.experiments import Experiments
from workflows.stages import FAILED, OK, SKIPPED, STOPPED, Stage

ROOT = Path(__file__).resolve().parents[2]


def shell(name: str, text: str, **more) -> Stage:
    return Stage(name=name, command=["sh", "-c", text], **more)


def test_failed_stage_skips_only_the_stages_that_need_it(tmp_path, capsys):
    said = []
    outcomes = stages.run_stages(
        [
            shell("torch", "echo sees a device"),
            shell("tests", "echo 3 failed; exit 7", needs=["torch"]),
            shell("of-tests", "echo never", needs=["tests"]),
            shell("doctor", "echo 9 ok"),
            Stage(name="whole", command=["false"], skip="only a part was asked for"),
        ],
        tmp_path,
        "c0",
        say=said.append,
    )
    assert [each.status for each in outcomes] == [OK, FAILED, SKIPPED, OK, SKIPPED]
    assert outcomes[1].exit_status == 7
    assert outcomes[1].found == "3 failed"
    assert outcomes[2].found == "it needs tests"
    assert stages.failed(outcomes) == ["tests", "of-tests"]
    assert stages.exit_status(outcomes) == 1
    assert "tests, of-tests" in capsys.readouterr().err
    assert said[3].startswith("[2/5] tests: failed (exit status 7), ")
    assert said[-1] == "[5/5] whole: skipped: only a part was asked for"


def test_second_call_repeats_only_failed_and_changed_stages(tmp_path):
    count = tmp_path / "count"
    counts = f"echo x >> {count}; "
    both = [shell("first", counts + "echo one"), shell("second", "test -e there && echo two", needs=["first"])]
    out = tmp_path / "out"
    assert stages.exit_status(stages.run_stages(both, out, "c0", say=lambda line: None)) == 1
    both[1] = shell("second", "echo two", needs=["first"])
    assert stages.exit_status(stages.run_stages(both, out, "c0", say=lambda line: None)) == 0
    assert count.read_text() == "x\n"
    stages.run_stages(both, out, "c1", say=lambda line: None)  # another commit
    assert count.read_text() == "x\n" * 2
    stages.run_stages(both, out, "c1", again=True, say=lambda line: None)
    assert count.read_text() == "x\n" * 3
    (out / "01-first.log").unlink()
    stages.run_stages(both, out, "c1", say=lambda line: None)
    assert count.read_text() == "x\n" * 4


def test_unreadable_state_counts_as_no_state(tmp_path):
    (tmp_path / stages.STATE).write_text('{"stages": [{"name": "x", "colour": "red"}]}')
    assert stages.read(tmp_path) == []
    (tmp_path / stages.STATE).write_text("{")
    assert stages.read(tmp_path) == []


def test_missing_program_is_a_failure_that_names_it(tmp_path):
    (outcome,) = stages.run_stages([Stage(name="a", command=["no-such-program"])], tmp_path, "", say=lambda line: None)
    assert (outcome.status, outcome.exit_status) == (FAILED, 127)
    assert outcome.found == "no-such-program: No such file or directory"


def test_finding_of_a_stage_is_its_last_matching_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("$ pytest\n\x1b[32m==== 12 passed, 3 skipped in 4.00s ====\x1b[0m\n\nbye\n")
    assert stages.finding(log, r"\d+ passed") == "12 passed, 3 skipped in 4.00s"
    assert stages.finding(log, r"nothing like that") == "bye"
    log.write_text("$ true\n")
    assert stages.finding(log, r"\S") == "nothing was printed"


def test_failed_optional_stage_does_not_fail_the_whole(tmp_path):
    outcomes = stages.run_stages([shell("a", "exit 1", optional=True)], tmp_path, "", say=lambda line: None)
    assert outcomes[0].status == FAILED
    assert stages.exit_status(outcomes) == 0


def test_stages_in_an_impossible_order_are_refused(tmp_path):
    with pytest.raises(ValueError, match="stage b needs c, which does not come before it"):
        stages.run_stages([shell("b", "true", needs=["c"]), shell("c", "true")], tmp_path, "")
    with pytest.raises(ValueError, match="two stages are called b"):
        stages.run_stages([shell("b", "true"), shell("b", "true")], tmp_path, "")
    assert not list(tmp_path.iterdir())


SLEEPS = """
import sys
from pathlib import Path
from workflows.stages import Stage, run_stages
run_stages([Stage(name="a", command=["sh", "-c", "echo done"]),
            Stage(name="b", command=["sh", "-c", "echo sleeping; exec sleep 600"])], Path(sys.argv[1]), "")
"""


def test_ctrl_c_stops_the_stage_and_is_recorded(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SLEEPS, str(tmp_path)]
    run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "02-b.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "sleeping" in log.read_text().splitlines()[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) != 0
    found = {each.name: each.status for each in stages.read(tmp_path)}
    assert found == {"a": OK, "b": STOPPED}
    assert json.loads((tmp_path / stages.STATE).read_text())["schema_version"] == 1
    assert "| b | stopped |" in (tmp_path / stages.TABLE).read_text()


class Comes:
    """Raises SIGINT at the end of a function, after its work and before its caller has the result."""

    def __init__(self, monkeypatch, owner, name, times=1):
        self.work, self.left = getattr(owner, name), times
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        made = self.work(*args, **kwargs)
        while self.left:
            self.left -= 1
            signal.raise_signal(signal.SIGINT)
        return made


def interrupted(folder, *, command=("sleep", "60")):
    with pytest.raises(KeyboardInterrupt):
        stages.run_stages(
            [Stage(name="b", command=command), shell("after", "echo never")], folder, "", say=lambda line: None
        )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (found,) = stages.read(folder)
    return found


def test_ctrl_c_during_program_start_stops_it_and_is_recorded(tmp_path, monkeypatch):
    Comes(monkeypatch, subprocess, "Popen")
    found = interrupted(tmp_path)
    assert (found.status, found.exit_status) == (STOPPED, -signal.SIGINT)


@pytest.mark.parametrize("name", ["finding", "write", "line"])
def test_ctrl_c_after_a_stage_keeps_its_outcome_and_stops(tmp_path, monkeypatch, name):
    Comes(monkeypatch, stages, name)
    found = interrupted(tmp_path, command=("echo", "done"))
    assert (found.status, found.found) == (OK, "done")
    assert "| b | ok |" in (tmp_path / stages.TABLE).read_text()


def test_third_ctrl_c_kills_a_program_that_ignores_it(tmp_path, monkeypatch):
    ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    Comes(monkeypatch, subprocess, "Popen", times=stages.KILLED_AT)
    found = interrupted(tmp_path, command=(sys.executable, "-c", ignores))
    assert (found.status, found.exit_status) == (STOPPED, -signal.SIGKILL)


def test_stages_ignore_ctrl_c_if_their_caller_does(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (found,) = stages.run_stages([shell("a", "kill -INT $$; echo there")], tmp_path, "", say=lambda line: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found.status, found.found) == (OK, "there")


def test_rehearsal_has_the_runs_of_profile_gpu_without_a_gpu(tmp_path):
    document = yaml.safe_load(gpu.EXPERIMENTS.read_text())
    path = tmp_path / "experiments.yaml"
    path.write_text(yaml.safe_dump(gpu.rehearsal(document), sort_keys=False))
    real, small = Experiments(str(gpu.EXPERIMENTS), "gpu").runs, Experiments(str(path), "gpu").runs
    assert len(small) == len(real)
    assert {run["module"] for run in small.values()} == {run["module"] for run in real.values()}
    assert {name for run in small.values() for name in run["exhibits"] or ()} == {
        name for run in real.values() for name in run["exhibits"] or ()
    }
    assert any("--device cuda" in run["words"] for run in real.values())
    assert not any("--device cuda" in run["words"] for run in small.values())
    assert all(run["gpus"] == 0 for run in small.values())


@pytest.mark.parametrize("words", [[], ["--rehearse"], ["--exhibits", "memascend-fig08"]])
def test_gpu_stages_can_run_in_their_order(words):
    args = gpu.parse(words)
    found = gpu.stages_of(args)
    stages.check(found)
    assert [stage.name for stage in found][:4] == ["torch", "doctor", "ops", "tests"]
    accelerator = next(stage for stage in found if stage.name == "ops").environment["DS_ACCELERATOR"]
    assert accelerator == ("cpu" if args.rehearse else "cuda")
    assert all(bool(stage.skip) == bool(args.exhibits) for stage in found if stage.name.startswith("artifact"))
    assert gpu.folders(args.out)["raw_dir"] != "results/raw"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exhibits", "memascend-fig88"], "--exhibits: memascend-fig88 is no exhibit (did you mean memascend-fig"),
        (["--count", "--exhibits", "nope"], "--exhibits: nope is no exhibit; those with runs on a GPU: memascend-fig"),
        (["--exhibits", "memascend-fig08", "lohan"], "--exhibits: lohan has no run in the profile gpu; those with"),
        (["--exhibits", "lohan-fig01c"], "--exhibits: lohan-fig01c has no run in the profile gpu; those with"),
        (["--out", "/dev/null/x"], "--out '/dev/null/x' cannot be written: Not a directory; name a folder"),
        (["--out", "."], "--out '.': figures would go to figures, which is not a folder of their own; name one"),
        (["--out", "/"], "--out '/': figures would go to figures, which is not"),
        (["--count", "--out", "x/.."], "--out 'x/..': figures would go to figures/.., which is not"),
        (["--out", "results/exhibits"], "--out 'results/exhibits': figures would go to figures/exhibits, which is not"),
        (["--rehearse", "--out", __file__], f"--out '{__file__}' is not a folder; name a folder"),
    ],
)
def test_invalid_gpu_options_are_refused_before_the_first_stage(monkeypatch, capsys, words, said):
    monkeypatch.setattr(stages, "run_stages", lambda *args, **kwargs: pytest.fail("a stage began"))
    assert gpu.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"make gpu: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MEMASCEND_HOST", "Bad Host", "MEMASCEND_HOST='Bad Host': a host's name has lower-case letters"),
        ("MEMASCEND_NVME", "/nowhere/nvme", "MEMASCEND_NVME='/nowhere/nvme' is not a folder"),
    ],
)
def test_invalid_environment_variables_are_refused_before_the_first_stage(monkeypatch, capsys, name, value, said):
    monkeypatch.setattr(stages, "run_stages", lambda *args, **kwargs: pytest.fail("a stage began"))
    monkeypatch.setenv(name, value)
    assert gpu.main(["--rehearse"]) == 2
    assert capsys.readouterr().err.startswith(f"make gpu: {said}")


def test_ctrl_c_before_the_first_stage_gives_one_line(monkeypatch, capsys):
    def interrupted(names):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "exhibits_of", interrupted)
    assert gpu.main([]) == 130
    assert capsys.readouterr().err == "stopped before the first stage\n"


@pytest.mark.parametrize("cores", ["0", "-1", "many", "1.5"])
def test_invalid_numbers_of_cores_are_refused(capsys, cores):
    with pytest.raises(SystemExit):
        gpu.parse(["--cores", cores])
    assert "is neither a number of cores above 0 nor 'all'" in capsys.readouterr().err
    assert gpu.parse(["--cores", "2"]).cores == "2"


def test_paper_name_selects_its_exhibits_with_gpu_runs():
    assert gpu.exhibits_of(["memascend-fig08", "memascend-fig08"]) == ["memascend-fig08"]
    found = gpu.exhibits_of(["memascend"])
    assert {"memascend-fig08", "memascend-fig19"} < set(found)
    assert gpu.exhibits_of([]) == []


def test_message_for_an_unusable_gpu_gives_the_fix(monkeypatch):
    monkeypatch.setattr(gpu, "require_device", lambda device: None)
    assert gpu.why_not(None).endswith("rm -rf .venv, then make gpu")
    assert "nvidia-smi" in gpu.why_not("13.0")

    def missing(device):
        raise ValueError("none")

    monkeypatch.setattr(gpu, "require_device", missing)
    assert "make gpu GPU=--rehearse" in gpu.why_not(None)


def test_finding_of_runs_is_why_snakemake_stopped(tmp_path: Path) -> None:
    (runs,) = (stage for stage in gpu.stages_of(gpu.parse(["--rehearse"])) if stage.name == "runs")
    log = tmp_path / "log"
    log.write_text(
        "$ snakemake\n[ 2/9] record a\nStopped; what was finished is kept\nWorkflowError:\nAt least one job\n"
    )
    assert stages.finding(log, runs.finding) == "Stopped; what was finished is kept"
    log.write_text("$ snakemake\nMissingRuleException: no rule makes it\n")
    assert stages.finding(log, runs.finding) == "MissingRuleException: no rule makes it"

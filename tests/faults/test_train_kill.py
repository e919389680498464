"""`kill -9` at any instant of a training run: with --resume every loss equals that of an undisturbed run bit by bit."""

import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from memascend.training.checkpoint import listed
from tests.reflinks import file_system_with_reflinks
from tests.train_runs import STEPS, command, environment, evaluations, finished_run, losses, options_for, train

pytestmark = pytest.mark.deepspeed


def kill_after(output, seconds, *options):
    """Start a run and SIGKILL the parent after some seconds; return whether it was still running.

    If it was not, it must have succeeded, or have found that the ranks of a run killed earlier are still exiting.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command(output, *options), stdout=errors, stderr=errors, env=environment()) as run,
    ):
        try:
            status = run.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            return True
        errors.seek(0)
        said = errors.read()
        assert status == 0 or "is in use by" in said, f"exit {status}\n{said}"
        return False


def kill_at_step(output, step, *options):
    """Start a run, wait until the metrics show `step`, then SIGKILL the parent."""
    metrics = output / "metrics.jsonl"
    with subprocess.Popen(
        command(output, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    ) as run:
        while not metrics.is_file() or f'"step": {step},' not in metrics.read_text():
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)


def resume_to_the_end(output, *options):
    """Resume the run to its end. Ranks die with their parent, but not at the same instant: wait until the folder is
    free.

    `options`: those of a run that was killed before it had written its configuration.
    """
    deadline = time.monotonic() + 60
    while True:
        done = train(output, *(["--resume"] if (output / "config.yaml").exists() else options))
        if "is in use by" not in done.stderr or time.monotonic() > deadline:
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout


def stop_at_step(output, step, *options):
    """Start a run and send SIGTERM as soon as `step` is shown; return the exit status and the lines."""
    with subprocess.Popen(command(output, *options), stdout=subprocess.PIPE, text=True, env=environment()) as run:
        said = []
        for line in run.stdout:
            said.append(line)
            if f" {step}/{STEPS} " in line:
                run.send_signal(signal.SIGTERM)
    return run.returncode, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_stopped_and_then_killed_resumes_to_same_losses(tmp_path, tmp_path_factory):
    reference = finished_run(tmp_path_factory)
    output = tmp_path / "run"
    status, said = stop_at_step(output, 3, *options_for(reference.parent / "text"))
    assert status == 143
    assert "stopping: finishing this step, then writing a checkpoint" in "".join(said)
    assert said[-1] == f"  memascend train --output {output} --resume\n"
    assert listed(output / "checkpoints")[0][-1].step in (3, 4, 5)
    kill_at_step(output, random.SystemRandom().randrange(6, STEPS), "--resume")
    before = losses(output)
    assert before.items() <= losses(reference).items()
    said = resume_to_the_end(output)
    assert "resume  from step " in said
    assert "swap files of the dead run" in said
    assert losses(output) == losses(reference)
    # an evaluation that the stop cut short is left out
    assert evaluations(output)[STEPS] == evaluations(reference)[STEPS]
    assert not (output / "swap").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("versions", "states"), [("two", "fp32"), ("one", "fp32"), ("one", "int8")])
def test_resume_continues_from_states_on_ssd_without_a_checkpoint(tmp_path, tmp_path_factory, versions, states):
    work = ["lohan", *(["--states", states] if states != "fp32" else [])]
    reference = finished_run(tmp_path_factory, *work)
    output = tmp_path / "run"
    options = [*options_for(reference.parent / "text", *work), "--save-every", "0", "--state-versions", versions]
    kill_at_step(output, 4, *options)
    assert not (output / "checkpoints").exists()
    said = resume_to_the_end(output)
    kept = [line for line in said.splitlines() if "whose states are on the SSD" in line]
    assert kept in (
        ["resume  from step 3, whose states are on the SSD"],
        ["resume  from step 4, whose states are on the SSD"],
    )
    assert losses(output) == losses(reference)
    assert not list(output.glob("memascend-states-*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("versions", ["two", "one"])
@pytest.mark.parametrize("checkpoints", ["none", "weights", "full"])
def test_killed_run_resumes_exactly_for_all_state_and_checkpoint_options(
    tmp_path, tmp_path_factory, versions, checkpoints
):
    """test_checkpoints_and_export.py has one of these cases among the default tests: weights, with two versions."""
    reference = finished_run(tmp_path_factory, "lohan")
    output, step = tmp_path / "run", random.SystemRandom().randrange(2, STEPS)
    options = ["--state-versions", versions, "--checkpoints", checkpoints, "--save-every", "3"]
    kill_at_step(output, step, *options_for(reference.parent / "text", "lohan"), *options)
    said = resume_to_the_end(output)
    (resumed,) = [line for line in said.splitlines() if line.startswith("resume  from step ") and "SSD" in line]
    assert resumed in [f"resume  from step {each}, whose states are on the SSD" for each in range(step - 1, STEPS)]
    assert losses(output) == losses(reference)
    assert evaluations(output)[STEPS] == evaluations(reference)[STEPS]
    assert len(list(output.glob("memascend-states-*"))) == (0 if checkpoints == "full" else 1)
    assert (output / "model").exists() == (checkpoints != "none")
    assert [each.is_full for each in listed(output / "checkpoints")[0][-1:]] == {
        "none": [],
        "weights": [False],
        "full": [True],
    }[checkpoints]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_killed_mid_step_without_redo_resumes_from_checkpoint(tmp_path, tmp_path_factory):
    reference = finished_run(tmp_path_factory, "lohan", "--clip", "0")
    output, instants, lines = tmp_path / "run", random.SystemRandom(), []
    options = [*options_for(reference.parent / "text", "lohan", "--clip", "0"), "--state-versions", "checkpoint"]
    options += ["--save-every", "2"]
    for _ in range(12):
        with subprocess.Popen(
            command(output, *(["--resume"] if (output / "config.yaml").exists() else options)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        ) as run:
            for line in run.stdout:
                lines += [line] if line.startswith("resume ") else []
                if f"/{STEPS} " in line:
                    break
            time.sleep(instants.uniform(0, 0.3))
            run.send_signal(signal.SIGKILL)
    lines += [line for line in resume_to_the_end(output, *options).splitlines() if line.startswith("resume ")]
    interrupted = [line for line in lines if "left in the middle of a step (state_versions)" in line]
    assert all("from the last checkpoint, " in line or "there is no checkpoint" in line for line in interrupted)
    assert losses(output) == losses(reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("file_system", "paths"), [("btrfs", ()), ("xfs", ("a", "b"))], ids=["one path on Btrfs", "two on XFS"]
)
def test_kill_while_sharing_states_keeps_the_previous_checkpoint_whole(tmp_path, tmp_path_factory, file_system, paths):
    """If the file system has reflinks, a checkpoint takes the states' blocks from the swap files."""
    reference = finished_run(tmp_path_factory)
    with file_system_with_reflinks(tmp_path, file_system) as folder:
        output, tiers = folder / "run", [str(folder / path) for path in paths]
        for path in tiers:
            Path(path).mkdir()
        options = [*options_for(reference.parent / "text"), *(["--tiers", *tiers] if tiers else [])]
        for step in (4, 6):
            kill_in_a_save(output, step, *(["--resume"] if step > 4 else options))
            found, refused = listed(output / "checkpoints")
            assert refused == []
            assert step - 2 in [checkpoint.step for checkpoint in found]
            for checkpoint in found:
                checkpoint.check(checkpoint.state / "rank0.safetensors")
        said = resume_to_the_end(output)
        shared = [line for line in said.splitlines() if "of it shared with the swap files" in line]
        assert len(shared) == len([line for line in said.splitlines() if "  checkpoint " in line]) > 0
        assert losses(output) == losses(reference)
        assert evaluations(output)[STEPS] == evaluations(reference)[STEPS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [("--state-versions", "two"), ("--state-versions", "one"), ("--state-versions", "checkpoint", "--clip", "0")],
    ids=["two versions", "one version", "torn by a kill"],
)
def test_kill_during_background_checkpoint_keeps_the_previous_one_whole(tmp_path, tmp_path_factory, more):
    reference = finished_run(tmp_path_factory, "lohan", *(("--clip", "0") if "--clip" in more else ()))
    output = tmp_path / "run"
    options = options_for(reference.parent / "text", "lohan", *more)
    for step in (4, 6):
        kill_in_a_save(output, step, *(["--resume"] if step > 4 else options))
        found, refused = listed(output / "checkpoints")
        assert refused == []
        for checkpoint in found:
            checkpoint.check(checkpoint.state / "rank0.safetensors")
        assert found[-1].step >= step - 2
    resume_to_the_end(output)
    assert not list((output / "checkpoints").glob(".partial-*"))
    assert losses(output) == losses(reference)
    assert evaluations(output)[STEPS] == evaluations(reference)[STEPS]


def kill_in_a_save(output, step, *options):
    """Start a run and SIGKILL the parent as soon as the checkpoint of `step` is begun.

    Retries while the ranks of a run killed earlier are still exiting.
    """
    partial = output / "checkpoints" / f".partial-step-{step:08d}" / "state" / "rank0.safetensors"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with subprocess.Popen(
            command(output, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
        ) as run:
            while not partial.exists() and run.poll() is None:
                time.sleep(0.001)
            run.send_signal(signal.SIGKILL)
        if partial.exists() or (partial.parents[1].with_name(f"step-{step:08d}")).exists():
            return
    raise AssertionError(f"no checkpoint of step {step} was begun")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("system", "more"),
    [
        ("memascend", ()),
        ("memascend", ("--states", "bf16")),
        ("memascend", ("--dtype", "fp16")),
        ("memascend", ("--ranks", "2")),
        ("zero_offload", ()),
        ("zero_infinity", ()),
        ("lohan", ()),
        ("lohan", ("--clip", "0")),
        ("lohan", ("--state-versions", "one")),
        ("lohan", ("--state-versions", "checkpoint", "--clip", "0")),
        ("in_memory", ()),
        ("in_memory", ("--arm", "deepspeed_adamw")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_run_killed_repeatedly_ends_with_the_same_losses(tmp_path, tmp_path_factory, system, more):
    """Kills come from the first second on: in the preparation, while loading, in a step, while saving."""
    reference = finished_run(tmp_path_factory, system, *more)
    output, instants = tmp_path / "run", random.SystemRandom()
    options = options_for(reference.parent / "text", system, *more)
    kills = 0
    while kills < 6:
        resumed = (output / "config.yaml").exists()
        killed = kill_after(output, instants.uniform(0.5, 25), *(["--resume"] if resumed else options))
        kills += killed
        if (output / "metrics.jsonl").exists():
            assert losses_so_far(output).items() <= losses(reference).items()
        if not killed and (output / "report.json").exists():  # it had ended before the kill: start once more
            assert losses(output) == losses(reference)
            shutil.rmtree(output)
    resume_to_the_end(output, *options)
    assert losses(output) == losses(reference)


def losses_so_far(output):
    """Return the losses as `losses` does, for a file whose last line may be cut short."""
    from memascend.training.progress import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "step"}

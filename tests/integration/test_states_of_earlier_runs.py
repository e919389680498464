"""The states of a killed run on a drive of their own: who continues them, and where they are looked for."""

import dataclasses
import os
import shutil
import signal
import subprocess

import pytest

from memascend.engine.state_store import kept_facts
from memascend.training import launch, systems
from memascend.training.folder import RunFolder
from memascend.training.info import info
from tests.train_runs import command, environment, losses, patched_environment, text_folder, train

STEPS = 8
OPTIONS = ["--model", "llama3.2-1b", "--twin", "32", "--context", "32", "--files", "*.py", "--system", "lohan"]
OPTIONS += ["--accumulate", "1", "--eval-sequences", "0", "--save-every", "0", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Kill a run in or after its fourth step; return its folder. Its states are in `ssd` next to it."""
    parent = tmp_path_factory.mktemp("killed")
    options = [*OPTIONS, "--data", str(text_folder(parent)), "--nvme", "ssd"]
    with subprocess.Popen(
        command(parent / "run", *options),
        cwd=parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        said = []
        for line in run.stdout:  # it ends when the rank has ended, too
            said.append(line)
            if f" 3/{STEPS} " in line:
                run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL, "".join(said)
    return parent / "run"


@pytest.fixture
def copy(killed, tmp_path):
    """Copy the killed run and its states; return the configuration of the copy."""
    shutil.copytree(killed, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    config = dataclasses.replace(launch.saved_config(folder), nvme=str(tmp_path / "ssd"))
    launch.save_config(folder, config)
    (states,) = (killed.parent / "ssd").iterdir()
    shutil.copytree(states, systems.states_folder(config))
    return config


def test_run_with_a_relative_folder_is_resumed_from_another_directory(killed):
    config = launch.saved_config(RunFolder(killed))
    assert config.nvme == str(killed.parent / "ssd")
    assert systems.states_folder(config).parent == killed.parent / "ssd"


def test_new_run_in_place_of_a_removed_one_does_not_continue_its_states(copy, killed):
    step, states = info(copy.output_folder)["kept_step"], systems.states_folder(copy)
    shutil.rmtree(copy.output_folder)
    options = [*OPTIONS, "--data", str(killed.parent / "text"), "--nvme", copy.nvme, "--seed", "5"]
    done = train(copy.output_folder, *options)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"{states} holds the states of step {step} of an earlier run: remove it, or name another folder"
    assert done.stderr == f"memascend: error: {said} with --output\n"
    assert not copy.output_folder.exists()
    assert kept_facts(states)["step"] == step


def test_run_continues_in_another_place_once_its_states_are_moved_there(copy, tmp_path):
    run, other = copy.output_folder, tmp_path / "other"
    step, old = info(run)["kept_step"], systems.states_folder(copy)
    new = systems.states_folder(dataclasses.replace(copy, nvme=str(other)))
    config = (run / "config.yaml").read_bytes()
    done = train(run, "--resume", "--nvme", str(other))
    assert done.returncode == 2
    said = f"the states of step {step} are in {old}: move that folder to {new}, or leave --nvme out"
    assert done.stderr == f"memascend: error: {said}\n"
    assert not other.exists()
    assert (run / "config.yaml").read_bytes() == config
    other.mkdir()
    old.rename(new)
    done = train(run, "--resume", "--nvme", str(other))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resume  from step {step}, whose states are on the SSD\n" in done.stdout
    assert list(losses(run)) == list(range(1, STEPS + 1))


def test_resume_to_fewer_steps_than_were_kept_changes_nothing(copy):
    run, states = copy.output_folder, systems.states_folder(copy)
    step, config, size = info(run)["kept_step"], (run / "config.yaml").read_bytes(), os.stat(states / "states").st_size
    for checkpoints in ("full", "weights", "none"):
        done = train(run, "--resume", "--steps", "1", "--checkpoints", checkpoints)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"nothing to do: the states are at step {step}, past step 1; raise --steps above {step}" in done.stdout
        assert (run / "config.yaml").read_bytes() == config
        assert (info(run)["kept_step"], os.stat(states / "states").st_size) == (step, size)


# In the worker, the first step finds the disk full.
FULL = """
import errno

def full(self, **_):
    raise OSError(errno.ENOSPC, "No space left on device")

def patch(engine):
    engine.finish_step = full
"""


@pytest.mark.slow
def test_corrected_command_is_accepted_after_a_first_step_that_failed(killed, tmp_path):
    run, options = tmp_path / "run", [*OPTIONS, "--data", str(killed.parent / "text"), "--steps", "1"]
    surroundings = patched_environment(tmp_path, FULL)
    failed = subprocess.run(command(run, *options), env=surroundings, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "No space left on device" in failed.stderr
    assert {path.name for path in run.iterdir()} <= {"logs", "run.lock"}
    done = train(run, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(run)) == [1]

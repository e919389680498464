"""States that an earlier call left: no new run continues them, a failed start removes its own, and a resumed run that
changes its place does not lose them."""

import dataclasses
import json

import pytest

from memascend.training import children, launch, left_states, systems
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder

CONFIG = TrainConfig(model="m", data=["d"], system="lohan")


def config_of(folder, **changes):
    return dataclasses.replace(CONFIG, output=str(folder / "run"), **changes)


def new_run(config):
    return launch._opened(RunFolder(config.output_folder), config, False, {})


def begin_states(config):
    """Make the folder of the states, as the first write of a run does; return it."""
    folder = systems.states_folder(config)
    folder.mkdir(parents=True)
    (folder / "states").write_bytes(b"weights and moments")
    return folder


@pytest.mark.parametrize(
    ("step", "what"),
    [(37, "the states of step 37 of an earlier run"), (0, "files of an earlier run"), (None, "files of an earlier")],
)
def test_new_run_does_not_continue_the_states_of_an_earlier_one(tmp_path, monkeypatch, step, what):
    monkeypatch.setattr(left_states, "_kept_step", lambda folder: step)
    config = config_of(tmp_path, nvme=str(tmp_path / "ssd"))
    states = begin_states(config)
    with pytest.raises(ValueError, match=rf"^{states} holds {what}.*: remove it, or .* --output$"), new_run(config):
        pytest.fail("the run began")
    assert [path.name for path in tmp_path.iterdir()] == ["ssd"]
    assert [path.read_bytes() for path in states.iterdir()] == [b"weights and moments"]


def test_new_run_begins_where_no_states_are(tmp_path):
    config = config_of(tmp_path, nvme=str(tmp_path / "ssd"))
    other = begin_states(dataclasses.replace(config, output=str(tmp_path / "another")))
    systems.states_folder(config).mkdir()  # empty
    with new_run(config) as (opened, *_):
        assert opened == config
    assert other.is_dir()


def fail(config, error, rows=""):
    """Begin a new run, which raises the error after it has written its states and the rows of its metrics."""
    with new_run(config):
        begin_states(config)
        RunFolder(config.output_folder).metrics.write_text(rows)
        raise error


@pytest.mark.parametrize("nvme", [False, True], ids=["in the run's folder", "in --nvme"])
def test_start_that_fails_before_a_step_leaves_no_states(tmp_path, nvme):
    config = config_of(tmp_path, nvme=str(tmp_path / "ssd") if nvme else None)
    for _ in range(2):  # the corrected command is accepted
        with pytest.raises(ValueError, match="no memory"):
            fail(config, ValueError("no memory"))
    assert not config.output_folder.exists()
    assert not list(tmp_path.rglob("memascend-states-*"))


def test_failure_after_a_step_keeps_the_states(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(ValueError, match="no memory"):
        fail(config, ValueError("no memory"), json.dumps({"kind": "step", "step": 1}) + "\n")
    assert (systems.states_folder(config) / "states").is_file()
    assert RunFolder(config.output_folder).config.is_file()


def test_files_of_a_process_that_does_not_end_are_kept_for_resume(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(children.Stuck):
        fail(config, children.Stuck("rank 0 hangs"))
    assert (systems.states_folder(config) / "states").is_file()
    with launch._opened(RunFolder(config.output_folder), config, True, {}) as (resumed, *_):
        assert resumed == config


def resume_elsewhere(folder, monkeypatch, steps, checkpoint=None):
    """Resume a run of states in `old` with --nvme `new`; `steps`: those of the states in either; return both."""
    config = config_of(folder, nvme=str(folder / "new"))
    before = dataclasses.replace(config, nvme=str(folder / "old"))
    places = {}
    for name, each in (("old", before), ("new", config)):
        places[name] = begin_states(each) if name in steps else systems.states_folder(each)
    monkeypatch.setattr(left_states, "_kept_step", lambda folder: steps.get(folder.parent.name))
    run = RunFolder(config.output_folder)
    run.root.mkdir()
    if checkpoint is not None:
        (run.checkpoints / f"step-{checkpoint:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{checkpoint:08d}" / "manifest.json").write_text('{"files": {}}')
    launch.save_config(run, before)
    saved = run.config.read_text()
    try:
        with launch._opened(run, config, True, {"nvme": config.nvme}) as (resumed, *_):
            assert resumed.nvme == config.nvme
    except ValueError:
        assert run.config.read_text() == saved
        raise
    return places


@pytest.mark.parametrize(
    ("steps", "checkpoint"), [({"old": 400}, None), ({"old": 400}, 399), ({"old": 400, "new": 300}, 350)]
)
def test_resume_elsewhere_is_refused_while_newer_states_are_in_the_old_place(tmp_path, monkeypatch, steps, checkpoint):
    with pytest.raises(ValueError, match=r"^the states of step 400 are in .*/old/memascend-states-run-.*: move that "
        r"folder to .*/new/memascend-states-run-\w+, or leave --nvme out$"):  # fmt: skip
        resume_elsewhere(tmp_path, monkeypatch, steps, checkpoint)
    assert (tmp_path / "old").is_dir()


@pytest.mark.parametrize(
    ("steps", "checkpoint", "noted"),
    [
        ({}, 400, False),
        ({"new": 400}, 300, False),  # they were moved
        ({"old": 0}, None, False),  # no step was made
        ({"old": None}, 300, False),  # a kill interrupted their update
        ({"old": 400}, 400, True),
        ({"old": 300, "new": 400}, 200, True),
    ],
)
def test_resume_elsewhere_begins_if_no_newer_states_are_left(tmp_path, monkeypatch, capsys, steps, checkpoint, noted):
    places = resume_elsewhere(tmp_path, monkeypatch, steps, checkpoint)
    note = f"note: {places['old']} still holds the states of step {steps.get('old')}, which this run no longer needs\n"
    assert capsys.readouterr().out == (note if noted else "")


def test_another_path_to_the_same_folder_is_no_other_place(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").symlink_to("old")
    resume_elsewhere(tmp_path, monkeypatch, {"old": 400})


def test_systems_without_such_states_have_no_folder_for_them():
    assert systems.states_folder(dataclasses.replace(CONFIG, system="memascend")) is None

"""The input of `memascend train`: keys of the YAML file and flags, and its messages about invalid ones."""

import contextlib
import json
import re
import subprocess
import sys

import pytest

from memascend import cli, systems
from memascend.training import config as configs
from memascend.training import launch
from memascend.training import systems as systems_of_training
from memascend.training.config import TrainConfig, checked, complete, from_text, read_config, resumed
from memascend.training.folder import RunFolder
from memascend.training.schedule import change_note


def refusal(capsys, *arguments: str) -> str:
    """Return what the command writes to standard error; it must be one line, with exit status 2."""
    assert cli.main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("memascend: error: ")
    return captured.err


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\ndata: d\nlerning_rate: 1e-5\n", "unknown key 'lerning_rate' (did you mean learning_rate?)"),
        ("model: m\ndata: d\nxyzzy: 1\n", "unknown key 'xyzzy'; known keys: model, "),
        ("model: m\ndata: d\nsteps: ten\n", "'steps' must be a whole number, got 'ten'"),
        ("model: m\ndata: d\nsteps: 1.5\n", "'steps' must be a whole number, got 1.5"),
        ("model: m\ndata: d\nsteps: true\n", "'steps' must be a whole number, got True"),
        ("model: m\ndata: d\nsteps: 0\n", "'steps' must be at least 1, got 0"),
        ("model: m\ndata: d\nrandom_weights: 1\n", "'random_weights' must be true or false, got 1"),
        ("model: m\ndata: d\nclip: .nan\n", "'clip' must be a finite number"),
        ("model: m\ndata: d\nbeta2: 1.0\n", "'beta2' must be below 1, got 1.0"),
        ("model: m\ndata: d\ndtype: fp8\n", "'dtype' must be one of bf16, fp16, fp32, got 'fp8'"),
        ("model: m\ndata: [1]\n", "'data' must be a text or a list of texts, got [1]"),
        ("model: m\ndata: d\nlora: {r: 8}\n", "LoRA and other adapters are out of scope"),
        ("model: m\ndata: d\nlora_r: 8\n", "LoRA and other adapters are out of scope"),
        ("- 1\n", "holds no keys"),
        ("a: [\n", "is not YAML"),
        ("data: d\n", "no model: name one with --model"),
        ("model: m\n", "no data: name text files"),
        ("model: m\ndata: d\ntwin: 3\n", "--twin 3 is not a power of two"),
    ],
)
def test_invalid_configuration_gives_one_line_that_names_the_key(tmp_path, capsys, text, said):
    assert said in refusal(capsys, "--config", write(tmp_path / "run.yaml", text))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "ten"], "--steps: 'ten' is not a whole number"),
        (["--steps", "-1"], "'steps' must be at least 1"),
        (["--learning-rate", "fast"], "--learning-rate: 'fast' is not a number"),
        (["--learning-rate", "inf"], "must be a finite number"),
        (["--schedule", "wave"], "'schedule' must be one of cosine, linear, constant"),
        (
            ["--lora-r", "8"],
            "--lora-r: LoRA and other adapters are out of scope: memascend trains all weights; leave it",
        ),
        (["--lora-rnk", "8"], "unknown option --lora-rnk (see"),
        (["--resume"], "--resume needs the run's folder"),
    ],
)
def test_invalid_flag_gives_a_one_line_error(capsys, arguments, said):
    assert said in refusal(capsys, *arguments)


def test_missing_configuration_file_gives_a_one_line_error(tmp_path, capsys):
    assert "cannot read the configuration" in refusal(capsys, "--config", str(tmp_path / "none.yaml"))


def test_flag_overrides_the_configuration_file(tmp_path, capsys):
    path = write(tmp_path / "run.yaml", "model: m\ndata: d\ntwin: 4\n")
    assert "--twin 6 is not a power of two" in refusal(capsys, "--config", path, "--twin", "6")


def test_numbers_without_a_decimal_point_are_read_as_numbers():
    """YAML 1.1 reads 1e-5 as text."""
    assert checked("learning_rate", "1e-5", "here") == 1e-5
    assert checked("clip", 1, "here") == 1.0
    assert from_text("learning_rate", "3e-4") == 3e-4
    assert from_text("steps", "12") == 12


def test_every_key_has_a_flag_in_the_help():
    done = subprocess.run(
        [sys.executable, "-m", "memascend.cli", "train", "--help"], capture_output=True, text=True, check=True
    )
    for name in configs.OPTIONS:
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_help_of_system_option_names_every_accepted_system(capsys):
    for command in ("plan", "train"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        words = capsys.readouterr().out.partition("\n  --system ")[2].partition("\n  --")[0]
        taken = [name for name in systems.names() if command == "plan" or systems.arrangement(name).runs]
        assert sorted(set(systems.names()) & set(re.findall(r"\w+", words))) == taken


def test_configuration_survives_a_round_trip_through_its_file(tmp_path):
    import yaml

    config = complete({"model": "m", "data": ["a", "b"], "steps": 3, "learning_rate": 1e-5, "arm": None})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False))
    assert complete(read_config(path)) == config
    json.dumps(config.as_dict())


def test_resumed_run_may_change_its_end_but_not_its_seed():
    saved = TrainConfig(model="m", data=["d"], steps=10).as_dict()
    assert resumed(saved, {"steps": 20, "keep": 1, "model": "m"}).steps == 20
    with pytest.raises(ValueError, match="'seed' was 0, not 1"):
        resumed(saved, {"seed": 1})


def test_epochs_replace_the_steps_of_a_resumed_run():
    saved = TrainConfig(model="m", data=["d"], steps=10).as_dict()
    assert resumed(saved, {"epochs": 2.0}).steps is None
    assert resumed(saved, {"epochs": 2.0, "steps": 30}).steps == 30
    assert resumed(saved, {"epochs": 1.0}).steps == 10  # from the file of the first call


def test_epochs_flag_wins_over_saved_steps_on_resume(monkeypatch):
    calls = []
    monkeypatch.setattr("memascend.training.launch.launch", lambda *_, **options: calls.append(options["wanted"]) or 0)
    for flags in (["--epochs", "1"], ["--epochs", "1", "--steps", "5"], []):
        with contextlib.suppress(SystemExit):
            cli.main(["train", "--resume", "--output", "run", *flags])
    assert [wanted.get("steps", "as saved") for wanted in calls] == [None, 5, "as saved"]


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("model", r"or start a new run from this one's weights: --model \S+/run/model --output another$"),
        (
            "states",
            r"or start a new run from this one's weights: memascend export \S+/run FOLDER, then --model ",
        ),
        (None, r"or begin again \(no step of this run is kept\): name another --output, or remove \S+/run$"),
    ],
)
def test_refused_option_names_where_the_weights_are(tmp_path, kept, said):
    config = TrainConfig(model="m", data=["d"], system="lohan", output=str(tmp_path / "run"))
    folder = RunFolder(config.output_folder)
    folder.root.mkdir()
    if kept == "model":
        folder.model.mkdir()
    if kept == "states":
        systems_of_training.states_folder(config).mkdir(parents=True)
        folder.metrics.write_text('{"kind": "step", "step": 1}\n')
    launch.save_config(folder, config)
    with pytest.raises(ValueError, match=said), launch._opened(folder, config, True, {"seed": 1}):
        pytest.fail("the run continued")


def test_file_as_nvme_is_refused_before_the_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda *_: pytest.fail("the text was read"))
    (tmp_path / "file").touch()
    config = TrainConfig(model="m", data=["d"], nvme=str(tmp_path / "file"), output=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"--nvme: \S+/file is a file; name a folder on the SSD"):
        launch.launch(config, resume=False, wanted={})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("step", "steps", "before", "schedule", "said"),
    [
        (6, 24, 12, "cosine", "the learning rate of step 7 is 1.84e-03, not 1.31e-03"),
        (12, 24, 12, "cosine", "the learning rate of step 13 is 1.14e-03, the schedule of 12 steps had ended"),
        (6, 24, 12, "constant", None),
        (6, 12, 12, "cosine", None),
        (12, 12, 24, "cosine", None),  # no step is left
        (0, 24, 12, "cosine", None),
        (6, 12, None, "cosine", None),
    ],
)
def test_another_end_says_how_the_learning_rate_changes(step, steps, before, schedule, said):
    note = change_note(step, steps, before, peak=2e-3, warmup=2, schedule=schedule)
    assert note == (said and f"note: {steps} steps in all, {before} before: {said}")


def test_default_warmup_of_another_end_is_noted():
    note = change_note(6, 1000, 100, peak=3e-3, warmup=None, schedule="constant")
    assert note == "note: 1000 steps in all, 100 before: the learning rate of step 7 is 7.00e-04, not 3.00e-03"


def test_random_weights_get_a_higher_default_learning_rate():
    assert TrainConfig(model="m").peak_learning_rate == 1e-5
    assert TrainConfig(model="m", random_weights=True).peak_learning_rate == 5e-4
    assert TrainConfig(model="m", random_weights=True, learning_rate=0.1).peak_learning_rate == 0.1


def test_refusal_says_what_an_unset_option_was():
    saved = {"model": "m", "data": ["d"], "system": "lohan"}
    rate = complete(saved).peak_learning_rate
    with pytest.raises(ValueError, match=rf"'learning_rate' was {rate:g}, not 0\.5; leave it out"):
        resumed(saved, {"learning_rate": 0.5})
    with pytest.raises(ValueError, match=r"'warmup' was not given, not 7; leave it out"):
        resumed(saved, {"warmup": 7})

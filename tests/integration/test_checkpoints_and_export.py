"""A run whose states on the SSD are its checkpoint: it stops, resumes and is exported, and writes no other copy."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from memascend.cli import main
from memascend.training import checkpoint, export
from memascend.training.folder import RunFolder
from memascend.training.kept import kept_backend, kept_source
from memascend.training.progress import read_metrics
from tests import forked
from tests.loop_devices import small_file_system
from tests.train_runs import command, environment, losses, text_folder, train

OPTIONS = ["--model", "llama3.2-1b", "--twin", "32", "--context", "32", "--files", "*.py", "--system", "lohan"]
OPTIONS += ["--accumulate", "1", "--eval-sequences", "0", "--save-every", "2", "--seed", "1", "--schedule", "constant"]
OPTIONS += ["--matmul", "native"]  # the matrix products of from_pretrained's model, also on a CPU without bf16


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make one run of six steps with full checkpoints, and one of four without any."""
    parent = tmp_path_factory.mktemp("runs")
    text = text_folder(parent)
    for name, steps, checkpoints in (("full", "6", "full"), ("none", "4", "none")):
        done = train(parent / name, *OPTIONS, "--data", str(text), "--steps", steps, "--checkpoints", checkpoints)
        assert done.returncode == 0, done.stdout + done.stderr
        (parent / f"{name}.said").write_text(done.stdout)
    return parent


def resume(folder, *options):
    return train(folder, "--resume", *options)


def exported(folder, target):
    assert main(["export", str(folder), str(target)]) == 0
    return AutoModelForCausalLM.from_pretrained(target)


def assert_same_weights(model, other):
    for (name, values), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(values, expected), name


def test_finished_run_without_checkpoints_keeps_states_and_explains_export(runs):
    said = (runs / "none.said").read_text()
    assert f"memascend export {runs / 'none'} NEW_FOLDER" in said
    assert "checkpoint" not in said.replace("--checkpoints", "")
    assert not list((runs / "none").glob("checkpoints/*"))
    assert len(list((runs / "none").glob("memascend-states-*"))) == 1
    assert not list((runs / "full").glob("memascend-states-*"))


def test_losses_without_checkpoints_equal_those_with_checkpoints(runs):
    found, expected = losses(runs / "none"), losses(runs / "full")
    assert found == {step: expected[step] for step in range(1, 5)}


def test_run_without_checkpoints_continues_and_exports_the_same_model(runs, capsys):
    folder = runs / "none"
    done = resume(folder, "--steps", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume  from step 4, whose states are on the SSD" in done.stdout
    assert losses(folder) == losses(runs / "full")
    model = exported(folder, runs / "exported")
    assert f"step 6 of {folder}" in capsys.readouterr().out
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(runs / "full" / "model"))
    assert AutoTokenizer.from_pretrained(runs / "exported").vocab_size
    again = resume(folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing to do: the states are at step 6 of 6; raise --steps" in again.stdout
    config, report = ((folder / name).read_bytes() for name in ("config.yaml", "report.json"))
    fewer = resume(folder, "--steps", "3")
    assert (fewer.returncode, fewer.stderr) == (0, "")
    assert "nothing to do: the states are at step 6, past step 3; raise --steps above 6" in fewer.stdout
    assert "done" not in fewer.stdout
    assert ((folder / "config.yaml").read_bytes(), (folder / "report.json").read_bytes()) == (config, report)
    assert not list(runs.glob(".exported*"))


def test_a_run_with_full_checkpoints_is_exported_from_the_newest(runs, tmp_path, capsys):
    model = exported(runs / "full", tmp_path / "model")
    assert f"step 6 of {runs / 'full'}" in capsys.readouterr().out
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(runs / "full" / "model"))


def test_killed_run_is_exported_and_resumes(runs, tmp_path):
    folder, text = tmp_path / "killed", runs / "text"
    child = subprocess.Popen(
        command(folder, *OPTIONS, "--data", str(text), "--steps", "6", "--checkpoints", "weights"),
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (first,) = folder.glob("checkpoints/step-*")
    assert sorted(path.name for path in first.iterdir()) == ["manifest.json", "model"]
    exported(folder, tmp_path / "model")
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[1:]))
    done = resume(folder, "--log-every", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "metrics.jsonl has no rows for 1 of" in done.stdout
    lost, *_ = rows
    (folder / "metrics.jsonl").write_text(lost + (folder / "metrics.jsonl").read_text())
    assert losses(folder) == losses(runs / "full")
    saved = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "checkpoint"]
    assert len(saved) == len(set(saved))  # a checkpoint that was complete when the kill came is not written again
    assert_same_weights(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        AutoModelForCausalLM.from_pretrained(runs / "full" / "model"),
    )


def test_one_version_without_checkpoints_continues_between_steps(runs, tmp_path):
    folder = tmp_path / "least"
    least = ("--state-versions", "checkpoint", "--checkpoints", "none")
    done = train(folder, *OPTIONS, "--data", str(runs / "text"), "--steps", "3", *least)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a kill in the middle of an update loses the run" in done.stdout
    done = resume(folder, "--steps", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(folder) == losses(runs / "full")


def test_missing_states_are_an_error_not_a_new_start(runs, tmp_path, capsys):
    folder = tmp_path / "lost"
    done = train(folder, *OPTIONS, "--data", str(runs / "text"), "--steps", "3", "--checkpoints", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    (states,) = folder.glob("memascend-states-*")
    states.rename(tmp_path / "elsewhere")
    done = resume(folder, "--steps", "4")
    assert done.returncode == 2
    assert "has finished 3 steps, but" in done.stderr
    assert "does not hold the states after a step" in done.stderr
    assert main(["export", str(folder), str(tmp_path / "model")]) == 2
    capsys.readouterr()
    assert "has finished 3 steps, but its states are missing" in refusal(capsys, "generate", folder, "--prompt", "a")
    (tmp_path / "elsewhere").rename(states)
    done = resume(folder, "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr


def refusal(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def logits_on_the_tier(folder, ids):
    """Return the logits of the states that a run has left, streamed as in training."""
    run = RunFolder(folder)
    backend = kept_backend(run)
    backend.open_kept(kept_source(run))
    try:
        with torch.no_grad():
            return backend.model.eval()(input_ids=ids).logits
    finally:
        backend.close_kept()


@pytest.mark.parametrize("name", ["none", "full"], ids=["states", "checkpoint"])
def test_sharded_export_has_an_index_and_same_logits(runs, tmp_path, name):
    target = tmp_path / "model"
    assert main(["export", str(runs / name), str(target), "--shard-size", "1MB"]) == 0
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in load_all(target).values())
    assert max((target / each).stat().st_size for each in files[1:]) < 1_100_000  # the first file has one large tensor
    whole, parts = exported(runs / name, tmp_path / "whole"), AutoModelForCausalLM.from_pretrained(target)
    assert_same_weights(parts, whole)
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        found = parts.eval()(input_ids=ids).logits
        assert torch.equal(found, whole.eval()(input_ids=ids).logits)
        if name == "none":
            assert torch.equal(found, logits_on_the_tier(runs / name, ids))


def test_generate_continues_text_as_the_exported_model_does(runs, tmp_path, capsys):
    model = exported(runs / "none", tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    capsys.readouterr()
    prompt = "def f(x):\n    return"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for sampling, options in (({"do_sample": False}, ()), ({"temperature": 0.7}, ("--temperature", "0.7"))):
        torch.manual_seed(5)
        expected = model.generate(ids, max_new_tokens=6, **({"do_sample": True} | sampling))
        assert main(["generate", str(runs / "none"), "--prompt", prompt, "--tokens", "6", "--seed", "5", *options]) == 0
        said, _, note = capsys.readouterr().out.rstrip("\n").rpartition("\n")
        assert said == tokenizer.decode(expected[0], skip_special_tokens=True)
        assert re.search(rf"from the weights of step [46] of {runs / 'none'}\)", note)


def test_generate_refuses_runs_without_states_and_bad_options(runs, tmp_path, capsys):
    assert "holds no run" in refusal(capsys, "generate", tmp_path, "--prompt", "a")
    (tmp_path / "full").symlink_to(runs / "full")
    line = refusal(capsys, "generate", tmp_path / "full", "--prompt", "a")
    assert "load its newest checkpoint" in line
    assert str(tmp_path / "full" / "model") in line
    (tmp_path / "begun").mkdir()
    shutil.copy(runs / "none/config.yaml", tmp_path / "begun")
    assert "it ended before training began" in refusal(capsys, "generate", tmp_path / "begun", "--prompt", "a")
    line = refusal(capsys, "generate", runs / "none", "--prompt", "a b", "--tokens", "1000000")
    assert "1000000 more (--tokens)" in line
    assert "positions" in line
    for option, wrong in [
        *(("--temperature", each) for each in ("-1", "nan", "x", "1e-40")),
        *(("--seed", each) for each in ("-1", str(1 << 63))),
        ("--prompt", "\udcff"),  # as a byte that is not UTF-8 arrives
    ]:
        given = {"--prompt": "a"} | {option: wrong}
        assert option in refusal(capsys, "generate", runs / "none", *(word for pair in given.items() for word in pair))


def test_moved_or_linked_run_still_finds_its_states(runs, tmp_path, capsys):
    shutil.copytree(runs / "none", tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    texts = set()
    for folder in (runs / "none", tmp_path / "moved", tmp_path / "link"):
        assert main(["generate", str(folder), "--prompt", "a", "--tokens", "4"]) == 0
        texts.add(capsys.readouterr().out.rpartition("\n(")[0])
    assert len(texts) == 1
    (tmp_path / "moved" / "tokenizer").rename(tmp_path / "tokenizer")
    assert "moved/tokenizer does not exist" in refusal(capsys, "generate", tmp_path / "moved", "--prompt", "a")


def load_all(folder):
    return {name: values for path in folder.glob("*.safetensors") for name, values in load_file(path).items()}


KILLED = """
import os, pathlib, signal, sys
from memascend.cli import main
from memascend.storage import tensor_file
from memascend.training import export

def dies(owner, name, calls):
    whole, left = getattr(owner, name), [calls]
    def call(*args, **named):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **named)
    setattr(owner, name, call)

where, run, target = sys.argv[1:]
if where == "in the weights":
    dies(tensor_file.TensorFileWriter, "write", 30)
elif where == "before the index":
    dies(pathlib.Path, "write_text", 1)
else:
    dies(export.os, "rename", 1)
main(["export", run, target, "--shard-size", "1MB"])
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("in the weights", marks=pytest.mark.slow),
        "before the index",
        pytest.param("before the rename", marks=pytest.mark.slow),
    ],
)
def test_killed_export_leaves_no_model_and_the_next_succeeds(runs, tmp_path, where):
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "model"
    command = [sys.executable, "-c", KILLED, where, str(runs / "none"), str(target)]
    assert forked.run(command, env=environment(), timeout=100).returncode == -signal.SIGKILL
    assert not target.exists()
    (partial,) = target.parent.iterdir()
    assert partial.name == ".model.partial"
    if where != "before the rename":
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(partial)
    assert_same_weights(exported(runs / "none", target), exported(runs / "none", tmp_path / "undisturbed"))
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("name", ["none", "full"], ids=["states", "checkpoint"])
@pytest.mark.parametrize("full", ["before", "in the weights", "from the first file on"])
def test_export_to_a_full_disk_fails_and_leaves_nothing(runs, tmp_path, capsys, monkeypatch, name, full):
    if full != "before":  # the space is used up after the check
        monkeypatch.setattr(export, "_require_space", lambda *_: None)
    with small_file_system(tmp_path / "small", 2 << 20) as small:
        if full == "from the first file on":
            with (small / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
                os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(small).free - (16 << 10))
        before = sorted(small.iterdir())
        said = refusal(capsys, "export", runs / name, small / "new" / "model")
        assert sorted(small.iterdir()) == before
    missing, gone = "are missing; name a folder on another drive", "No space left on device; free space"
    assert (missing if full == "before" else gone) in said


def test_impossible_exports_are_refused_in_one_line(runs, tmp_path, capsys):
    assert "holds no run: name the folder" in refusal(capsys, "export", tmp_path, tmp_path / "model")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert "exists and is not an empty folder" in refusal(capsys, "export", runs / "full", tmp_path / "there")
    with RunFolder(runs / "full").held(resume=True):
        said = refusal(capsys, "export", runs / "full", tmp_path / "model")
        assert "is in use by" in said
        assert "or export its newest checkpoint with --from-checkpoint" in said
    with RunFolder(runs / "none").held(resume=True):
        said = refusal(capsys, "export", runs / "none", tmp_path / "model")
        assert "is in use by" in said
        assert "--from-checkpoint" not in said
    said = refusal(capsys, "export", runs / "none", tmp_path / "model", "--from-checkpoint")
    assert "has no checkpoint with weights yet: wait for one, or omit --from-checkpoint" in said
    assert not list(tmp_path.glob(".*"))


def test_newest_checkpoint_is_exported_even_if_the_run_removes_it(runs, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(runs / "full", run)
    wanted = exported(runs / "full", tmp_path / "wanted")
    copy = export._copy

    def after_the_run_has_removed_it(*given):
        shutil.rmtree(RunFolder(run).checkpoints)
        return copy(*given)

    monkeypatch.setattr(export, "_copy", after_the_run_has_removed_it)
    listed, answers = checkpoint.listed, iter([([], ["removed"])])  # between listing it and reading it
    monkeypatch.setattr(checkpoint, "listed", lambda folder: next(answers, None) or listed(folder))
    with RunFolder(run).held(resume=True):
        export.export(run, tmp_path / "model", from_checkpoint=True)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), wanted)


def test_export_names_a_checkpoint_file_that_is_missing(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs / "full", run)
    newest = checkpoint.listed(RunFolder(run).checkpoints)[0][-1]
    (newest.model / "gone.json").symlink_to("nowhere")
    (newest.model / "folder").mkdir()  # ignored
    said = refusal(capsys, "export", run, tmp_path / "model", "--from-checkpoint")
    assert f"{newest.model / 'gone.json'} is missing: restore it, or remove {newest.path}" in said
    (newest.model / "gone.json").unlink()
    assert_same_weights(exported(run, tmp_path / "model"), exported(runs / "full", tmp_path / "wanted"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "memascend", "--checkpoints", "none"], "the states of system 'memascend' do not outlive the run"),
        (["--checkpoints", "some"], "must be one of full, weights, none"),
    ],
)
def test_impossible_checkpoint_settings_are_refused(runs, tmp_path, capsys, options, message):
    arguments = ["train", "--output", tmp_path / "run", *OPTIONS, "--data", runs / "text", *options]
    assert message in refusal(capsys, *arguments)
    assert not (tmp_path / "run").exists()


def test_disk_space_is_required_only_for_what_is_written(tmp_path):
    from memascend.training import preflight
    from memascend.training.config import TrainConfig

    disk = shutil.disk_usage(tmp_path)
    parameters = disk.free // 20  # a full checkpoint alone needs more than is free
    prepared = {"planned_host_bytes": None, "parameters": parameters, "planned_swap_bytes": parameters}

    def missing(checkpoints):
        config = TrainConfig(model="m", data=["d"], system="lohan", checkpoints=checkpoints)
        try:
            preflight.check(config, prepared, tmp_path, tmp_path)
        except ValueError as error:
            return str(error)
        return None

    assert "of checkpoints" in missing("full")
    assert "--checkpoints none" in missing("full")
    assert missing("weights") is None
    assert missing("none") is None

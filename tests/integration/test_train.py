"""`memascend train` as a user runs it: a twin trained on text, stopped, resumed, evaluated, loaded, read."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from memascend.cli import main
from memascend.simulator import read_trace
from memascend.training import verify
from memascend.training.checkpoint import listed
from memascend.training.config import complete
from memascend.training.folder import Lock
from memascend.training.processes import free_port
from memascend.training.progress import rewind_metrics
from tests import forked
from tests.train_runs import (
    MODEL,
    STEPS,
    command,
    environment,
    evaluations,
    finished_run,
    losses,
    options_for,
    text_folder,
    train,
)

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    return finished_run(tmp_path_factory)


def test_trained_model_loads_in_transformers_and_generates(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(finished / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert out.shape[1] > ids.shape[1]
    assert tokenizer.decode(out[0]).startswith("def main(")


def test_saved_weights_evaluate_to_the_printed_loss(finished):
    import numpy as np
    from transformers import AutoModelForCausalLM

    printed = evaluations(finished)
    assert list(printed) == [4, STEPS]
    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.bfloat16).eval()
    tokens = np.fromfile(finished / "data" / "eval.tokens", dtype="<u4")[:64].astype(np.int64).reshape(2, 32)
    with torch.no_grad():
        found = [float(model(input_ids=ids, labels=ids).loss) for ids in torch.from_numpy(tokens)[:, None]]
    assert sum(found) / 2 == pytest.approx(printed[STEPS], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_run_starts_from_trained_weights(finished, tmp_path):
    """Loaded under zero.Init, not trained (learning rate 0) and evaluated: the last loss of the run that made them."""
    work = ["--data", str(finished.parent / "text"), "--files", "*.py", "--context", "32", "--learning-rate", "0"]
    evaluate = ["--steps", "1", "--eval-sequences", "2", "--eval-share", "0.1"]
    done = train(tmp_path / "run", "--model", str(finished / "model"), *work, *evaluate)
    assert done.returncode == 0, done.stderr
    assert evaluations(tmp_path / "run")[1] == evaluations(finished)[STEPS]


def test_training_lowers_the_loss_and_says_what_it_does(finished):
    said = (finished.parent / "said").read_text()
    assert all(character.isprintable() or character == "\n" for character in said)
    for part in (
        "model   llama3.2-1b divided by 32",
        "tokens/s",
        "host peak",
        "read/step",
        "evaluation: loss",
        "done: ",
    ):
        assert part in said
    assert len(losses(finished)) == STEPS
    assert min(list(losses(finished).values())[-2:]) < losses(finished)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not keep one waiting")
@pytest.mark.slow
def test_cpu_run_announces_a_long_first_step(finished, tmp_path):
    options = ["--context", "600", "--steps", "1", "--eval-sequences", "0", "--accumulate", "1", "--batch", "2"]
    done = train(tmp_path / "run", *options_for(finished.parent / "text"), *options)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[said.index(next(line for line in said if "s/step" in line)) - 1] == (
        "note: no GPU: the first line appears after a whole step of 1,200 tokens (batch 2 x accumulate 1 x "
        "ranks 1 x context 600); with --context 512 it is 1,024"
    )
    assert "note: no GPU" not in (finished.parent / "said").read_text()


def test_trace_holds_phases_blocks_and_all_swapped_bytes(finished, tmp_path):
    events, facts = read_trace(finished.parent / "trace.json")
    assert (facts["lane"], facts["system"], facts["arm"], facts["step"]) == ("measured", "memascend", "memascend", 2)
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    metrics = next(row for row in rows if row["kind"] == "step" and row["step"] == 2)
    for resource, moved in (("ssd.read", "read_bytes"), ("ssd.write", "written_bytes")):
        assert sum(event.amount for event in events if event.resource == resource) == metrics[moved] > 0
    main = [event for event in events if event.resource == "main"]
    assert [event.phase for event in main[:4]] == ["forward", "backward", "optimizer", "forward"]  # accumulated
    assert 0 < sum(event.seconds for event in main) <= metrics["seconds"]
    for phase in ("forward", "backward"):
        blocks = {event.name for event in events if event.phase == phase and event.resource == "gpu0"}
        assert blocks == {f"block {number}" for number in range(16)}
    parameters = json.loads((finished / "report.json").read_text())["parameters"]
    assert sum(event.amount for event in events if event.name.startswith("AdamW")) == parameters


def test_simulated_and_measured_steps_are_compared(finished, tmp_path):
    work = ["--context", "32", "--accumulate", "2", "--testbed", "memascend-c1", "--trace", str(tmp_path / "plan.json")]
    memascend = [sys.executable, "-m", "memascend.cli"]
    assert forked.run([*memascend, "plan", *MODEL, *work]).returncode == 0
    both = [str(tmp_path / "plan.json"), str(finished.parent / "trace.json")]
    done = forked.run([*memascend, "compare", *both, "--json"])
    assert done.returncode == 0, done.stderr
    rows = {(row["phase"], row["resource"]): row for row in json.loads(done.stdout)}
    for phase in ("forward", "backward", "optimizer", "step"):
        assert rows[phase, ""]["ratio"] > 0
    read = rows["optimizer", "ssd.read"]  # a simulated step reads as much as a real one
    assert read["b_amount"] == pytest.approx(read["a_amount"], rel=0.02)


def test_requested_checkpoints_are_kept_with_valid_checksums(finished):
    found, refused = listed(finished / "checkpoints")
    assert refused == []
    assert [one.step for one in found] == [STEPS - 4, STEPS - 2, STEPS]
    for name in found[-1].manifest["files"]:
        found[-1].check(found[-1].path / name)
    assert (finished / "model").resolve() == found[-1].model.resolve()


def test_the_report_accounts_for_the_peak_to_the_byte(finished):
    report = json.loads((finished / "report.json").read_text())
    memory = report["memory"]
    reserved = sum(row["reserved_bytes"] for row in report["ledger"])
    assert reserved == memory["ledger_bytes"] > 0
    of_the_process = ("idle", "later_libraries", "object", "tensor", "rest")
    assert reserved + sum(memory[f"{part}_bytes"] for part in of_the_process) == memory["host_peak_bytes"]
    assert memory["tensor_bytes"] > 0  # there is no GPU, so tensors are in host memory
    assert abs(memory["rest_bytes"]) < 0.1 * memory["host_peak_bytes"]
    assert {"gradient_flat_buffer", "parameter_pool", "optimizer_buffers"} <= {row["owner"] for row in report["ledger"]}
    assert report["summary"]["written_bytes_per_step"] > 10 * report["parameters"]
    assert "peak of resident memory" in (finished / "report.md").read_text()


def test_finished_run_leaves_no_temporary_files(finished):
    assert not (finished / "swap").exists()
    assert not list((finished / "checkpoints").glob(".*"))


def test_an_existing_run_is_not_overwritten(finished):
    before = losses(finished)
    done = train(finished, *options_for(finished.parent / "text"))
    assert done.returncode == 2
    assert "continue it with --resume, or name another folder" in done.stderr
    assert losses(finished) == before


def test_a_finished_run_has_nothing_to_resume(finished):
    before = (finished / "config.yaml").read_bytes()
    for steps in (STEPS, 2):
        done = train(finished, "--resume", "--steps", str(steps), "--save-every", "5")
        assert done.returncode == 0
        newest = finished / "checkpoints" / f"step-{STEPS:08d}"
        end = f" of {STEPS}" if steps == STEPS else f", past step {steps}"
        assert f"nothing to do: {newest} is at step {STEPS}{end}; raise --steps" in done.stdout
        assert (finished / "config.yaml").read_bytes() == before  # a call that did nothing changes no option


def test_resume_makes_an_interrupted_last_evaluation(finished, tmp_path):
    shutil.copytree(finished, output := tmp_path / "run", symlinks=True)
    (output / "model").unlink()
    (output / "model").symlink_to(next((output / "checkpoints").glob(f"*{STEPS}")) / "model")
    rows = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if not {"kind": "eval", "step": STEPS}.items() <= json.loads(row).items()]
    assert len(kept) == len(rows) - 1
    (output / "metrics.jsonl").write_text("".join(kept))
    memory = json.loads((output / "report.json").read_text())["memory"]
    done = train(output, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert evaluations(output) == evaluations(finished)
    assert losses(output) == losses(finished)
    assert json.loads((output / "report.json").read_text())["memory"] == memory  # that of the training
    assert "nothing to do" in train(output, "--resume").stdout


@pytest.mark.slow
def test_streamed_run_without_kept_states_resumes_from_a_checkpoint(tmp_path, tmp_path_factory):
    """Two versions of the states are then written before the first step."""
    reference, output = finished_run(tmp_path_factory, "lohan"), tmp_path / "run"
    shutil.copytree(reference, output, symlinks=True)
    shutil.rmtree(output / "checkpoints" / f"step-{STEPS:08d}")
    done = train(output, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resume  from step {STEPS - 2}\n" in done.stdout
    assert losses(output) == losses(reference)


def changed_at(folder):
    """Return the time of the last write of each file below `folder`."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_dry_run_describes_the_training_and_leaves_nothing(finished, tmp_path):
    done = train(tmp_path / "new" / "run", *options_for(finished.parent / "text"), "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    for word in ("model", "data", "steps", "system", "output"):
        assert any(line.startswith(f"{word} ") for line in said), done.stdout
    assert said[-1] == "dry run: nothing was trained, and no files were left"
    assert list(tmp_path.iterdir()) == []
    before, config = changed_at(finished), (finished / "config.yaml").read_bytes()
    done = train(finished, "--resume", "--steps", str(STEPS + 5), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"resume  from step {STEPS}" in done.stdout
    assert (finished / "config.yaml").read_bytes() == config
    after = changed_at(finished)
    written = {path.name for path in before | after if before.get(path) != after.get(path)}
    assert written <= {"config.yaml", "run.lock"}
    refused = train(tmp_path / "bad", *options_for(finished.parent / "text"), "--dry-run", "--host-memory", "10MiB")
    assert refused.returncode == 2
    assert "of host memory" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_info_shows_progress_and_the_next_command(finished, tmp_path, capsys):
    assert main(["info", str(finished)]) == 0
    said = capsys.readouterr().out
    assert f"step         {STEPS} of {STEPS}" in said
    assert f"it is done: the weights are in {finished / 'model'}" in said
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / f"step-{STEPS:08d}")
    rewind_metrics(tmp_path / "copy" / "metrics.jsonl", STEPS - 2)
    assert main(["info", "--json", str(tmp_path / "copy")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], found["trains"]) == (STEPS - 2, STEPS, None)
    assert found["loss"] == losses(finished)[STEPS - 2]
    assert [each["step"] for each in found["checkpoints"]] == [STEPS - 4, STEPS - 2]
    lock = Lock(tmp_path / "copy", alone=True)
    lock.say("pid 123")
    assert main(["info", str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next         wait: it trains (pid 123)"
    lock.close()
    assert main(["info", str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out.endswith(f"memascend train --output {tmp_path / 'copy'} --resume\n")
    assert main(["info", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_resume_with_a_different_seed_is_refused(finished):
    done = train(finished, "--resume", "--seed", "5")
    assert done.returncode == 2
    assert "'seed' was 0, not 5" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [("--checkpointing", "plain"), ("--checkpointing", "none")], ids=" ".join)
def test_activation_checkpointing_mode_changes_no_loss(finished, tmp_path_factory, more):
    assert losses(finished_run(tmp_path_factory, "memascend", *more)) == losses(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("system", "arm"),
    [("zero_offload", "today"), ("cxl", "cxl_aware"), ("zero_infinity", "as_published"), ("zero_infinity", "today")],
)
def test_every_system_trains_alike(tmp_path_factory, system, arm):
    """Twelve steps with fp32 states: every loss, the evaluations and the final weights are equal bit by bit."""
    longer = ("--steps", "12")
    ours = finished_run(tmp_path_factory, "memascend", *longer)
    theirs = finished_run(tmp_path_factory, system, "--arm", arm, *longer)
    assert len(losses(ours)) == 12
    assert losses(theirs) == losses(ours)
    assert evaluations(theirs) == evaluations(ours)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (ours, theirs)]
    assert weights[0] == weights[1]


@pytest.fixture
def raw_devices(request, tmp_path):
    """Make as many loop devices as the parameter says, with one store over them."""
    if os.geteuid() != 0 or not shutil.which("losetup"):
        pytest.skip("a loop device needs root and losetup")
    devices = []
    try:
        for number in range(request.param):
            path = tmp_path / f"backing{number}"
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 128 << 20)
            made = subprocess.run(["losetup", "--find", "--show", path], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no loop device to be had: {made.stderr.strip()}")
            devices.append(made.stdout.strip())
        serials = [word for device in devices for word in ("--serial", device)]
        command = [sys.executable, "-m", "memascend.cli", "storage", "format", *devices, "--owner", "a run", *serials]
        subprocess.run(command, check=True, capture_output=True)
        yield devices
    finally:
        for device in devices:
            subprocess.run(["losetup", "-d", device], check=False)


def bytes_written_to(device):
    """Return bytes written since boot, which the kernel counts in 512-byte sectors whatever the device's own size."""
    return 512 * int(Path(f"/sys/block/{Path(device).name}/stat").read_text().split()[6])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("raw_devices", [1], indirect=True)
def test_run_on_raw_devices_has_equal_losses_after_a_kill(finished, raw_devices, tmp_path):
    output, options = tmp_path / "run", options_for(finished.parent / "text")
    with subprocess.Popen(command(output, *options, "--devices", *raw_devices), env=environment()) as run:
        while len(listed(output / "checkpoints")[0]) < 2:
            assert run.poll() is None
            time.sleep(0.05)
        assert not [file for file in (output / "swap").rglob("*") if file.is_file() and file.stat().st_size > 4096]
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "is in use by" in (done := train(output, "--resume")).stderr:
        assert time.monotonic() < deadline
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(output) == losses(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("raw_devices", [2], indirect=True)
def test_two_ranks_share_raw_devices_and_train_alike(tmp_path_factory, raw_devices, tmp_path):
    """Both ranks' tensors are in one store over two devices, to which at least the reported bytes are written."""
    reference = finished_run(tmp_path_factory, "memascend", "--ranks", "2")
    output, before = tmp_path / "run", [bytes_written_to(device) for device in raw_devices]
    options = options_for(reference.parent / "text", "memascend", "--ranks", "2", "--devices", *raw_devices)
    done = train(output, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(output) == losses(reference)
    assert evaluations(output) == evaluations(reference)
    said = STEPS * json.loads((output / "report.json").read_text())["summary"]["written_bytes_per_step"]
    written = [bytes_written_to(device) - first for device, first in zip(raw_devices, before)]
    assert sum(written) >= said > 0
    assert min(written) > 0.2 * sum(written)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", ["direct_only", "memascend_on_files"])
def test_arms_train_alike(finished, tmp_path_factory, arm):
    assert losses(finished_run(tmp_path_factory, "memascend", "--arm", arm)) == losses(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mixture_of_experts_trains_alike_and_learns(tmp_path_factory):
    """Fused experts (transformers 5) are initialised too: under zero.Init transformers finds no values to fill."""
    mixture = ("--model", "qwen3-30b-a3b", "--twin", "32", "--steps", "3", "--save-every", "0", "--eval-every", "0")
    ours, theirs = (finished_run(tmp_path_factory, system, *mixture) for system in ("memascend", "zero_offload"))
    assert all(math.isfinite(loss) for loss in losses(ours).values())
    assert losses(ours)[1] < 1.2 * math.log(151936 // 32)  # the loss of guessing among all tokens
    assert losses(ours) == losses(theirs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_starts_the_same_run(tmp_path, tmp_path_factory):
    two = finished_run(tmp_path_factory, "memascend", "--ranks", "2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    done = subprocess.run(
        [*torchrun, str(free_port()), "-m", *command(tmp_path / "run", *options_for(two.parent / "text"))[2:]],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == losses(two)


def test_verify_finds_equal_bits_and_a_single_changed_element(tmp_path):
    """The SSD is compared with plain PyTorch in memory; then one bit of a weight of the tested run is changed."""
    work = [*MODEL, "--data", str(text_folder(tmp_path)), "--files", "*.py", "--context", "32", "--accumulate", "2"]
    verifying = [sys.executable, "-m", "memascend.cli", "verify", *work, "--steps", "2", "--json"]
    done = forked.run([*verifying, "--output", str(tmp_path / "out")], env=environment(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "equal"
    assert (found["system"], found["reference_arm"]) == ("memascend", "deepspeed_adamw")
    assert [step["equal"] for step in found["steps"]] == [True, True]
    assert found["tensors"]["second moments"]["tensors"] > 100

    config = complete({"model": "llama3.2-1b", "data": ["d"], "twin": 32, "steps": 2})
    runs = [tmp_path / "out" / name for name in ("tested", "reference")]
    file = listed(runs[0] / "checkpoints")[0][-1].model / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    name = "model.layers.7.mlp.up_proj.weight"
    start = 8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]
    content[start + 2 * 11] ^= 1
    file.write_bytes(content)
    changed = verify.report(config, verify.reference_of(config, None), *runs)
    assert changed["verdict"] == "different"
    first = changed["tensors"]["weights"]["first"]
    assert (first["name"], first["index"], first["different"]) == (name, 11, 1)
    assert changed["tensors"]["master weights"]["different"] == 0


def test_reference_run_ignores_options_for_states_on_the_ssd():
    asked = {"state_versions": "one", "accumulation": "vertical", "accumulate": 2, "checkpoints": "none"}
    config = complete({"model": "llama3.2-1b", "twin": 32, "data": ["x"], "system": "lohan", **asked})
    theirs = verify.reference_of(config, None)
    assert (theirs.system, theirs.accumulate) == ("in_memory", 2)
    assert (theirs.state_versions, theirs.accumulation, theirs.checkpoints) == ("auto", "horizontal", "full")


@pytest.mark.slow
def test_verify_finds_8_bit_moments_on_ssd_equal_to_memory(tmp_path):
    work = [*MODEL, "--data", str(text_folder(tmp_path)), "--files", "*.py", "--context", "32", "--steps", "2"]
    asked = [*work, "--system", "lohan", "--states", "int8", "--json"]
    done = forked.run([sys.executable, "-m", "memascend.cli", "verify", *asked], env=environment(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["reference_arm"]) == ("equal", "memascend_adamw")
    assert "done: " not in done.stderr  # the message would name folders, and both are removed
    kinds = {name: each["tensors"] for name, each in found["tensors"].items()}
    assert len(set(kinds.values())) == 1
    assert list(kinds) == ["weights", "master weights", "first moments", "second moments", "scales of moments"]


@pytest.mark.parametrize("there", [True, False], ids=["there", "made"])
def test_refused_call_removes_only_a_swap_folder_it_made(tmp_path, there):
    if there:
        (tmp_path / "nvme").mkdir()
    (tmp_path / "device").write_bytes(bytes(4096))
    places = ["--nvme", str(tmp_path / "nvme"), "--devices", str(tmp_path / "device")]
    done = train(tmp_path / "run", *options_for(text_folder(tmp_path)), *places)
    assert done.returncode == 2
    assert "name more or larger --devices" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"text", "device"} | ({"nvme"} if there else set())
    assert not there or list((tmp_path / "nvme").iterdir()) == []


def test_a_refused_resume_leaves_a_run_as_it_was(tmp_path):
    """This applies to a run that was stopped before its first step, too: the typed configuration is kept."""
    (tmp_path / "run").mkdir()
    config = f"model: llama3.2-1b\ntwin: 32\ndata: [{text_folder(tmp_path)}]\ncontext: 2000000\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    done = train(tmp_path / "run", "--resume")
    assert done.returncode == 2
    assert "the model takes at most 131072 tokens" in done.stderr
    assert (tmp_path / "run" / "config.yaml").read_text() == config


def test_impossible_run_is_refused_in_one_line_leaving_nothing(tmp_path):
    data = ["--data", str(text_folder(tmp_path))]
    done = train(tmp_path / "run", "--model", "llama3.2-1b", "--twin", "32", *data, "--context", "2000000")
    assert done.returncode == 2
    assert (
        done.stderr
        == "memascend: error: the model takes at most 131072 tokens per sequence, not 2000000; lower --context\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"text"}


def test_crashed_preparation_is_one_line_naming_its_log(tmp_path):
    """Any exception of a library is reported so; here an import fails."""
    broken = tmp_path / "broken" / "transformers"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken here')")
    done = subprocess.run(
        command(tmp_path / "run", "--model", "llama3.2-1b", "--twin", "32", "--data", str(text_folder(tmp_path))),
        capture_output=True,
        text=True,
        check=False,
        env=environment() | {"PYTHONPATH": str(tmp_path / "broken")},
    )
    assert done.returncode == 2
    log = tmp_path / "run" / "logs" / "prepare.log"
    said = f"the preparation failed (exit 1): RuntimeError: broken here; see {log}"
    assert done.stderr == f"memascend: error: {said}\n"
    assert "Traceback" in log.read_text()
    assert {path.name for path in (tmp_path / "run").glob("*")} == {"logs"}


@pytest.mark.slow
def test_resume_without_checkpoints_says_it_starts_over(tmp_path):
    text = text_folder(tmp_path)
    options = [*options_for(text, "in_memory"), "--eval-sequences", "0"]
    assert train(tmp_path / "run", *options, "--steps", "2").returncode == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    done = train(tmp_path / "run", "--resume", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "resume  from the start: there is no checkpoint in" in done.stdout
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]

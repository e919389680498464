"""`memascend train` as its user meets it: a twin trained on text, stopped, gone on with, evaluated, loaded, read."""

import json
import subprocess
import sys

import pytest
import torch

from memascend.training.checkpoint import listed
from tests.train_runs import (
    STEPS,
    command,
    environment,
    evaluations,
    finished_run,
    free_port,
    losses,
    options_for,
    text_folder,
    train,
)

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    return finished_run(tmp_path_factory)


def test_the_result_is_a_model_that_transformers_loads_and_that_writes(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(finished / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert out.shape[1] > ids.shape[1]
    assert tokenizer.decode(out[0]).startswith("def main(")


def test_the_saved_weights_evaluate_to_the_loss_that_training_printed(finished):
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
def test_trained_weights_are_the_start_of_another_run(finished, tmp_path):
    """Loaded under zero.Init, not trained (learning rate 0), evaluated: the last loss of the run that made them."""
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


def test_checkpoints_are_kept_as_asked_and_their_checksums_hold(finished):
    found, refused = listed(finished / "checkpoints")
    assert refused == []
    assert [one.step for one in found] == [STEPS - 4, STEPS - 2, STEPS]
    for name in found[-1].manifest["files"]:
        found[-1].check(found[-1].path / name)
    assert (finished / "model").resolve() == found[-1].model.resolve()


def test_the_report_accounts_for_the_peak_to_the_byte(finished):
    report = json.loads((finished / "report.json").read_text())
    memory = report["memory"]
    held = sum(row["reserved_bytes"] for row in report["ledger"])
    assert held == memory["ledger_bytes"] > 0
    assert held + memory["idle_bytes"] + memory["rest_bytes"] == memory["host_peak_bytes"]
    assert {"gradient_flat_buffer", "parameter_pool", "optimizer_buffers"} <= {row["owner"] for row in report["ledger"]}
    assert report["summary"]["written_bytes_per_step"] > 10 * report["parameters"]
    assert "peak of resident memory" in (finished / "report.md").read_text()


def test_nothing_is_left_of_a_run_that_ended(finished):
    assert not (finished / "swap").exists()
    assert not list((finished / "checkpoints").glob(".*"))


def test_an_existing_run_is_not_overwritten(finished):
    before = losses(finished)
    done = train(finished, *options_for(finished.parent / "text"))
    assert done.returncode == 2
    assert "go on with it by --resume, or name another folder" in done.stderr
    assert losses(finished) == before


def test_a_finished_run_has_nothing_to_resume(finished):
    done = train(finished, "--resume")
    assert done.returncode == 0
    assert (
        f"nothing to do: {finished / 'checkpoints' / f'step-{STEPS:08d}'} is at step {STEPS} of {STEPS}" in done.stdout
    )


def test_a_resumed_run_keeps_its_settings(finished):
    done = train(finished, "--resume", "--seed", "5")
    assert done.returncode == 2
    assert "'seed' was 0, not 5" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [("--checkpointing", "offloaded"), ("--checkpointing", "none")], ids=" ".join)
def test_where_checkpoints_wait_changes_no_loss(finished, tmp_path_factory, more):
    assert losses(finished_run(tmp_path_factory, "memascend", *more)) == losses(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", ["zero_offload", "zero_infinity"])
def test_every_system_trains_alike(finished, tmp_path_factory, system):
    assert losses(finished_run(tmp_path_factory, system)) == losses(finished)


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


def test_what_cannot_work_is_one_line_and_leaves_the_name_free(tmp_path):
    data = ["--data", str(text_folder(tmp_path))]
    done = train(tmp_path / "run", "--model", "llama3.2-1b", "--twin", "32", *data, "--context", "2000000")
    assert done.returncode == 2
    assert (
        done.stderr
        == "memascend: error: the model takes at most 131072 tokens a sequence, not 2000000; lower --context\n"
    )
    assert {path.name for path in (tmp_path / "run").glob("*")} == {"run.lock"}

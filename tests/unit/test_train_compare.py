"""The result of `memascend verify` for two finished runs: equal bits, or
the tensor, element and size of a difference."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from memascend.cli import main
from memascend.storage.tensor_file import TensorFileWriter, TensorLayout
from memascend.training import checkpoint, verify
from memascend.training.compare import Saved, difference, differences
from memascend.training.config import TrainConfig, complete
from memascend.training.folder import RunFolder

CONFIG = TrainConfig(model="m", data=["d"], steps=2, random_weights=True)
REFERENCE = dataclasses.replace(CONFIG, system="in_memory", arm="deepspeed_adamw")
# Two groups of a model with three tensors.
GROUPS = [[("embed.weight", 6), ("a.weight", 4)], [("b.weight", 5)]]


def write(path, tensors):
    layouts = [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with TensorFileWriter(path, layouts) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def run(folder, *, loss=2.5, corrupt=None, groups=GROUPS):
    """Make a run's folder after two steps; `corrupt`: (state, element of group 0, the change)."""
    run_folder = RunFolder(folder)
    partial = checkpoint.begin(run_folder.checkpoints, 2)
    values = {name: torch.arange(count) / 7 for group in groups for name, count in group}
    write(partial / "model" / "model.safetensors", {name: value.bfloat16() for name, value in values.items()})
    states = {}
    for index, group in enumerate(groups):
        for number, state in enumerate(("master", "exp_avg", "exp_avg_sq")):
            states[f"{index}.{state}"] = torch.cat([values[name] + number for name, _ in group])
    if corrupt:
        state, element, amount = corrupt
        states[f"0.{state}"][element] += amount
    write(partial / "state" / "rank0.safetensors", states)
    (partial / "state" / "trainer.json").write_text(json.dumps({"0": {"groups": groups}}))
    checkpoint.commit(partial, 2, {}, {"ranks": 1})
    rows = [{"kind": "step", "step": step, "loss": loss, "grad_norm": 1.0} for step in (1, 2)]
    run_folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_runs_compare_equal_despite_different_groups(tmp_path):
    one_group = [[part for group in GROUPS for part in group]]
    found = verify.report(CONFIG, REFERENCE, run(tmp_path / "a"), run(tmp_path / "b", groups=one_group))
    assert found["verdict"] == "equal"
    assert {kind: each["tensors"] for kind, each in found["tensors"].items()} == {
        "weights": 3, "master weights": 3, "first moments": 3, "second moments": 3,
    }  # fmt: skip
    assert verify.as_text(found).splitlines()[-1] == "verdict: equal to the last bit"


@pytest.mark.parametrize("state", ["master", "exp_avg", "exp_avg_sq"])
def test_one_corrupted_element_is_named(tmp_path, state):
    found = verify.report(CONFIG, REFERENCE, run(tmp_path / "a", corrupt=(state, 8, 0.25)), run(tmp_path / "b"))
    assert found["verdict"] == "different"
    [(kind, each)] = [(kind, each) for kind, each in found["tensors"].items() if each["different"]]
    assert kind == {"master": "master weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}[state]
    assert (each["first"]["name"], each["first"]["index"], each["first"]["different"]) == ("a.weight", 2, 1)
    assert each["first"]["largest"] == pytest.approx(0.25)
    said = verify.as_text(found)
    assert "first that differs: a.weight, 1 of 4 elements, by at most 0.25; element 2 is" in said
    assert said.splitlines()[-1] == "verdict: DIFFERENT; every bit should be equal"


def test_different_loss_alone_makes_runs_different(tmp_path):
    found = verify.report(CONFIG, REFERENCE, run(tmp_path / "a", loss=2.5000002), run(tmp_path / "b"))
    assert found["verdict"] == "different"
    assert [step["equal"] for step in found["steps"]] == [False, False]


def test_other_adamw_is_compared_within_a_bound(tmp_path):
    torch_adamw = dataclasses.replace(CONFIG, system="in_memory")
    bound = verify.expectation(torch_adamw, REFERENCE).bound
    assert bound == pytest.approx(2 * (0.1 / 0.001**0.5) * (5e-4 + 5e-4), rel=1e-6)
    reference = run(tmp_path / "b")
    within = run(tmp_path / "a", corrupt=("master", 1, bound / 2))
    beyond = run(tmp_path / "c", corrupt=("master", 1, bound * 2))
    assert verify.report(torch_adamw, REFERENCE, within, reference)["verdict"] == "bounded"
    assert verify.report(torch_adamw, REFERENCE, beyond, reference)["verdict"] == "different"


@pytest.mark.parametrize("corrupt", [None, ("master", 3, 1.0)])
def test_exit_status_reflects_the_verdict(tmp_path, monkeypatch, capsys, corrupt):
    found = verify.report(CONFIG, REFERENCE, run(tmp_path / "a", corrupt=corrupt), run(tmp_path / "b"))
    asked = []
    monkeypatch.setattr(verify, "verify", lambda config, *_: asked.append(config.steps) or found)
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\nsteps: 1000\n")
    command = ["verify", "--config", str(tmp_path / "run.yaml")]
    assert main([*command, "--json", "--steps", "4"]) == (1 if corrupt else 0)
    assert json.loads(capsys.readouterr().out) == found
    main(command)
    assert asked == [4, None]  # the steps of a configuration are those of the whole training


def test_nan_and_negative_zero_count_as_differences():
    one = torch.tensor([0.0, 1.0, 2.0])
    assert difference("w", one, one.clone()) is None
    negative = difference("w", torch.tensor([-0.0, 1.0, 2.0]), one)
    assert (negative.index, negative.largest) == (0, 0.0)
    assert difference("w", torch.tensor([0.0, torch.nan, 2.0]), one).largest == torch.inf
    with pytest.raises(ValueError, match=r"w is torch\.float32 of"):
        difference("w", one, one.bfloat16())


def test_runs_of_different_models_are_refused(tmp_path):
    other = [[("embed.weight", 6), ("c.weight", 4)], [("b.weight", 5)]]
    a, b = run(tmp_path / "a"), run(tmp_path / "b", groups=other)
    with (
        Saved.of_run(a) as ours,
        Saved.of_run(b) as theirs,
        pytest.raises(ValueError, match=r"only one of the two runs has weights of a\.weight \(2 such tensors\)"),
    ):
        list(differences(ours, theirs, "weights"))


@pytest.mark.parametrize(
    ("changes", "system", "arm"),
    [
        ({}, "in_memory", "deepspeed_adamw"),
        ({"states": "bf16"}, "in_memory", "memascend_adamw"),
        ({"arm": "memascend_fast"}, "in_memory", "memascend_adamw"),
        ({"ranks": 2}, "zero_offload", None),
        ({"system": "in_memory"}, "zero_offload", None),
    ],
)
def test_reference_uses_the_adamw_of_the_tested_run(changes, system, arm):
    found = verify.reference_of(dataclasses.replace(CONFIG, **changes), None)
    assert (found.system, found.arm) == (system, arm)


@pytest.mark.parametrize("reference", verify.REFERENCES)
def test_reference_has_neither_the_places_nor_the_trace_of_the_tested_run(tmp_path, reference):
    places = {"tiers": [str(tmp_path / "a"), str(tmp_path / "b")], "write_budget": "1TB"}
    config = dataclasses.replace(CONFIG, trace=str(tmp_path / "trace.json"), host_memory="1GiB", **places)
    found = verify.reference_of(config, reference)
    fields = ("nvme", "devices", "tiers", "write_budget", "host_memory", "trace")
    assert [getattr(found, name) for name in fields] == [getattr(CONFIG, name) for name in fields]
    assert complete(found.as_dict()) == found


def compare(tmp_path, monkeypatch, during, number):
    """Compare two runs that train nothing, and send the signal during one part; return the parts that began."""
    began = []

    def part(name, result):
        began.append(name)
        if name == during:
            os.kill(os.getpid(), number)
        return result

    def launch(config, *, stopping, **_):
        stopping.install()
        try:
            return part(config.output_folder.name, 0)  # it was finished when the signal came
        finally:
            stopping.restore()

    monkeypatch.setattr(verify, "launch", launch)
    monkeypatch.setattr(verify, "report", lambda *_: part("comparison", {}))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        verify.verify(dataclasses.replace(CONFIG, output=str(tmp_path / "run")), None, None)
    except (SystemExit, KeyboardInterrupt) as end:
        began.append(end.code if isinstance(end, SystemExit) else 130)
    assert {each: signal.getsignal(each) for each in before} == before
    assert list(tmp_path.iterdir()) == []
    return began


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_comparison_at_any_instant_and_nothing_is_left(tmp_path, monkeypatch, number, status):
    assert compare(tmp_path, monkeypatch, "tested", number) == ["tested", status]
    assert compare(tmp_path, monkeypatch, "reference", number) == ["tested", "reference", status]
    assert compare(tmp_path, monkeypatch, "comparison", number) == ["tested", "reference", "comparison", status]
    assert compare(tmp_path, monkeypatch, None, number) == ["tested", "reference", "comparison"]


def test_impossible_reference_is_refused():
    with pytest.raises(ValueError, match="--reference: 'gpu' is unknown; choose one of in_memory, zero_offload"):
        verify.reference_of(CONFIG, "gpu")
    with pytest.raises(
        ValueError, match=r"the reference in_memory cannot be trained with these options: .* one process, not 2"
    ):
        verify.reference_of(dataclasses.replace(CONFIG, ranks=2), "in_memory")

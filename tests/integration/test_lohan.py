"""LoHan as a system: a plan by the run's own classes, transformers' models, and the bits of training in memory."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from memascend import systems
from memascend.cli import main
from memascend.engine.errors import NotStreamable
from memascend.engine.options import EngineOptions
from memascend.engine.state_store import StateStore
from memascend.engine.streaming import streaming
from memascend.memory.classes import class_of
from memascend.memory.ledger import Ledger
from memascend.ops.adamw import AdamW
from memascend.planner.footprint import plan
from memascend.planner.options import Stack
from memascend.planner.spec import model_spec
from memascend.planner.workload import Workload
from memascend.storage.tensor_file import TensorFileReader, TensorFileWriter
from memascend.training import random_state, report
from memascend.training.backends.in_memory import InMemoryBackend
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig
from memascend.training.systems import check

CONFIG = TrainConfig(model="m", data=["d"], system="lohan")
MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
BATCHES = [torch.arange(2 * 16).reshape(2, 16) % 128, torch.arange(2 * 16).reshape(2, 16) % 100 + 7]


def begin(backend, **changes):
    """Build the model MODEL with `changes` in the backend, and return the backend."""
    torch.manual_seed(3)
    backend.build(MODEL | changes)
    return backend


def streamed(folder, arm="optimized", model=MODEL, ledger=None, swap=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    settings = {"folder": str(folder / "states"), "arm": arm, "swap": swap}
    return begin(StreamingBackend(config, settings, ledger or Ledger()), **model)


def in_memory(model=MODEL, slices=False, **changes):
    config = dataclasses.replace(CONFIG, **{"checkpointing": "none", **changes})
    settings = {"update": "memascend", "group_elements": None, "vocabulary_slices": slices}
    return begin(InMemoryBackend(config, settings, Ledger()), **model)


def train(backend, steps):
    count = backend._config.accumulate
    return [tuple(map(float, backend.step(BATCHES[:count], 1e-3))) for _ in range(steps)]


def test_host_buffers_lie_on_their_node_and_nothing_else_changes(tmp_path):
    plain, placed = Ledger(), Ledger()
    one = streamed(tmp_path / "one", ledger=plain)
    classes = {"master_weights", "gradients", "weights", "activations"}
    text = json.dumps(dict.fromkeys(classes, 0))
    other = streamed(tmp_path / "other", ledger=placed, placement=text)
    try:
        assert train(one, 2) == train(other, 2)
        found = report.memory_nodes(placed, text)
        assert classes <= set(found["bytes"])
        assert all(set(found["bytes"][name]) == {0} for name in classes)
        assert found["wrong"] == []
        assert {e.nodes for e in placed.live() if class_of(e.owner)} == {(0,)}
        assert sum(e.reserved_bytes for e in placed.live()) == sum(e.reserved_bytes for e in plain.live()) > 0
    finally:
        one.close()
        other.close()


def assert_equal(ours, theirs):
    """Check that weights and states of both are equal to the last bit."""
    expected = {name: values.clone() for name, values in theirs.weights()}
    for name, values in ours.weights():
        assert torch.equal(values, expected[name]), name
    flat, places = {name: values.clone() for name, values in theirs.states()}, {}
    for number, names in enumerate(theirs.state_facts()["groups"]):
        place = 0
        for name, numel in names:
            places[name] = number, slice(place, place + numel)
            place += numel
    order = [name for ((name, _),) in ours.state_facts()["groups"]]
    for key, values in ours.states():
        index, _, state = key.partition(".")
        number, place = places[order[int(index)]]
        found = flat[f"{number}.{state}"]
        assert torch.equal(values, found if state == "scales" else found[place]), (order[int(index)], state)


@pytest.mark.parametrize(
    ("arm", "changes"),
    [
        ("optimized", {"clip": 0.0}),
        ("naive", {"clip": 0.0, "accumulate": 2}),
        ("none", {"clip": 0.0}),
        ("optimized", {"clip": 0.5, "accumulate": 2}),
        ("optimized", {"clip": 0.0, "dtype": "fp32", "loss": "plain"}),
        ("optimized", {"clip": 0.0, "dtype": "fp16"}),
        ("optimized", {"clip": 0.5, "states": "bf16", "gradients": "bf16", "checkpointing": "plain"}),
        ("optimized", {"clip": 0.5, "states": "int8", "accumulate": 2}),
        pytest.param("optimized", {"clip": 0.0, "states": "int8"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k} {v}" for k, v in value.items()),
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_states_losses_and_norms_equal_training_in_memory(tmp_path, arm, changes, tied):
    shape = {"tie_word_embeddings": tied}
    others = {name: value for name, value in changes.items() if name != "checkpointing"}
    ours, theirs = streamed(tmp_path, arm, shape, **changes), in_memory(shape, **others)
    assert train(ours, 3) == train(theirs, 3)
    assert ours.evaluate(BATCHES[0]) == theirs.evaluate(BATCHES[0])
    assert_equal(ours, theirs)
    ours.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("swap", "accumulate"), [("all", 1), ("5000", 2), ("best", 1)])
def test_swapped_results_change_no_bit_of_a_transformers_model(tmp_path, swap, accumulate):
    ours = streamed(tmp_path, swap=swap, accumulate=accumulate, clip=0.5)
    theirs = in_memory(accumulate=accumulate, clip=0.5)
    assert train(ours, 3) == train(theirs, 3)
    assert_equal(ours, theirs)
    assert "of products' results" in ours.remark()
    assert ours.facts()["activation_swapping"]["rule"] == swap
    moved = ours.statistics()["written_bytes"]
    ours.close()
    assert moved > 0
    assert list(tmp_path.iterdir()) == []


def test_run_options_determine_arm_swap_rule_and_swap_space(tmp_path):
    def settings(**changes):
        config = dataclasses.replace(CONFIG, output=str(tmp_path), **changes)
        check(config)
        made = systems.load("lohan").trainer(config, {"planned_host_bytes": 1 << 30}, "r", "s").settings
        return made["arm"], made.get("swap"), made.get("swap_room")

    assert settings() == ("optimized", None, None)
    assert settings(arm="as_published") == ("optimized", "algorithm 1", 0)
    assert settings(arm="released", host_memory="3GiB") == ("optimized", "released", 2 << 30)
    assert settings(checkpointing="ssd", arm="naive") == ("naive", "best", 0)
    assert settings(checkpointing="ssd", activations="2GiB") == ("optimized", str(2 << 30), 0)


@pytest.mark.parametrize("changes", [{"clip": 0.0}, {"loss": "plain"}, {"dtype": "fp16"}], ids=str)
def test_sliced_vocabulary_trains_as_the_same_slices_in_memory(tmp_path, changes):
    shape = {"vocab_size": 5000, "tie_word_embeddings": "loss" in changes}  # 2,048 rows per slice
    ours, theirs = streamed(tmp_path, model=shape, **changes), in_memory(shape, slices=True, **changes)
    assert [len(slices) for slices in ours.engine.units.matrices.values()] == [3] * (1 if "loss" in changes else 2)
    assert train(ours, 2) == train(theirs, 2)
    assert ours.evaluate(BATCHES[0]) == theirs.evaluate(BATCHES[0])
    assert_equal(ours, theirs)
    ours.close()


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_checkpoint_of_one_run_resumes_exactly_in_another(tmp_path, states):
    changes = {"clip": 0.0, "states": states}
    ours, theirs = streamed(tmp_path / "a", **changes), in_memory(**changes)
    losses = train(ours, 2)
    with TensorFileWriter(tmp_path / "states.safetensors", ours.state_layouts()) as writer:
        for name, values in ours.states():
            writer.write(name, values)
    facts = ours.state_facts()
    ours.close()
    again = streamed(tmp_path / "b", **changes)
    with TensorFileReader(tmp_path / "states.safetensors") as reader:
        again.restore(reader, facts)
    assert losses + train(again, 2) == train(theirs, 4)
    assert_equal(again, theirs)
    again.close()


_START = """
import dataclasses, re, sys
from pathlib import Path

import torch

from memascend.memory.ledger import Ledger
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig

def resident(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

def started(folder, layers):
    config = TrainConfig(model="m", data=["d"], system="lohan", dtype="fp32", clip=0.0)
    backend = StreamingBackend(config, {"folder": folder, "arm": "optimized"}, Ledger())
    model = dict(
        model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, tie_word_embeddings=False,
    )
    backend.build(model)
    return backend

first = started(sys.argv[1] + "/first", 4)
first.step([torch.zeros(1, 8, dtype=torch.int64)], 1e-3)
first.close()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
second = started(sys.argv[1] + "/second", 64)
print(resident("VmHWM") - before, 4 * sum(p.numel() for p in second.model.parameters()))
second.close()
"""


@pytest.mark.slow  # a separate process, with the allocator's settings of a run
def test_start_up_never_holds_the_whole_model_in_memory(tmp_path):
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", _START, str(tmp_path)]
    said = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True).stdout
    grown, weights = map(int, said.split())
    assert weights > 150e6
    assert grown < 0.4 * weights
    assert list(tmp_path.iterdir()) == []


def test_kept_step_resumes_from_the_tier_with_its_facts(tmp_path):
    ours, theirs = streamed(tmp_path, clip=0.0), in_memory(clip=0.0)
    losses = train(ours, 1)
    ours.keep({"step": 1, "note": "the first"})
    train(ours, 1)  # never kept
    ours.engine.close()
    again = StreamingBackend(ours._config, ours._settings, Ledger())
    assert again.kept_step() == 1
    assert again.go_on(MODEL)["note"] == "the first"
    assert losses + train(again, 2) == train(theirs, 3)
    again.close()
    assert StreamingBackend(ours._config, ours._settings, Ledger()).kept_step() is None


@pytest.mark.parametrize("changes", [{"clip": 0.0}, {"dtype": "fp16", "accumulate": 2}], ids=["bf16", "fp16"])
def test_one_state_version_resumes_after_an_interrupted_update(tmp_path, changes, monkeypatch):
    theirs = in_memory(**changes)
    ours = StreamingBackend(
        dataclasses.replace(CONFIG, **changes),
        {"folder": str(tmp_path / "states"), "arm": "optimized", "versions": 1},
        Ledger(),
    )
    begin(ours)
    losses = train(ours, 1)
    ours.keep({"step": 1, "random": random_state.as_json()})
    with monkeypatch.context() as killed:
        commits, stock = [], StateStore.commit

        def commit(self, facts):
            stock(self, facts)
            commits.append(facts)
            if len(commits) == 3:
                raise KeyboardInterrupt

        killed.setattr(StateStore, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            train(ours, 1)
    ours.engine.close()
    again = StreamingBackend(ours._config, ours._settings, Ledger())
    assert again.kept_step() == 2
    facts = again.go_on(MODEL)
    assert facts["step"] == 2
    assert facts["random"] == random_state.as_json()
    assert losses + train(again, 1) == train(theirs, 3)[::2]
    assert_equal(again, theirs)
    again.close()


def test_streamed_model_is_saved_and_generates_as_in_transformers(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    ours = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL | {"tie_word_embeddings": True}))
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-3)
        for ids in BATCHES:
            ours(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        ours.save_pretrained(tmp_path / "trained")
        said = ours.generate(BATCHES[0][:, :4], max_new_tokens=4, do_sample=False)
        weights = {name: values.clone() for name, values in session.engine.read_weights()}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(saved.generate(BATCHES[0][:, :4], max_new_tokens=4, do_sample=False), said)
    for name, values in saved.named_parameters():
        assert torch.equal(values, weights[name]), name


@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions(swap="all")], ids=["recomputed", "swapped"])
def test_model_filling_a_key_value_cache_trains_as_in_memory(tmp_path, options):
    """transformers' models do so by default, in training too: recomputing a block must not add to the cache."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    def made():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
        assert model.config.use_cache
        return model.train()

    ours, theirs = made(), made()
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    plain = AdamW(theirs.parameters(), **settings)
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, options=options, **settings)
        for ids in BATCHES:
            losses = [each(input_ids=ids, labels=ids).loss for each in (ours, theirs)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            plain.step()
            plain.zero_grad()
            assert losses[0].item() == losses[1].item()
        for name, values in session.engine.read_weights():
            assert torch.equal(values, theirs.get_parameter(name)), name
        with torch.no_grad():
            filled = theirs(input_ids=BATCHES[0]).past_key_values
        assert isinstance(filled, DynamicCache)
        with pytest.raises(NotStreamable, match="a cache of keys and values that is already filled"):
            ours(input_ids=BATCHES[0], labels=BATCHES[0], past_key_values=filled)
        # a pass with a graph: the cache is empty here, and not in memory
        carried = ours(input_ids=BATCHES[0]).past_key_values
        with pytest.raises(NotStreamable, match="keys and values of an earlier pass"):
            ours(input_ids=BATCHES[0], labels=BATCHES[0], past_key_values=carried)


@pytest.mark.parametrize(("arm", "swap"), [("optimized", None), ("naive", None), ("optimized", "all")])
def test_plan_equals_the_ledger_of_a_run_by_entry(tmp_path, arm, swap):
    spec = model_spec("qwen2.5-0.5b").twin(16)
    ledger = Ledger()
    ours = streamed(tmp_path, arm, spec.hf_config_dict(), ledger, swap, clip=1.0)
    ids = torch.arange(2 * 16).reshape(2, 16)
    ours.step([ids], 1e-3)

    def rows(entries):
        return sorted((e.owner, e.requested_bytes, e.reserved_bytes) for e in entries if e.role == "host")

    stack = Stack(checkpointing="ssd" if swap else "offloaded")
    work = Workload(spec=spec, system="lohan", arm=arm, dtype="bf16", context=16, batch=2, stack=stack)
    assert rows(plan(work, process_overhead=False).entries) == rows(ledger.live())
    ours.close()


SEVEN, PLAN = model_spec("qwen2.5-7b"), ["plan", "--model", "qwen2.5-7b", "--system", "lohan", "--context", "512"]
_SIZE = "([0-9.]+) GiB"


def test_plan_shows_disk_space_of_each_number_of_state_versions(capsys):
    assert main([*PLAN, "--clip", "0", "--checkpointing", "plain"]) == 0
    said = capsys.readouterr().out
    sizes = [f"two versions of the states: {_SIZE}", f"repeat a step: {_SIZE}", f"one alone: {_SIZE}"]
    two, one, alone = (float(re.search(words, said)[1]) * 2**30 / SEVEN.parameters for words in sizes)
    assert (two, one) == (pytest.approx(28, rel=0.001), pytest.approx(18, rel=0.06))  # including space for two blocks
    assert alone == pytest.approx(14, rel=0.07)
    assert float(re.search(rf"SSD: {_SIZE} \([0-9.]+ GB\) of swap files", said)[1]) * 2**30 / SEVEN.parameters == two


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--state-versions", "checkpoint"],
            "states 91.4 GB, gradients 30.5 GB (buffered until their norm is known; not with --clip 0), weights 15.2",
        ),
        ([], "states 91.4 GB, weights 15.2 GB, inputs of blocks"),
        (["--state-versions", "one"], "gradients 30.5 GB (so that a step can be repeated)"),
        (["--clip", "0"], "states 91.4 GB, weights 15.2 GB, inputs of blocks"),
        (["--clip", "0", "--accumulate", "3"], "gradients 60.9 GB (buffered until all batches of a step are done)"),
        (["--clip", "0", "--state-versions", "one"], "gradients 30.5 GB (so that a step can be repeated)"),
        (["--clip", "0", "--arm", "none"], "gradients 30.5 GB (the optimizer comes after backward)"),
    ],
    ids=" ".join,
)
def test_plan_says_what_a_step_writes_and_why(options, line, capsys):
    assert main([*PLAN, *options]) == 0
    (said,) = (each for each in capsys.readouterr().out.splitlines() if "written per step" in each)
    assert line in said


@pytest.mark.parametrize(
    ("bytes_per_parameter", "versions", "status"),
    [(30, "two versions of the states:", 0), (20, "one version of the states, with", 0), (17, "", 1)],
)
def test_plan_keeps_as_many_state_versions_as_fit(bytes_per_parameter, versions, status, capsys):
    gib = bytes_per_parameter * SEVEN.parameters / 2**30
    assert main([*PLAN, "--clip", "0", "--ssd-space", f"{gib:.3f}"]) == status
    said = capsys.readouterr().out
    assert versions in said or status


def test_planned_host_memory_does_not_grow_with_depth():
    spec, sizes = model_spec("qwen2.5-7b").twin(8), []
    for layers in (14, 28, 56):
        deeper = dataclasses.replace(spec, layers=layers, config={**spec.config, "num_hidden_layers": layers})
        work = Workload(spec=deeper, system="lohan", dtype="bf16", context=512)
        sizes.append(plan(work, process_overhead=False).host_bytes)
        assert plan(dataclasses.replace(work, system="memascend"), process_overhead=False).host_bytes > sizes[-1]
    assert max(sizes) <= 1.01 * min(sizes)


def test_planned_host_memory_does_not_grow_with_the_vocabulary():
    spec, sizes = model_spec("qwen2.5-7b"), []
    for vocab in (32064, 152064, 304128):
        larger = dataclasses.replace(spec, vocab=vocab, config={**spec.config, "vocab_size": vocab})
        work = Workload(spec=larger, system="lohan", dtype="bf16", context=512)
        sizes.append(plan(work, process_overhead=False).host_bytes)
    assert max(sizes) - min(sizes) <= 2 * (1 << 24)  # one slice: 2 bytes for each of its elements


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 2}, "system 'lohan' is one process, not 2"),
        ({"checkpointing": "none"}, "recomputes its blocks, and checkpointing 'none' does not fit"),
        ({"states": "bf16", "dtype": "fp16"}, "states 'bf16' need dtype bf16"),
        ({"states": "int8", "dtype": "fp16"}, "states 'int8' need bf16 weights.* but dtype is 'fp16': set --dtype"),
        ({"states": "int8", "system": "memascend"}, "'int8': system 'memascend' keeps no 8-bit moments: set --system"),
        ({"checkpointing": "ssd", "arm": "released"}, "arm 'released' decides by itself what goes to the SSD"),
        ({"checkpointing": "ssd", "activations": "keep:1,offload:2"}, "decides by products, not by blocks"),
        ({"checkpointing": "ssd", "activation_writes": "1TiB"}, "has no limit to what activations write"),
    ],
    ids=["ranks", "checkpointing", "states", "8 bits", "system", "arm", "blocks", "writes"],
)
def test_unsupported_options_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        check(dataclasses.replace(CONFIG, **changes))
    assert "\n" not in str(refused.value)


def test_every_arm_is_described_and_plain_checkpointing_is_planned():
    system = systems.load("lohan")
    assert list(system.arms) == list(system.describe()["arms"])
    work = Workload(spec=model_spec("qwen2.5-0.5b"), system="lohan", dtype="bf16", stack=Stack(checkpointing="plain"))
    owners = {entry.owner for entry in plan(work, process_overhead=False).entries}
    assert owners == {"streamed_weights", "streamed_states", "streamed_gradients", "nvme_engine_buffers"}

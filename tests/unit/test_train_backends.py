"""Backends of a training: plain PyTorch in memory, its updates and loss scale, what it saves and resumes from."""

import dataclasses
import importlib.util
import random

import pytest
import torch

from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement import on_node
from memascend.memory.topology import Topology
from memascend.ops import adamw
from memascend.simulator import Recorder
from memascend.storage.tensor_file import TensorFileReader, TensorFileWriter
from memascend.training import backends, report, systems
from memascend.training.backends.groups import Group
from memascend.training.backends.in_memory import InMemoryBackend
from memascend.training.backends.loss_scale import LossScale
from memascend.training.backends.updates import make_update
from memascend.training.config import TrainConfig

CONFIG = TrainConfig(model="m", data=["d"], system="in_memory", loss="plain", checkpointing="none", clip=0.5)
MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
IDS = torch.arange(2 * 16).reshape(2, 16) % 128


def built(update="torch", group_elements=None, folder=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    settings = {"update": update, "group_elements": group_elements, "activations_folder": folder}
    backend = InMemoryBackend(config, settings, Ledger())
    torch.manual_seed(3)
    backend.build(MODEL)
    return backend


def saved(backend, path):
    with TensorFileWriter(path, backend.state_layouts()) as writer:
        for name, tensor in backend.states():
            writer.write(name, tensor)
    return backend.state_facts()


def weights(backend):
    return {name: tensor.clone() for name, tensor in backend.weights()}


def steps(backend, count):
    return [tuple(map(float, backend.step([IDS, IDS.flip(0) + 1], 1e-3))) for _ in range(count)]


def test_every_backend_is_found_by_its_name():
    assert backends.load("in_memory") is InMemoryBackend
    with pytest.raises(ValueError, match="there is no backend 'nothing'; known: deepspeed, in_memory"):
        backends.load("nothing")


def test_kernel_converts_half_precision_gradients_without_a_copy(monkeypatch):
    """No fp32 copy is made of them, and the bits are those of a copy."""
    stock, seen = adamw.adamw_, []

    def trained(copies):
        def update(param, grad, *args, **options):
            seen.append(grad.dtype)
            return stock(param, grad.float() if copies else grad, *args, **options)

        monkeypatch.setattr(adamw, "adamw_", update)
        backend = built("memascend", dtype="bf16", gradients="bf16")
        return steps(backend, 3), weights(backend)

    results = [trained(copies) for copies in (False, True)]
    assert set(seen) == {torch.bfloat16}
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def test_ssd_activations_change_no_bit_and_are_counted_per_step(tmp_path):
    ids = torch.arange(16 * 512).reshape(16, 512) % 128
    kept, sent = built(), built(checkpointing="ssd", activations="all", folder=str(tmp_path))
    for number in range(2):
        assert tuple(map(float, sent.step([ids], 1e-3))) == tuple(map(float, kept.step([ids], 1e-3)))
        moved = sent.statistics()
        assert moved["written_bytes"] > 16 * 512 * 64 * 2, number
        assert kept.statistics() == {"read_bytes": 0, "written_bytes": 0}
    assert all(torch.equal(tensor, weights(kept)[name]) for name, tensor in sent.weights())
    assert sent.facts()["activations"]["written"] > moved["written_bytes"]
    assert "activations" not in kept.facts()
    sent.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("update", "changes"),
    [
        ("torch", {}),
        ("torch", {"dtype": "fp32"}),
        ("torch", {"dtype": "fp16"}),
        ("torch", {"gradients": "bf16"}),
        ("memascend", {"states": "bf16"}),
        ("memascend", {"states": "int8"}),
        pytest.param("deepspeed", {}, marks=pytest.mark.deepspeed),
    ],
)
def test_resume_from_saved_states_gives_the_same_bits(tmp_path, update, changes):
    whole = built(update, 5000, **changes)
    all_losses = steps(whole, 5)
    first = built(update, 5000, **changes)
    assert steps(first, 2) == all_losses[:2]
    facts = saved(first, tmp_path / "states")
    second = built(update, 5000, **changes)
    with TensorFileReader(tmp_path / "states") as reader:
        second.restore(reader, facts)
    assert steps(second, 3) == all_losses[2:]
    for name, tensor in whole.weights():
        assert torch.equal(tensor, weights(second)[name]), name
    assert [sum(count for _, count in group) for group in facts["groups"]] == [
        layout.shape[0] for layout in first.state_layouts() if layout.name.endswith(".master")
    ]
    assert len(facts["groups"]) > 1
    for backend in (whole, first, second):
        backend.close()


def test_fp32_in_memory_matches_the_plain_pytorch_loop():
    """The usual loop, on the same weights: forward, backward, clip_grad_norm_, torch.optim.AdamW."""
    from memascend.integrations.pretrained import in_memory_model

    ours = built(dtype="fp32")
    torch.manual_seed(3)
    model = in_memory_model(MODEL, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for _ in range(4):
        batches = [IDS, IDS.flip(0) + 1]
        losses = [model(input_ids=ids, labels=ids).loss for ids in batches]
        for loss in losses:
            (loss / len(batches)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss, our_norm = ours.step(batches, 1e-3)
        assert float(loss) == pytest.approx(float(sum(losses).detach()) / 2, rel=1e-6)
        assert our_norm == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights(ours)[name], parameter.detach(), rtol=1e-4, atol=2e-6)


def test_parameter_without_gradient_gets_a_zero_gradient():
    """ZeRO's flat groups behave like this: weight decay and the moments continue."""
    backend = built(weight_decay=0.1)
    steps(backend, 1)
    frozen = {name: parameter for name, parameter in backend.model.named_parameters() if "layers.1." in name}
    backend.model.model.layers = backend.model.model.layers[:1]
    group = backend._groups[0]
    place = 0
    for name, parameter in group.parameters:
        if name in frozen:
            break
        place += parameter.numel()
    before = group.exp_avg[place : place + 8].clone()
    steps(backend, 1)
    torch.testing.assert_close(group.exp_avg[place : place + 8], 0.9 * before, rtol=1e-6, atol=0)
    assert before.abs().max() > 0


def test_infinite_gradient_skips_the_step_and_leaves_weights_unchanged():
    backend = built(dtype="fp16")
    steps(backend, 1)
    before, scale = weights(backend), backend.loss_scale()
    hook = backend.model.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    assert [backend.step([IDS], 1e-3)[1] for _ in range(2)] == [None, None]
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    assert backend.loss_scale() == scale / 2  # the first overflow does not reduce it
    assert backend.step([IDS], 1e-3)[1] is not None
    assert backend.state_facts()["adam_step"] == 2
    backend.close()


@pytest.mark.deepspeed
def test_loss_scale_matches_deepspeed():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    theirs = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False, raise_error_at_min_scale=True)
    ours, rng = LossScale.dynamic(), random.Random(5)
    for _ in range(20_000):
        overflow = rng.random() < 0.001
        if overflow:
            theirs.cur_iter += 1  # does what update_scale does, without logging ranks
            theirs.last_overflow_iter = theirs.cur_iter - 1
            if theirs.cur_hysteresis == 1:
                theirs.cur_scale = max(theirs.cur_scale / 2, 1.0)
            else:
                theirs.cur_hysteresis -= 1
        else:
            theirs.update_scale(False)
        ours.after_step(overflow)
        assert (ours.value, ours.patience, ours.step) == (theirs.cur_scale, theirs.cur_hysteresis, theirs.cur_iter)
    assert 1 < ours.value != 2.0**16


def test_loss_scale_at_its_minimum_raises_an_error():
    scale = LossScale(1.0, patience=1)
    with pytest.raises(ValueError, match="training has diverged; lower --learning-rate"):
        scale.after_step(True)


@pytest.mark.parametrize("name", ["torch", "memascend", pytest.param("deepspeed", marks=pytest.mark.deepspeed)])
def test_update_matches_torch_adamw_within_rounding(name):
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(999, generator=generator)
    parameter = master.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.01)
    group = Group([], 0, master, torch.empty(999), torch.zeros(999), torch.zeros(999))
    update = make_update(name, dataclasses.replace(CONFIG, clip=0.0))
    for step in range(1, 6):
        gradient = torch.randn(999, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        group.gradient.copy_(gradient * 4)
        update.apply(group, step, 1e-2, scale=4.0, norm=torch.tensor(1.0))
    torch.testing.assert_close(group.master, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arm": "sgd"}, "has no arm 'sgd'; its arms: torch_adamw, deepspeed_adamw, memascend_adamw"),
        ({"ranks": 2}, "system 'in_memory' is one process, not 2"),
        ({"nvme": "/swap"}, "swaps nothing: leave --nvme out"),
        ({"devices": ["/dev/null"]}, "swaps nothing: leave --devices out"),
        ({"states": "bf16"}, "need --arm memascend_adamw"),
        ({"states": "int8"}, "system 'in_memory' keeps no 8-bit moments: .* --arm memascend_adamw"),
        ({"states": "int8", "arm": "deepspeed_adamw"}, "arm 'deepspeed_adamw' of system 'in_memory' keeps no 8-bit"),
        ({"states": "int8", "arm": "memascend_adamw", "dtype": "fp32"}, "bf16 weights.* but dtype is 'fp32'"),
        ({"gradients": "bf16", "dtype": "fp32"}, "gradients 'bf16' need dtype bf16"),
        ({"system": "memascend", "dtype": "fp32"}, "dtype 'fp32' is for --system in_memory"),
    ],
)
def test_unsupported_in_memory_options_give_a_one_line_error(changes, said):
    with pytest.raises(ValueError, match=said) as refused:
        systems.check(dataclasses.replace(CONFIG, **changes))
    assert "\n" not in str(refused.value)


def test_deepspeed_system_is_refused_if_deepspeed_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "deepspeed" else found(name, *of)
    )
    with pytest.raises(
        ValueError, match=r"which is not installed: pip install 'memascend\[deepspeed\]', or use --system"
    ):
        systems.check(dataclasses.replace(CONFIG, system="memascend"))
    systems.check(CONFIG)


@pytest.mark.parametrize("checkpointing", ["plain", "offloaded"])
def test_traced_step_shows_phases_and_blocks_forward_and_backward(checkpointing):
    backend, recorder = built(checkpointing=checkpointing), Recorder()
    backend.trace(recorder)
    steps(backend, 1)
    events = recorder.take()
    main = [event.phase for event in events if event.resource == "main"]
    assert main == ["forward", "backward", "forward", "backward", "optimizer"]
    blocks = [(event.phase, event.name) for event in events if event.resource == "gpu0"]
    once = [("forward", "block 0"), ("forward", "block 1"), ("backward", "block 1"), ("backward", "block 0")]
    assert blocks == 2 * once


def test_trace_counts_every_byte_of_the_activation_cache(tmp_path):
    work = {"checkpointing": "ssd", "activations": "all", "twin": 64}  # in a twin, small tensors are offloaded too
    backend, recorder = built(folder=str(tmp_path), **work), Recorder()
    backend.trace(recorder)
    steps(backend, 1)
    events = [event for event in recorder.take() if event.resource.startswith("ssd")]
    moved = {name: sum(e.amount for e in events if e.resource == name) for name in ("ssd.write", "ssd.read")}
    assert {(event.resource, event.phase) for event in events} == {("ssd.write", "forward"), ("ssd.read", "backward")}
    said = backend._options.cache.statistics
    assert moved == {"ssd.write": said.written, "ssd.read": said.read}
    assert moved["ssd.write"] > 0


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_placed_run_gives_same_bits_and_a_correct_ledger(states):
    work = {"checkpointing": "offloaded", "context": 16, "batch": 2, "states": states}
    plain, placed = built("memascend", **work), built("memascend", placement="latency_first", **work)
    assert steps(placed, 2) == steps(plain, 2)
    for name, tensor in plain.weights():
        assert torch.equal(tensor, weights(placed)[name]), name
    found = report.memory_nodes(placed.ledger, "latency_first")
    own = {"weights"} if states == "fp32" else set()  # otherwise they are their masters
    assert set(found["bytes"]) == {"master_weights", "momentum", "variance", "gradients", "activations"} | own
    assert {node for shares in found["bytes"].values() for node in shares} <= set(Topology.read().nodes)
    assert found["wrong"] == []


def test_wrong_ledger_entry_is_reported():
    ledger = Ledger()
    tensor = PageAlignedPinnedAllocator(ledger, placement=on_node(0)).allocate(
        4096, torch.float32, name="states", owner="momentum"
    )
    assert report.memory_nodes(ledger, "{momentum: 0}") == {
        "placement": "{momentum: 0}", "bytes": {"momentum": {0: 4 * tensor.numel()}}, "wrong": [],
    }  # fmt: skip
    ledger.record("elsewhere", "variance", 4096, address=tensor.data_ptr(), nodes=(7,))
    assert report.memory_nodes(ledger, "x")["wrong"] == ["elsewhere"]

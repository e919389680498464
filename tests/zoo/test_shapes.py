"""Shapes of modules that people write train as in memory, bit by bit, or are refused in one line."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend import offload_activations
from memascend.engine.errors import NotStreamable
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from tests.zoo.shapes import CLOSE, REFUSED, SHAPES, WAYS, Mlp, batch

# Attributes that are not buffers, which another process would have from its user's own checkpoint.
PLAIN_STATE = ("calls", "steps", "seen", "history", "by_name")
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def made(name):
    torch.manual_seed(0)
    return SHAPES[name]()


def step_in_memory(model, optimizer, data):
    losses = []
    optimizer.zero_grad()
    for ids in data:
        losses.append(model(ids))
        losses[-1].backward()
    optimizer.step()
    return [loss.item() for loss in losses]


def step_streamed(model, optimizer, data):
    losses = []
    for ids in data:
        losses.append(model(ids))
        losses[-1].backward()
    optimizer.step()
    return [loss.item() for loss in losses]


def evaluated(model):
    model.eval()
    with torch.no_grad():
        loss = model(batch(99)).item()
    model.train()
    return loss


def begin(model, folder, *, accumulate, resume=False, **options):
    session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(model)
    chosen = EngineOptions(zero_missing=False, **options)
    return session, session.optimizer(torch.optim.AdamW, accumulate=accumulate, options=chosen, **SETTINGS)


def weights_of(session):
    return {name: values.clone() for name, values in session.engine.read_weights()}


def trained_in_memory(name, accumulate):
    model = made(name)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)
    torch.manual_seed(7)
    found = []
    for step in range(3):
        data = [batch(step * accumulate + n) for n in range(accumulate)]
        found += step_in_memory(model, optimizer, data)
        found.append(evaluated(model))
    return model, found, torch.rand(3)


def trained_streamed(name, folder, accumulate, **options):
    model = made(name)
    session, optimizer = begin(model, folder, accumulate=accumulate, **options)
    torch.manual_seed(7)
    found = []
    for step in range(3):
        if step == 2:  # another process resumes
            numbers = torch.get_rng_state()
            session.close()
            model, before = made(name), model
            for now, then in zip(model.modules(), before.modules(), strict=True):
                vars(now).update({k: v for k, v in vars(then).items() if k in PLAIN_STATE})
            session, optimizer = begin(model, folder, accumulate=accumulate, resume=True, **options)
            torch.set_rng_state(numbers)
        data = [batch(step * accumulate + n) for n in range(accumulate)]
        found += step_streamed(model, optimizer, data)
        found.append(evaluated(model))
        weights = session.engine.weights
        assert not [unit.key for unit in session.engine.layout.units if weights.is_referred_to(unit)]  # after a step
    numbers = torch.rand(3)
    weights = weights_of(session)
    session.close()
    return model, found, numbers, weights


OPTIONS = {
    "as they come": {"accumulate": 1},
    "inputs in memory": {"accumulate": 1, "checkpoints": "device"},
    "accumulated": {"accumulate": 2},
    "measured": {"accumulate": 1, "measure": True},
    "swapped": {"accumulate": 1, "swap": "all"},
}


SLOW = ("inputs in memory", "measured", "swapped")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] * (way in SLOW or (way == "accumulated" and n % 3 > 0)))
        for n, name in enumerate(SHAPES)
        for way in WAYS
    ],
)
def test_a_streamed_shape_trains_as_in_memory(tmp_path, monkeypatch, name, way):
    monkeypatch.setattr("memascend.engine.swap._LEAST_BYTES", 256)
    options = OPTIONS[way]
    if name in REFUSED:
        with pytest.raises(NotStreamable, match=REFUSED[name]) as refused:
            trained_streamed(name, tmp_path / "run", **options)
        assert "\n" not in str(refused.value)
        return
    model, losses, numbers, weights = trained_streamed(name, tmp_path / "run", **options)
    expected, expected_losses, expected_numbers = trained_in_memory(name, options["accumulate"])
    if (name, way) in CLOSE:
        torch.testing.assert_close(losses, expected_losses, rtol=CLOSE[name, way], atol=0)
        return
    assert losses == expected_losses
    for key, values in expected.named_parameters():
        assert not values.numel() or torch.equal(weights[key], values), key
    for (key, found), values in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, values), key
    assert torch.equal(numbers, expected_numbers)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_equal_gradients_with_activations_on_the_ssd(tmp_path, name):
    ours, theirs = made(name), made(name)
    cache = {"amount": "all", "minimum_bytes": 512, "reserve_bytes": 0, "device": "cpu"}
    for step in range(2):
        torch.manual_seed(step)
        with offload_activations(tmp_path, **cache):
            ours(batch(step)).backward()
        torch.manual_seed(step)
        theirs(batch(step)).backward()
    for (key, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), key
        assert found.grad is None or torch.equal(found.grad, expected.grad), key
    for (key, found), expected in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(found, expected), key


def test_every_shape_can_be_copied_and_trains():
    for name in SHAPES:
        model = copy.deepcopy(made(name))
        model(batch(0)).backward()
        assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("name", ["Plain", "CheckpointsAroundGroups", "ReentrantCheckpointsAroundGroups"])
def test_passes_are_counted_when_the_loop_calls_model_parts(tmp_path, name, frozen_head):
    """The loop computes its own loss over `model.model(...)`, as most hand-written loops do."""

    def step(model, number):
        ids = batch(number)
        model.loss(model.blocks(model.embed(ids)), ids).backward()

    ours, theirs = made(name), made(name)
    for model in (ours, theirs):
        model.head.requires_grad_(not frozen_head)
    optimizer = AdamW([p for p in theirs.parameters() if p.requires_grad], **SETTINGS)
    session, streamed = begin(ours, tmp_path / "run", accumulate=2)
    for number in range(6):
        step(ours, number)
        step(theirs, number)
        if number % 2:
            streamed.step()
            optimizer.step()
            optimizer.zero_grad()
    found = weights_of(session)
    session.close()
    for key, values in theirs.named_parameters():
        assert torch.equal(found[key], values), key


class ReentrantCheckpointAtTheEnd(SHAPES["Plain"]):
    """Checkpoints a module that is not a block, whose gradients come in the checkpoint's own backward pass."""

    def __init__(self):
        super().__init__()
        self.last = Mlp()

    def blocks(self, x):
        return checkpoint(self.last, super().blocks(x), use_reentrant=True)


def test_backward_starting_in_reentrant_checkpoint_counts_as_one_pass(tmp_path):
    """The head's gradient, also that of an early exit, comes after the checkpoint's."""

    def step(model, number):
        ids = batch(number)
        x = model.embed(ids)
        early = model.loss(x, ids)
        loss = model.loss(model.blocks(x), ids) + early
        loss.backward()
        return loss.item()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ReentrantCheckpointAtTheEnd())
    ours, theirs = models
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    session, streamed = begin(ours, tmp_path / "run", accumulate=2)
    for number in range(4):
        assert step(ours, number) == step(theirs, number)
        if number % 2:
            streamed.step()
            optimizer.step()
            optimizer.zero_grad()
    session.close()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # it inspects this library, too
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", ["model", "blocks", "blocks before the optimizer is made"])
def test_a_compiled_model_trains_as_in_memory(tmp_path, monkeypatch, capfd, compiled, backend):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # the other tests' setting compiles nothing
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = made("RandomNumbers")
    for layer in ours.layers if compiled == "blocks before the optimizer is made" else ():
        layer.compile(backend=backend)
    session, streamed = begin(ours, tmp_path / "run", accumulate=1)
    called = torch.compile(ours, backend=backend) if compiled == "model" else ours
    for layer in ours.layers if compiled == "blocks" else ():
        layer.compile(backend=backend)
    torch.manual_seed(7)
    for number in range(2):
        step_streamed(called, streamed, [batch(number)])
    found = weights_of(session)
    session.close()
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert capfd.readouterr().err == ""
    theirs = made("RandomNumbers")
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    torch.manual_seed(7)
    for number in range(2):
        step_in_memory(theirs, optimizer, [batch(number)])
    for key, values in theirs.named_parameters():
        assert torch.equal(found[key], values), key
    torch._dynamo.reset()


class Experts(nn.Module):
    """Several pieces, the first and the last without a gradient."""

    def __init__(self, idle):
        super().__init__()
        self.idle = idle
        self.experts = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x):
        for number, expert in enumerate(self.experts):
            x = x if number in self.idle else x + expert(x).tanh()
        return x


class OfExperts(nn.Module):
    def __init__(self, idle):
        super().__init__()
        self.layers = nn.ModuleList(Experts(idle) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("zero_missing", [False, True], ids=["left as they are", "updated with zeros"])
@pytest.mark.parametrize("idle", [(0, 3), (1,), (3,)])
def test_blocks_of_several_pieces_with_idle_experts_train_exactly(tmp_path, idle, zero_missing):
    torch.manual_seed(0)
    ours, theirs = OfExperts(idle), OfExperts(idle)
    theirs.load_state_dict(ours.state_dict())
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    session = streaming(tmp_path / "run", allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(ours)
    streamed = session.optimizer(
        torch.optim.AdamW, options=EngineOptions(zero_missing=zero_missing, piece_elements=1 << 16), **SETTINGS
    )
    assert all(len(unit.pieces) == 4 for unit in session.engine.layout.units)
    for step in range(2):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
        ours(x).backward()
        streamed.step()
        theirs(x).backward()
        for parameter in theirs.parameters():
            if zero_missing and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    found = weights_of(session)
    for key, values in theirs.named_parameters():
        assert torch.equal(found[key], values), key
    session.close()

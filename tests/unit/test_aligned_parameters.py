"""A streamed parameter is aligned to 64 bytes, as torch would align it, whatever precedes it in its unit."""

import copy

import pytest
import torch
from torch import nn

from memascend.engine import runtime
from memascend.engine.layout import ALIGNED_BYTES
from memascend.engine.model_units import ModelUnits
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW

WIDTH, WORDS = 9, 21
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.addresses = {}

    def forward(self, x):
        self.addresses.update({name: p.data_ptr() % ALIGNED_BYTES for name, p in self.named_parameters()})
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.fixed(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def made(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Model().to(dtype)


def opened(of, folder, how=StreamingEngine.start, **options):
    groups = [{"params": [p for p in of.parameters() if p.requires_grad], **SETTINGS}]
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    return how(of, folder, groups, EngineOptions(**options), allocator=allocator)


def batch(step):
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(step))


def train(of, engine, steps):
    for step in steps:
        of(batch(step)).backward()
        engine.finish_step()


def trained_in_memory(of, steps):
    optimizer = AdamW([p for p in of.parameters() if p.requires_grad], **SETTINGS)
    for step in range(steps):
        optimizer.zero_grad()
        of(batch(step)).backward()
        optimizer.step()
    return optimizer


def assert_equal(engine, theirs):
    values = dict(theirs.named_parameters())
    for name, found in engine.read_weights():
        assert torch.equal(found, values[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"wait": True}, {"versions": 1}], ids=["as they come", "waiting", "one version"]
)
def test_odd_sized_parameters_are_aligned_and_train_bit_identically(tmp_path, dtype, options):
    ours, theirs = made(dtype), made(dtype)
    engine = opened(ours, tmp_path / "session", **options)
    train(ours, engine, range(3))
    for layer in ours.layers:
        assert set(layer.addresses.values()) == {0}, layer.addresses
    optimizer = trained_in_memory(theirs, 3)
    assert_equal(engine, theirs)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            states = engine.read_states(name)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states[key], optimizer.state[parameter][key].flatten()), (name, key)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_store_without_gaps_from_an_earlier_version_is_resumed(tmp_path, monkeypatch, dtype):
    begun = runtime.units_of
    ours, theirs, again = made(dtype), made(dtype), made(dtype, seed=9)
    with monkeypatch.context() as earlier:
        earlier.setattr(runtime, "units_of", lambda *args: begun(*args[:3], False))
        engine = opened(ours, tmp_path / "session")
    assert all(unit.end == unit.numel for unit in engine.layout.units)
    train(ours, engine, range(2))
    engine.close()
    engine, _ = opened(again, tmp_path / "session", StreamingEngine.resume)
    assert all(unit.end == unit.numel for unit in engine.layout.units)
    train(again, engine, range(2, 4))
    trained_in_memory(theirs, 4)
    assert_equal(engine, theirs)
    engine.close()


def test_alignment_changes_the_layout_of_odd_sizes_only():
    even = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    assert ModelUnits(even).layout.digest == ModelUnits(copy.deepcopy(even), aligned=False).layout.digest
    assert ModelUnits(made()).layout.digest != ModelUnits(made(), aligned=False).layout.digest

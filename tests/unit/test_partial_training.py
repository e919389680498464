"""A step of a model that is trained in part writes what it trains, and little else."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from memascend.engine import runtime
from memascend.engine.frozen import FrozenApart
from memascend.engine.layout import Kind, UnitParameters, make_layout, padded
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.swap import Swapping
from memascend.engine.traffic import STATES, WEIGHTS, step_traffic
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from memascend.storage.completion import Promise

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Adapted(nn.Module):
    """A frozen matrix, and two thin ones next to it, as LoRA has."""

    def __init__(self, width, rank=4):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, width=256, depth=4, rank=4):
        super().__init__()
        self.embed = nn.Embedding(50, width).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(width, rank) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made(dtype=torch.float32, seed=0, rank=4):
    torch.manual_seed(seed)
    return Model(rank=rank).to(dtype)


def groups(of):
    return [{"params": [p for p in of.parameters() if p.requires_grad], **SETTINGS}]


def begin(of, folder, **options):
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    return StreamingEngine.start(of, folder, groups(of), EngineOptions(**options), allocator=allocator)


def go_on(of, folder, **options):
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    return StreamingEngine.resume(of, folder, groups(of), EngineOptions(**options), allocator=allocator)[0]


def batch(step):
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))


def train(of, engine, steps):
    for step in steps:
        of(batch(step)).backward()
        engine.finish_step()


def train_in_memory(of, steps):
    optimizer = AdamW([p for p in of.parameters() if p.requires_grad], **SETTINGS)
    for step in steps:
        of(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(engine, other):
    found = {name: values.clone() for name, values in engine.read_weights()}
    for name, values in other.named_parameters():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"arm": "none"}, {"versions": 1}, {"versions": 1, "redo": False}], ids=str)
def test_adapters_train_as_in_memory_before_and_after_resume(tmp_path, options, dtype):
    ours, theirs, again = made(dtype), made(dtype), made(dtype, seed=9)
    engine = begin(ours, tmp_path / "session", **options)
    train(ours, engine, range(2))
    engine.close()
    engine = go_on(again, tmp_path / "session", **options)
    train(again, engine, range(2, 4))
    train_in_memory(theirs, range(4))
    assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapter_step_writes_at_most_twice_what_it_trains(tmp_path, dtype):
    ours = made(dtype)
    engine = begin(ours, tmp_path / "session", checkpoints="device")
    train(ours, engine, range(2))
    layout, before = engine.layout, engine.transferred[1]
    train(ours, engine, [2])
    written = engine.transferred[1] - before
    trained = [sum(piece.numel for piece in unit.pieces) for unit in layout.units]
    weights = sum(padded(numel, dtype) * dtype.itemsize for numel in trained)
    states = sum(layout.states_numel(piece) for piece in layout.pieces) * layout.states.itemsize
    assert written <= 2 * (weights + states)
    assert written < sum(unit.numel for unit in layout.units) * dtype.itemsize / 2
    engine.close()


def test_swapping_counts_as_written_what_a_step_of_adapters_writes(tmp_path, monkeypatch):
    told, stock = [], Swapping.decide

    def decide(self, rates, outside_share, **traffic):
        told.append(traffic)
        return stock(self, rates, outside_share, **traffic)

    monkeypatch.setattr(Swapping, "decide", decide)
    ours = made(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", swap="all")
    train(ours, engine, [0])
    layout, (traffic,) = engine.layout, told
    written = step_traffic(layout, engine.options).written_by_kind()
    assert traffic["update_written"] == written[WEIGHTS] + written[STATES]
    assert traffic["gradients"] == 2 * sum(p.numel() for p in ours.parameters() if p.requires_grad)
    assert traffic["weights"] == 2 * sum(map(layout.unit_numel, layout.units))
    assert traffic["update_read"] == traffic["weights"] + written[STATES]  # frozen ones are read to recompute blocks
    engine.close()


def test_abandoned_step_leaves_frozen_and_trained_weights_unchanged(tmp_path):
    ours, theirs = made(), made()
    engine = begin(ours, tmp_path / "session")
    train(ours, engine, [0])
    (ours(batch(1)) * torch.inf).backward()
    assert engine.finish_step() is None
    train(ours, engine, [2])
    train_in_memory(theirs, [0, 2])
    assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("versions", [1, 2])
def test_older_store_with_frozen_weights_mixed_in_resumes_training(tmp_path, monkeypatch, versions):
    begun = runtime.units_of

    def whole(*args):
        units = begun(*args)
        units.layout = replace(units.layout, splits=False)
        return units

    ours, theirs, again = made(), made(), made(seed=9)
    with monkeypatch.context() as earlier:
        earlier.setattr(runtime, "units_of", whole)
        engine = begin(ours, tmp_path / "session", versions=versions)
    train(ours, engine, range(2))
    engine.close()
    engine = go_on(again, tmp_path / "session")
    assert not engine.layout.splits
    train(again, engine, range(2, 4))
    train_in_memory(theirs, range(4))
    assert_equal(engine, theirs)
    engine.close()


def test_layout_without_frozen_elements_matches_earlier_stores():
    ours = UnitParameters(key="u", kind=Kind.BLOCK, parameters=[("a", (300_000,), True)])
    layout = make_layout([ours], [("a", 300_000)], weights=torch.bfloat16)
    assert layout.digest == replace(layout, splits=False).digest
    assert layout.nbytes == replace(layout, splits=False).nbytes


@pytest.mark.parametrize("second", ["u", "u/0"], ids=["two units", "a unit and a piece"])
def test_two_tensors_with_the_same_key_are_refused(second):
    units = [
        UnitParameters(key=key, kind=Kind.BLOCK, parameters=[(name, (10,), True)])
        for key, name in (("u", "a"), (second, "b"))
    ]
    with pytest.raises(ValueError, match=f"two parts of the model would both be '{second}' on the tier"):
        make_layout(units, [("a", 10), ("b", 10)], weights=torch.bfloat16)


class _Refuses:
    """A session that accepts one of the two parts, and refuses the other when it is submitted."""

    def __init__(self):
        self.begun = Promise("the trained part")

    def __contains__(self, key):
        return False

    def read(self, key, tensor, *, priority=0):
        if str(key).startswith("frozen"):
            raise OSError("no such device")
        return self.begun

    write = read


@pytest.mark.parametrize("operation", ["read", "write"])
def test_buffer_with_refused_second_part_waits_for_the_first_part(operation):
    parameters = [("a", (10_000,), True), ("b", (10_000,), False)]
    unit = UnitParameters(key="u", kind=Kind.BLOCK, parameters=parameters)
    layout, session = make_layout([unit], [("a", 10_000)], weights=torch.float32), _Refuses()
    done = getattr(FrozenApart(session, layout), operation)("u", torch.empty(layout.unit_numel(layout.units[0])))
    assert not done.done()
    session.begun.set_result()
    with pytest.raises(OSError, match="no such device"):
        done.wait(60)

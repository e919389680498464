"""Buffers of a model are as after the last completed step when a run resumes in another process."""

import logging

import pytest
import torch
from torch import nn

from memascend import EngineOptions, streaming
from memascend.engine import state_store
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW

WIDTH = 8
MODES = {
    "two versions": {"versions": 2},
    "one version and a redo": {"versions": 1},
    "one version": {"versions": 1, "redo": False},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


class Averaged(nn.Module):
    """A model with running averages inside and outside its blocks, a table
    whose size grows, and a buffer that is not persistent."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("largest", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
            self.seen = torch.ones(1 + len(self.seen), dtype=torch.bool)
            self.passes += 1
        return x.square().mean()


def made():
    torch.manual_seed(0)
    return Averaged()


def data(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def begin(model, folder, *, resume=False, **options):
    session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(model)
    return session, session.optimizer(torch.optim.AdamW, lr=1e-2, options=EngineOptions(**options))


def train(model, optimizer, steps):
    for step in steps:
        model(data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def persistent(model):
    return {name: buffer for name, buffer in model.named_buffers() if name != "passes"}


def assert_equal(model, expected):
    found = persistent(model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_has_the_buffers_of_its_last_step(tmp_path, mode):
    theirs = made()
    train(theirs, AdamW(theirs.parameters(), lr=1e-2), range(4))
    ours = made()
    session, optimizer = begin(ours, tmp_path / "session", **MODES[mode])
    train(ours, optimizer, range(2))
    ours(data(9))  # in a step that is not completed
    session.close()
    ours = made()
    session, optimizer = begin(ours, tmp_path / "session", resume=True, **MODES[mode])
    assert ours.layers[0].norm.num_batches_tracked == 2
    train(ours, optimizer, range(2, 4))
    assert_equal(ours, persistent(theirs))
    assert ours.passes == 2  # of this process alone
    session.close()


def test_buffers_that_do_not_change_are_written_once(tmp_path, monkeypatch):
    written, write = [], state_store.StateStore.write_buffers

    def counting(session, raw):
        written.append(len(raw))
        write(session, raw)

    monkeypatch.setattr(state_store.StateStore, "write_buffers", counting)
    ours = made().eval()
    session, optimizer = begin(ours, tmp_path / "session")
    train(ours, optimizer, range(3))
    assert len(written) == 1
    ours.train()
    train(ours, optimizer, range(3, 5))
    assert len(written) == 3
    session.close()


def test_model_without_persistent_buffers_reserves_no_space_for_them(tmp_path):
    ours = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    ours.register_buffer("constant", torch.ones(1 << 20), persistent=False)
    session, _ = begin(ours, tmp_path / "session")
    assert session.engine.state_store.kept_buffers() is None
    assert (tmp_path / "session" / "states").stat().st_size < 8 << 20
    session.close()


def test_buffers_that_outgrow_their_space_are_skipped_with_a_warning(tmp_path, caplog):
    ours = made()
    session, optimizer = begin(ours, tmp_path / "session")
    train(ours, optimizer, range(1))
    ours.seen = torch.ones(1 << 20, dtype=torch.bool)
    with caplog.at_level(logging.WARNING, "memascend"):
        train(ours, optimizer, range(1, 4))
    assert ["buffers take" in each.getMessage() for each in caplog.records] == [True]
    session.close()
    ours = made()
    session, optimizer = begin(ours, tmp_path / "session", resume=True)
    assert not ours.seen.any()
    train(ours, optimizer, range(4, 5))
    session.close()


def test_store_of_an_earlier_version_resumes_without_buffers(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as earlier:
        earlier.setattr("memascend.engine.kept_buffers.buffer_space_bytes", lambda _: 0)
        earlier.setattr("memascend.engine.runtime.buffer_space_bytes", lambda _: 0)
        ours = made()
        session, optimizer = begin(ours, tmp_path / "session")
        train(ours, optimizer, range(1))
        session.close()
    ours = made()
    with caplog.at_level(logging.WARNING, "memascend"):
        session, optimizer = begin(ours, tmp_path / "session", resume=True)
    assert "holds no buffers" in caplog.text
    train(ours, optimizer, range(1, 3))
    session.close()


def test_buffers_of_other_shapes_or_names_are_restored_if_possible(tmp_path, caplog):
    ours = made()
    session, optimizer = begin(ours, tmp_path / "session")
    train(ours, optimizer, range(2))
    expected = persistent(ours)
    session.close()
    ours = made()
    ours.register_buffer("new", torch.ones(2))
    with caplog.at_level(logging.WARNING, "memascend"):
        session, _ = begin(ours, tmp_path / "session", resume=True)
    assert len(ours.seen) == 3
    assert_equal(ours, {**expected, "new": torch.ones(2)})
    assert "stay as they are: new" in caplog.text
    session.close()

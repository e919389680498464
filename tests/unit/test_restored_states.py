"""States are restored within the space that a session has, and a step that fails does not lose its count."""

import errno

import pytest
import torch
from torch import nn

from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from memascend.storage.errors import StorageError

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Tied(nn.Module):
    """The last unit except a norm is a block: the embedding comes first, and is tied to the head."""

    def __init__(self, width=512, words=600):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def made():
    torch.manual_seed(0)
    return Tied()


def batch(step):
    return torch.randint(0, 600, (1, 8), generator=torch.Generator().manual_seed(step))


def begin(of, folder, resume=False, **options):
    session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(of)
    return session, session.optimizer(torch.optim.AdamW, options=EngineOptions(**options), **SETTINGS)


def train(of, optimizer, steps):
    for step in steps:
        of(batch(step)).backward()
        optimizer.step()


def weights_of(session):
    return {name: values.clone() for name, values in session.engine.read_weights()}


VERSIONS = {"two": {"versions": 2}, "one, with redo": {"versions": 1}, "one": {"versions": 1, "redo": False}}


@pytest.mark.parametrize("options", VERSIONS.values(), ids=VERSIONS)
def test_tied_states_larger_than_the_spare_space_are_restored(tmp_path, options):
    ours = made()
    session, optimizer = begin(ours, tmp_path / "first", **options)
    train(ours, optimizer, range(2))
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in ours.state_dict().items()}
    train(ours, optimizer, [2])
    expected = weights_of(session)
    session.close()

    again = made()
    again.load_state_dict(weights)
    session, optimizer = begin(again, tmp_path / "second", **options)
    assert max(unit.numel for unit in session.engine.layout.units) * 4 > 2 << 20
    before = session.engine.transferred[1]
    optimizer.load_state_dict(saved)
    written = session.engine.transferred[1] - before
    assert written <= 1.05 * sum(session.engine.layout.nbytes) + (1 << 20)  # each tensor once
    train(again, optimizer, [2])
    found = weights_of(session)
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    session.close()


def test_states_can_be_loaded_repeatedly_during_a_run(tmp_path):
    ours = made()
    session, optimizer = begin(ours, tmp_path / "run", versions=2)
    train(ours, optimizer, range(1))
    first = {"state": optimizer.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    for _ in range(3):  # the free space does not shrink
        optimizer.load_state_dict(first)
        train(ours, optimizer, range(1, 3))
    assert session.steps == 3
    session.close()


def test_a_state_of_another_shape_is_refused_before_anything_moves(tmp_path):
    ours = made()
    session, optimizer = begin(ours, tmp_path / "run")
    train(ours, optimizer, range(1))
    before, saved = weights_of(session), optimizer.state_dict()
    saved["state"][2]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\), and the parameter"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(values, before[name]) for name, values in weights_of(session).items())
    session.close()


class FailingCommit:
    """An EIO in one commit of the store."""

    def __init__(self, store):
        self._store, self._stock = store, store.commit
        store.commit = self

    def __call__(self, facts):
        self._store.commit = self._stock
        raise StorageError("commit", "store", 0, 1, 0, errno.EIO, "Input/output error")


def test_uncommitted_step_is_not_counted(tmp_path):
    ours, theirs = made(), made()
    session, optimizer = begin(ours, tmp_path / "run", versions=2)
    reference = AdamW(theirs.parameters(), **SETTINGS)
    train(ours, optimizer, range(1))
    FailingCommit(session.engine.state_store)
    with pytest.raises(StorageError):
        train(ours, optimizer, [1])
    assert set(session.engine.steps.values()) == {1}
    train(ours, optimizer, [2])
    for step in (0, 2):
        reference.zero_grad()
        theirs(batch(step)).backward()
        reference.step()
    found = weights_of(session)
    for name, values in theirs.named_parameters():
        assert torch.equal(found[name], values), name
    session.close()


def test_parameters_frozen_for_one_step_train_as_in_memory(tmp_path):
    ours, theirs = made(), made()
    session, optimizer = begin(ours, tmp_path / "run", zero_missing=False)
    reference = AdamW(theirs.parameters(), **SETTINGS)
    for step in range(3):
        for of in (ours, theirs):
            of.layers[1].requires_grad_(step != 1)
        train(ours, optimizer, [step])
        reference.zero_grad()
        theirs(batch(step)).backward()
        reference.step()
    found = weights_of(session)
    for name, values in theirs.named_parameters():
        assert torch.equal(found[name], values), name
    session.close()

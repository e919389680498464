"""An update in backward waits while backward still computes with the weights that it changes, and only then."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memascend.engine.job_thread import JobThread
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.updates import Updates
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW

WIDTH, WORDS, PIECE = 256, 64, 1 << 16  # a matrix of WIDTH x WIDTH is a piece
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Usual(nn.Module):
    """A transformer's block, of several pieces."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Detaching(nn.Module):
    """Its first product has no gradient of the weight, which is a piece of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = F.linear(self.first(x), self.shared.weight.detach()).tanh()
        return x + self.shared(x)


class BiasFirst(nn.Module):
    """The gradient of the bias comes before backward needs a recomputed tensor, which depends on the bias."""

    def __init__(self):
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gated = x * (self.linear(x) + self.bias).detach().sigmoid()
        return gated + (self.linear(x) + self.bias)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def made(block, dtype=torch.float32):
    torch.manual_seed(0)
    return Model(block).to(dtype)


def batch(step):
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))


def begin(of, folder, **options):
    session = streaming(folder, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(of)
    return session, session.optimizer(
        torch.optim.AdamW, options=EngineOptions(piece_elements=PIECE, **options), **SETTINGS
    )


@pytest.fixture
def at_once(monkeypatch):
    """Let each update end before backward goes on: otherwise it is a race."""
    monkeypatch.setattr(JobThread, "submit", JobThread.run)


@pytest.mark.parametrize("zero_missing", [False, True])
@pytest.mark.parametrize("block", [Usual, Detaching, BiasFirst])
def test_backward_never_computes_with_updated_weights(tmp_path, at_once, block, zero_missing):
    ours, theirs = made(block), made(block)
    session, streamed = begin(ours, tmp_path / "run", zero_missing=zero_missing)
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    for step in range(2):
        found, expected = ours(batch(step)), theirs(batch(step))
        assert found.item() == expected.item()
        for loss, owner in ((found, streamed), (expected, optimizer)):
            loss.backward()
            owner.step()
            owner.zero_grad()
    found = {name: values.clone() for name, values in session.engine.read_weights()}
    for name, values in theirs.named_parameters():
        assert torch.equal(found[name], values), name
    session.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_of_a_usual_model_wait_for_nothing(tmp_path, monkeypatch, dtype):
    answers, begun = [], []
    stock, complete = UnitWeights.is_shared, Updates._complete

    def is_shared(self, unit, piece):
        answers.append((piece.key, stock(self, unit, piece)))
        return answers[-1][1]

    def noted(self, piece, **how):
        begun.append(piece.key)
        complete(self, piece, **how)

    monkeypatch.setattr(UnitWeights, "is_shared", is_shared)
    monkeypatch.setattr(Updates, "_complete", noted)
    ours = made(Usual, dtype)
    session, optimizer = begin(ours, tmp_path / "run", zero_missing=False)
    for step in range(2):
        ours(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pieces = [piece.key for piece in session.engine.layout.pieces]
    session.close()
    assert len(pieces) > 3 * 4  # several in each block
    assert sorted(begun) == sorted(2 * pieces)
    assert begun == [key for key, _ in answers]  # as their gradients came, and not at the end of a visit
    assert not [key for key, shared in answers if shared]

"""Gradual unfreezing trains as in memory, bit by bit; what is frozen after the optimizer was made stays unchanged."""

import pytest
import torch
from torch import nn

from memascend import EngineOptions, NotStreamable, streaming
from memascend.ops.adamw import AdamW
from tests import loops

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def made(dtype=torch.float32, vocabulary=50):
    torch.manual_seed(0)
    model = Model(vocabulary).to(dtype)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def train(model, optimizer, steps):
    """Train from the last layer to the first, one more part in each step."""
    parts = [model.norm, model.layers[2], model.layers[1].down, model.layers, model.embed]

    def loss_of(step):
        for part in parts[:step]:
            part.requires_grad_(True)
        return model(torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step)))

    return loops.train(loss_of, optimizer, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"wait": True}, {"versions": 1}, {"arm": "none"}], ids=str)
def test_gradual_unfreezing_trains_as_in_memory_even_after_resume(tmp_path, options, dtype):
    ours, theirs, again = made(dtype), made(dtype), made(dtype)
    plain = AdamW(theirs.parameters(), lr=1e-2)
    expected = train(theirs, plain, range(6))
    chosen = EngineOptions(unfreezes=True, **options)
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        found = train(ours, session.optimizer(torch.optim.AdamW, lr=1e-2, options=chosen), range(3))
        assert not any(parameter.requires_grad for parameter in ours.embed.parameters())
    with streaming(tmp_path / "states", resume=True) as session:
        session.hook(again)
        optimizer = session.optimizer(torch.optim.AdamW, again.parameters(), lr=1e-2, options=chosen)
        assert found + train(again, optimizer, range(3, 6)) == expected
        loops.assert_equal(again.state_dict(), theirs.state_dict())
        kept, steps = (
            {number: int(state["step"]) for number, state in each.state_dict()["state"].items()}
            for each in (optimizer, plain)
        )
        assert kept == steps
        assert {1, 2, 3, 4, 5, 6} == set(steps.values())


def test_sliced_matrix_stays_unchanged_while_frozen(tmp_path):
    """Slices are summed in another order than in memory, so their values are not compared."""
    ours = made(vocabulary=5000)
    before = {name: values.clone() for name, values in ours.state_dict().items()}
    ours.head.requires_grad_(False)
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, unfreezes=True)
        assert {"embed", "head"} <= set(session.engine.units.matrices)
        train(ours, optimizer, range(1, 5))
        found = ours.state_dict()
        assert not torch.equal(found["norm.weight"], before["norm.weight"])
        assert torch.equal(found["embed.weight"], before["embed.weight"])
        assert torch.equal(found["head.weight"], before["head.weight"])
        ours.head.requires_grad_(True)
        train(ours, optimizer, [5])
        assert (session.engine.steps["head.weight"], session.engine.steps["norm.weight"]) == (1, 5)
        assert not torch.equal(ours.state_dict()["embed.weight"], before["embed.weight"])


def test_unannounced_unfreezing_is_refused_with_the_option_to_set(tmp_path):
    ours = made()
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        with pytest.raises(NotStreamable, match=r"norm\.weight was frozen when .*\(unfreezes=True\)"):
            train(ours, optimizer, range(2))

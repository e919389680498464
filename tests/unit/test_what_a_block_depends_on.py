"""Backward recomputes a block with all that its forward pass depended on, or names what is gone."""

import random
import types

import numpy
import pytest
import torch
from torch import nn

from memascend import EngineOptions, streaming
from memascend.engine.errors import NotStreamable
from memascend.engine.module_state import ModuleState, ValuesAreGone
from memascend.ops.adamw import AdamW

WIDTH = 8


class Block(nn.Module):
    """Two experts, of which `kind` chooses one, or mixes them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.chosen, self.temperature = kind, 0, 1.0
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("unused", torch.ones(()))

    def forward(self, x):
        if self.kind == "python":
            h = self.experts[random.random() < 0.5](x)
        elif self.kind == "numpy":
            h = self.experts[0](x) * torch.tensor(numpy.random.rand(WIDTH)).float()
        elif self.kind == "generator":
            h = self.experts[0](x) * torch.rand(WIDTH, generator=self.generator)
        else:
            h = nn.functional.dropout(self.experts[self.chosen](x), 0.2, self.training)
        return x + (h * self.scale * self.temperature).tanh()


def blocks(kind=""):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(kind) for _ in range(3)])


def drawn(of, optimizer):
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = of(torch.randn(4, WIDTH)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, random.random(), numpy.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize("kind", ["python", "numpy", "generator"])
def test_random_numbers_of_any_generator_repeat_in_recomputation(tmp_path, kind):
    ours, theirs = blocks(kind), blocks(kind)
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        assert drawn(ours, session.optimizer(torch.optim.AdamW, lr=0.1)) == drawn(
            theirs, AdamW(theirs.parameters(), lr=0.1)
        )


def attribute(block, value):
    block.temperature = value


def new_buffer(block, value):
    block.scale = torch.tensor(value)


def expert(block, value):
    block.chosen = int(value > 1)


def mode(block, value):
    block.train(value > 1)


def two_views(of, optimizer, change):
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        x, parts = torch.randn(4, WIDTH), []
        for value in (1.0, 3.0):
            for block in of:
                change(block, value)
            parts.append(of(x))
        loss = (parts[0] - 0.5 * parts[1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), of[0].temperature, of[0].scale.item(), of[0].chosen, of[0].training))
    return losses


@pytest.mark.parametrize("change", [attribute, new_buffer, expert, mode], ids=lambda change: change.__name__)
def test_backward_uses_the_state_of_its_own_forward_pass(tmp_path, change):
    ours, theirs = blocks(), blocks()
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        found = two_views(ours, session.optimizer(torch.optim.AdamW, lr=0.1), change)
        assert found == two_views(theirs, AdamW(theirs.parameters(), lr=0.1), change)


def test_buffer_changed_in_place_before_backward_is_refused(tmp_path):
    ours = blocks()
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        session.optimizer(torch.optim.AdamW, lr=0.1)
        loss = ours(torch.ones(4, WIDTH)).sum()
        ours[1].scale.fill_(2.0)
        with pytest.raises(
            NotStreamable, match=r"1 has a buffer.*changed in place between the forward pass and backward"
        ):
            loss.backward()


def test_state_keeps_only_changed_values_and_reports_lost_ones():
    module = Block("")
    state = ModuleState([module])
    module.scale.fill_(5.0)
    module.temperature = 2.0
    state.forget_unchanged()
    module.scale.fill_(7.0)
    state.restore()
    assert (module.scale.item(), module.temperature) == (1.0, 1.0)
    module.unused.fill_(3.0)
    with pytest.raises(ValuesAreGone, match="float32"):
        state.restore()


class Numbered(nn.Module):
    """A model whose object tells its blocks which one they are."""

    def __init__(self, context):
        super().__init__()
        self.context, self.layers = context, nn.ModuleList(Listener(context) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if isinstance(self.context, dict):
                self.context["number"] = number
            else:
                self.context.number = number
            x = layer(x)
        return x


class Listener(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context, self.even, self.odd = context, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        number = self.context["number"] if isinstance(self.context, dict) else self.context.number
        return x + (self.odd if number % 2 else self.even)(x).tanh()


@pytest.mark.parametrize("context", [dict, types.SimpleNamespace], ids=["a dict", "an object"])
def test_values_that_forward_passes_to_blocks_are_kept_per_block(tmp_path, context):
    torch.manual_seed(0)
    ours = Numbered(context())
    torch.manual_seed(0)
    theirs = Numbered(context())
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        assert drawn(ours, session.optimizer(torch.optim.AdamW, lr=0.1)) == drawn(
            theirs, AdamW(theirs.parameters(), lr=0.1)
        )


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Shift() for _ in range(3))

    def forward(self, x):
        stream = self.first(x)
        for layer in self.layers:
            stream += layer(stream)
        return stream


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear((x + self.shift).tanh())


def test_input_changed_in_place_is_refused_except_on_the_tier(tmp_path):
    torch.manual_seed(0)
    ours, theirs = AddsInPlace(), AddsInPlace()
    theirs.load_state_dict(ours.state_dict())
    with streaming(tmp_path / "device") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=0.1, options=EngineOptions(checkpoints="device"))
        with pytest.raises(
            NotStreamable, match=r"layers\.\d that waits in memory was changed in place.*checkpoints='tier'"
        ):
            ours(torch.ones(4, WIDTH)).sum().backward()
        optimizer.zero_grad()
        saved = ours.state_dict()
    assert all(torch.equal(values, saved[name]) for name, values in theirs.state_dict().items())
    again = AddsInPlace()
    again.load_state_dict(theirs.state_dict())
    with streaming(tmp_path / "tier") as session:
        session.hook(again)
        found = drawn(again, session.optimizer(torch.optim.AdamW, lr=0.1))
        assert found == drawn(theirs, AdamW(theirs.parameters(), lr=0.1))

"""Parameters that share memory with others, and those that a forward pass changes, are refused by name."""

import copy

import pytest
import torch
from torch import nn

from memascend import NotStreamable, streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator

WIDTH = 8


class Model(nn.Module):
    def __init__(self, block=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
        self.layers = nn.ModuleList((block or Block)() for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), ids)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


def tied_by_data(model):
    model.head.weight.data = model.embedding.weight.data


def tied_by_data_in_blocks(model):
    model.layers[2].linear.weight.data = model.layers[0].linear.weight.data


def seen_by_a_buffer(model):
    model.layers[1].register_buffer("copy", model.layers[1].linear.weight.detach())


def seen_by_an_attribute(model):
    model.transposed = model.embedding.weight.detach().t()[2:5]


def cut_out_of_one_memory(model):
    memory = torch.randn(2 * WIDTH)
    model.layers[0].linear.bias.data, model.layers[1].linear.bias.data = memory[:WIDTH], memory[WIDTH:]


def begin(folder, model, **options):
    session = streaming(folder, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False), **options)
    session.hook(model)
    return session, session.optimizer(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("share", [tied_by_data, tied_by_data_in_blocks, seen_by_a_buffer, seen_by_an_attribute])
def test_parameter_sharing_memory_is_refused_before_anything_moves(tmp_path, share):
    model = Model()
    share(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotStreamable, match="share memory") as refused:
        begin(tmp_path / "session", model)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "session").exists()
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_old_spectral_norm_is_refused_naming_its_replacement(tmp_path):
    model = Model()
    nn.utils.spectral_norm(model.layers[1].linear)
    with pytest.raises(NotStreamable, match=r"share memory.* use torch\.nn\.utils\.parametrizations\.spectral_norm$"):
        begin(tmp_path / "session", model)


def test_adjacent_parameters_in_one_buffer_and_tied_parameters_train(tmp_path):
    model = Model()
    cut_out_of_one_memory(model)
    model.head.weight = model.embedding.weight
    session, optimizer = begin(tmp_path / "session", model)
    model(torch.arange(8)).backward()
    optimizer.step()
    session.close()
    session, _ = begin(tmp_path / "session", model, resume=True)  # its parameters are empty
    session.close()


class Normalized(Block):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.copy_(nn.functional.normalize(self.linear.weight, dim=1))
        return super().forward(x)


class Replaced(Block):
    def forward(self, x):
        self.linear.weight.data = nn.functional.normalize(self.linear.weight.data, dim=1)
        return super().forward(x)


class ReplacedForAMoment(Block):
    def forward(self, x):
        kept = self.linear.weight.data
        self.linear.weight.data = nn.functional.normalize(kept, dim=1)
        y = super().forward(x)
        self.linear.weight.data = kept
        return y


class NormalizedHead(nn.Linear):
    def forward(self, x):
        self.weight.data = nn.functional.normalize(self.weight.data, dim=1)
        return super().forward(x)


def with_head():
    model = Model()
    model.head = NormalizedHead(WIDTH, 16, bias=False)
    return model


@pytest.mark.parametrize("graph", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", [lambda: Model(Normalized), lambda: Model(Replaced), with_head])
def test_weights_that_a_forward_pass_changes_are_refused_by_name(tmp_path, make, graph):
    model = make()
    session, _ = begin(tmp_path / "session", model)
    with torch.set_grad_enabled(graph), pytest.raises(NotStreamable, match=r"weight is changed in the forward pass"):
        model(torch.arange(8))
    session.close()


def test_weights_replaced_only_during_forward_give_the_in_memory_loss(tmp_path):
    torch.manual_seed(0)
    ours = Model(ReplacedForAMoment)
    theirs = copy.deepcopy(ours)
    session, optimizer = begin(tmp_path / "session", ours)
    losses = [model(torch.arange(8)) for model in (ours, theirs)]
    assert losses[0].item() == losses[1].item()
    losses[0].backward()
    optimizer.step()
    session.close()

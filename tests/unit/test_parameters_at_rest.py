"""Outside its module's forward pass a streamed parameter has only a type
and a shape; reading its values fails in one line."""

import pytest
import torch
from torch import nn

from memascend import NotStreamable, streaming
from memascend.ops.adamw import AdamW


class Block(nn.Module):
    """A block that inspects its weights' values, as some modules do."""

    def __init__(self, width=16):
        super().__init__()
        self.linear, self.gate = nn.Linear(width, width), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("norm", torch.zeros(()))

    def forward(self, x):
        self.norm.copy_(self.linear.weight.data.norm())
        decay = self.linear.weight.detach().clone().square().mean()
        return x + torch.tanh(self.linear(x)) * self.gate + decay


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def made():
    torch.manual_seed(0)
    return Model()


def batch(step):
    return torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(step))


LOOKS = {
    "norm": lambda p, _: p.norm(),
    "torch.norm": lambda p, _: torch.norm(p),
    "a norm of data": lambda p, _: p.data.norm(),
    "an average over data": lambda p, _: torch.zeros_like(p).add_(p.data, alpha=0.1),
    "a copy": lambda p, _: p.detach().clone(),
    "another tensor's copy_": lambda p, _: torch.zeros(p.shape).copy_(p),
    "numpy": lambda p, _: p.detach().numpy(),
    "tolist": lambda p, _: p.tolist(),
    "an element": lambda p, _: p[0],
    "a change": lambda p, _: p.data.mul_(0.9),
    "an initialization": lambda p, _: nn.init.normal_(p),
    "parameters_to_vector": lambda _, model: nn.utils.parameters_to_vector(model.parameters()),
    "foreach": lambda _, model: torch._foreach_norm(list(model.parameters())),
    "a penalty": lambda _, model: sum(p.square().sum() for p in model.parameters()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_reading_values_outside_forward_fails_with_a_one_line_message(tmp_path, look):
    ours = made()
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(2):
            with pytest.raises(
                NotStreamable, match=r"outside of its module's forward pass: .*state_dict\(\)"
            ) as refused:
                LOOKS[look](ours.layers[1].linear.weight, ours)
            assert "\n" not in str(refused.value)
            ours(batch(step)).backward()
            optimizer.step()


def test_dtype_shape_and_device_of_streamed_parameters_stay_available(tmp_path):
    ours = made()
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        session.optimizer(torch.optim.AdamW, lr=1e-2)
        weight = ours.layers[0].linear.weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.numel(), weight.dim(), weight.dtype) == ((16, 16), 256, 2, torch.float32)
        assert weight.is_floating_point()
        assert weight.requires_grad
        assert (weight.data.shape, weight.detach().device) == ((16, 16), torch.device("cpu"))
        assert torch.equal(torch.zeros_like(weight), torch.zeros(16, 16))
        assert torch.equal(weight.new_ones(2), torch.ones(2))
        assert weight in {weight: 1}
        assert repr(weight) == "Parameter((16, 16), torch.float32, on the SSD)"


def test_blocks_read_own_weights_and_state_dict_average_matches_memory(tmp_path):
    ours, theirs = made(), made()
    plain = AdamW(theirs.parameters(), lr=1e-2)
    averages = [{name: values.clone() for name, values in theirs.state_dict().items()} for _ in range(2)]
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            for model, steps, average in ((ours, optimizer, averages[0]), (theirs, plain, averages[1])):
                model(batch(step)).backward()
                steps.step()
                steps.zero_grad()
                for name, values in model.state_dict().items():
                    average[name].lerp_(values, 0.1)
    for name, values in averages[1].items():
        assert torch.equal(averages[0][name], values), name


def test_parameters_regain_their_own_class_after_the_session(tmp_path):
    ours = made()
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        session.optimizer(torch.optim.AdamW, lr=1e-2)
        assert type(ours.head.weight) is not nn.Parameter
        weights = ours.state_dict()
    assert {type(parameter) for parameter in ours.parameters()} == {nn.Parameter}
    ours.load_state_dict(weights, assign=True)
    ours.head.weight.norm()

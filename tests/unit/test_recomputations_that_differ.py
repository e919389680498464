"""A block whose recomputation would not repeat its forward pass is refused in one line, whatever it depends on."""

import pytest
import torch
from torch import nn

from memascend import streaming
from memascend.engine.samples import ELEMENTS, Samples, is_compared

WIDTH = 16
SHARED = torch.Generator()


class Counts:
    calls = 0


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, own=None):
        h = self.up(x)
        if self.kind == "a generator of the module":
            h = h * (torch.rand(h.shape, generator=SHARED) > 0.5)
        elif self.kind == "a generator among the arguments":
            h = h * (torch.rand(h.shape, generator=own) > 0.5)
        elif self.kind == "a counter of a class":
            Counts.calls += 1
            h = h * Counts.calls
        elif self.kind == "the last product's input":
            Counts.calls += 1
            return x + self.down(h.tanh() * Counts.calls)
        elif self.kind == "an order drawn at its end":
            return (x + self.down(h).tanh())[torch.randperm(len(x), generator=SHARED)]
        return x + self.down(h).tanh()


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([Block(kind) for _ in range(3)])
        self.kind, self.own = kind, torch.Generator().manual_seed(1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.own) if self.kind == "a generator among the arguments" else layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        "a generator of the module",
        "a generator among the arguments",
        "a counter of a class",
        "the last product's input",
        "an order drawn at its end",
    ],
)
def test_unrepeatable_recomputation_is_refused_in_the_first_backward_pass(tmp_path, kind, accumulate):
    torch.manual_seed(0)
    ours = Model(kind)
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=0.1)
        optimizer.zero_grad()
        loss = ours(torch.randn(12, WIDTH))
        with pytest.raises(RuntimeError, match=r"^layers\.2 computes something else in its recomputation: .*other val"):
            loss.backward()


def of(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def differ(was, now):
    samples = Samples()
    samples.add(was)
    return samples.differ(0, now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_rounding_differences_are_ignored_and_mask_differences_are_found(dtype):
    was = torch.randn(64, 33, 7, dtype=dtype)
    assert not differ(was, was.clone())
    assert not differ(was, was * (1 + (1e-6 if dtype in (torch.float32, torch.complex64) else 1e-3)))
    assert differ(was, was * (torch.rand(64, 33, 7) > 0.1))
    assert differ(was, was.mT.contiguous().mT * 1.1)


def test_nonfinite_values_match_only_at_the_same_positions():
    was = of(1.0, float("nan"), float("inf"))
    assert not differ(was, was.clone())
    assert differ(was, of(1.0, 2.0, float("inf")))


def test_masks_and_indices_are_compared_but_bytes_are_not():
    for dtype in (torch.bool, torch.int32, torch.int64):
        assert differ(torch.ones(9, dtype=dtype), torch.zeros(9, dtype=dtype))
    assert not differ(torch.ones(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8))


def test_tensors_after_a_rounding_difference_are_not_compared():
    samples, values = Samples(), torch.randn(100)
    samples.add(values)
    samples.add(values > 0)
    assert not samples.differ(0, values * (1 + 1e-6))
    assert not samples.differ(1, values < 0)


def test_samples_spread_over_large_tensors_and_cover_small_ones():
    for shape in [(ELEMENTS,), (3, 5), ()]:
        was = torch.zeros(shape)
        for place in range(was.numel()):
            now = was.clone()
            now.view(-1)[place] = 1.0
            assert differ(was, now)
    was = torch.zeros(128, 1024)
    for part in (slice(0, 16), slice(112, 128)):
        now = was.clone()
        now[part] = 1.0
        assert differ(was, now)
    for part in (slice(0, 128), slice(896, 1024)):
        now = was.clone()
        now[:, part] = 1.0
        assert differ(was, now)


def test_compared_passes_become_rarer():
    assert [n for n in range(1, 300) if is_compared(n)] == [1, 4, 16, 64, 256]

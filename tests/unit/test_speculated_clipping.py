"""Clipping whose steps do not wait for the norm: bytes, and the bits of waiting, after repeated steps."""

import random

import numpy
import pytest
import torch
from torch import nn

from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.speculation import Speculation, break_even

HIDDEN, STEPS = 64, 50
LOUD = range(8, STEPS, 7)  # steps with a loss, and thus gradients, 1000 times as large
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


class Noisy(nn.Module):
    """Draws from every generator, and counts its passes in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        x = nn.functional.dropout(self.norm(self.inner(x)), 0.1)
        return x * (1 + 0.1 * random.random()) + 0.1 * float(numpy.random.rand()) * self.passes


def model_of(noisy=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    blocks = [Noisy() if noisy else nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


class Loop:
    """A training of `model`: its losses and norms, step by step."""

    def __init__(self, folder, model, repeatable=True, order="vertical", **options):
        self.order, self.repeatable, self.made = order, repeatable, []
        self.model, groups = model, [{"params": list(model.parameters()), **SETTINGS}]
        options = EngineOptions(**{"clip": 1.0, "versions": 2, **options})
        self.engine = StreamingEngine.start(model, folder, groups, options)
        self.moved, self.speculated = [], []  # bytes moved, and whether it was speculated, for each step

    def step(self, loud=False, scale=1.0):
        number, before, speculated = len(self.made), self.engine.transferred, self.engine.speculation.speculated
        generator = torch.Generator().manual_seed(number)
        count = self.engine.options.accumulate
        batches = torch.randn(count, 8, HIDDEN, generator=generator).to(next(self.model.parameters()).dtype)
        self.engine.scale = scale

        def passes(batch):
            loss = self.model(batch).float().square().mean() * (1000.0 if loud else 0.01) / count
            (loss * scale).backward()
            return loss.item()

        losses = self.engine.accumulate(passes, list(batches), order=self.order, repeatable=self.repeatable)
        norm = self.engine.finish_step(keep=False)
        self.engine.keep({})
        self.made.append((losses, norm))
        self.speculated.append(self.engine.speculation.speculated > speculated)
        self.moved.append(sum(self.engine.transferred) - sum(before))

    def seed(self):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return self

    def run(self, steps=STEPS, loud=LOUD):
        self.seed()
        for number in range(steps):
            self.step(number in loud)
        return self

    def left(self):
        """Return all results of the training, and the next numbers of all generators."""
        weights = {name: values.clone() for name, values in self.engine.read_weights()}
        states = {name: self.engine.read_states(name) for name in self.engine.steps}
        buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
        passes = [module.passes for module in self.model.modules() if isinstance(module, Noisy)]
        self.engine.close()
        return weights, states, buffers, drawn, passes


def assert_equal(ours, theirs):
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_equal(ours[key], theirs[key])
    elif isinstance(ours, tuple):
        for each, other in zip(ours, theirs, strict=True):
            assert_equal(each, other)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    ("noisy", "options"),
    [
        (False, {"accumulate": 3, "states": torch.bfloat16}),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(False, {"accumulate": 2, "order": "horizontal"}, marks=pytest.mark.slow),
        pytest.param(True, {"states": torch.int8}, marks=pytest.mark.slow),
        pytest.param(False, {"arm": "naive", "zero_missing": True}, marks=pytest.mark.slow),
    ],
    ids=["vertical", "fp32 states", "horizontal", "8 bits", "naive"],
)
def test_speculation_with_repeated_steps_matches_waiting_bit_for_bit(tmp_path, noisy, options):
    ours = Loop(tmp_path / "ours", model_of(noisy), **options).run()
    found = ours.left()
    theirs = Loop(tmp_path / "theirs", model_of(noisy), repeatable=False, **options).run()
    assert ours.engine.speculation.done_again >= 5
    assert theirs.engine.speculation.speculated == 0
    assert ours.made == theirs.made
    assert_equal(found, theirs.left())


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}], ids=["one pass", "vertical"])
def test_unclipped_step_moves_as_many_bytes_as_without_clipping(tmp_path, options):
    moved = {}
    for way, more in (("without", {"clip": 0.0}), ("speculated", {}), ("waiting", {"repeatable": False})):
        moved[way] = Loop(tmp_path / way, model_of(False), **options, **more).run(4, ()).moved[-1]
    assert moved["speculated"] <= 1.02 * moved["without"]
    assert moved["waiting"] > 1.15 * moved["without"]


@pytest.mark.parametrize("options", [{}, {"states": torch.bfloat16, "accumulate": 2}], ids=["one pass", "two passes"])
def test_repeated_step_moves_bytes_of_speculation_and_waiting(tmp_path, options):
    """The break-even share is derived from this."""
    more = {"order": "horizontal", **options}
    loop = Loop(tmp_path / "ours", model_of(False), **more).run(4, (3,))
    waiting = Loop(tmp_path / "waiting", model_of(False), repeatable=False, **more).run(4, ()).moved[-1]
    assert loop.engine.speculation.done_again == 1
    speculated, again = loop.moved[-2:]
    assert again == pytest.approx(speculated + waiting, rel=0.01)
    even = break_even(loop.engine.layout, loop.engine.options, input_numel=8 * HIDDEN)
    assert even == pytest.approx(1 - speculated / waiting, abs=0.01)


def test_overflow_step_is_skipped_with_or_without_speculation(tmp_path):
    """fp16, with a loss scale that overflows in some steps, and clipping in others."""

    def run(repeatable):
        loop = Loop(tmp_path / str(repeatable), model_of(False, torch.float16), repeatable=repeatable).seed()
        for number in range(12):
            loop.step(loud=number == 9, scale=1e11 if number in (0, 4, 7) else 8.0)
        return loop, loop.left()

    (ours, found), (theirs, expected) = run(True), run(False)
    assert ours.speculated[:10] == [False] * 3 + [True] * 7  # from the third step that was not skipped on
    assert ours.engine.speculation.done_again == 1
    assert [norm is None for _, norm in ours.made] == [number in (0, 4, 7) for number in range(12)]
    assert ours.made == theirs.made
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"versions": 1}),
        (torch.bfloat16, {"versions": 1, "redo": False}),
        (torch.bfloat16, {"arm": "none"}),
        (torch.bfloat16, {"wait": True}),
        (torch.float32, {"gradients": torch.bfloat16}),
        (torch.bfloat16, {"clip": 0.0}),
    ],
    ids=["one version", "torn", "after backward", "asked for", "rounded", "not clipped"],
)
def test_gradients_wait_where_speculation_is_impossible(tmp_path, dtype, options):
    loop = Loop(tmp_path / "ours", model_of(False, dtype), **options).run(5, ())
    theirs = Loop(tmp_path / "theirs", model_of(False, dtype), repeatable=False, **options).run(5, ())
    assert loop.engine.speculation.speculated == 0
    assert break_even(loop.engine.layout, loop.engine.options) == 0.0
    assert loop.moved[2:] == pytest.approx(theirs.moved[2:], rel=0.001)


def test_generator_object_in_the_model_prevents_speculation(tmp_path):
    """There is no way to restore it."""
    model = model_of(False)
    model[0].numbers = iter(range(100))
    loop = Loop(tmp_path / "ours", model).run(5, ())
    assert loop.engine.speculation.speculated == 0


def decisions(clipped, layout_of):
    speculation = Speculation(layout_of, EngineOptions(clip=1.0), {})
    made = []
    for each in clipped:
        made.append(speculation.pays(1))
        speculation.saw(clipped=each)
    return made, speculation


@pytest.fixture(name="layout")
def _layout(tmp_path):
    loop = Loop(tmp_path / "layout", model_of(False))
    yield loop.engine.layout
    loop.engine.close()


def test_speculation_begins_after_unclipped_steps_and_ends_after_clipped_ones(layout):
    calm, _ = decisions([False] * 6, layout)
    assert calm == [False, False, True, True, True, True]
    early, _ = decisions([True] * 10 + [False] * 40, layout)
    begins = early.index(True)
    assert 20 < begins < 45
    assert all(early[begins:])
    rare, _ = decisions([False] * 20 + [True] + [False] * 5, layout)
    assert all(rare[2:])
    late, _ = decisions([False] * 20 + [True] * 6, layout)
    assert late[20:] == [True, True, True, False, False, False]


def test_expected_share_of_clipped_steps_is_carried_over(layout):
    _, before = decisions([True, False, False, True, False], layout)
    after = Speculation(layout, EngineOptions(clip=1.0), {})
    after.take_over(before.facts())
    assert after.expected == before.expected != Speculation(layout, EngineOptions(clip=1.0), {}).expected


def test_each_decision_is_reported_once_with_its_reason(layout):
    _, speculation = decisions([False] * 20 + [True] * 6, layout)
    waits, begins, ends = speculation.take_news()
    assert "gradients wait for their norm: 50% of the steps are expected to be clipped" in waits
    assert "gradients are used before their norm is known" in begins
    assert "gradients wait for their norm" in ends
    assert speculation.take_news() == []

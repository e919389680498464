"""`p.grad` of a streamed model, and every way of clipping with it: as in torch, or refused in one line."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import (  # imported before any model is streamed, as most scripts do
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

from memascend import EngineOptions, streaming
from memascend.engine.adam_settings import AdamSettings
from memascend.engine.errors import NotStreamable
from memascend.engine.gradient_views import stored_gradient
from memascend.engine.in_place_update import Redo
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin


def train(of, optimizer, data, between):
    found = []
    for ids in data:
        optimizer.zero_grad()
        of(ids).backward()
        found.append(between(of))
        optimizer.step()
    return found


def by_norm_in_two_calls(of):
    norm = get_total_norm([p.grad for p in of.parameters() if p.grad is not None])
    clip_grads_with_norm_(of.parameters(), 0.1, norm)
    return norm


def by_accelerate(of):
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_(of.parameters(), 0.1)


CLIPPERS = {
    "early-bound": lambda of: clip_grad_norm_(of.parameters(), 0.1),
    "looked up": lambda of: torch.nn.utils.clip_grad_norm_(of.parameters(), 0.1),
    "foreach": lambda of: clip_grad_norm_(list(of.parameters()), 0.1, foreach=None, error_if_nonfinite=True),
    "two calls": by_norm_in_two_calls,
    "accelerate": by_accelerate,
    "a part": lambda of: clip_grad_norm_(of.layers.parameters(), 0.05),
    "one by one": lambda of: torch.stack([clip_grad_norm_(p, 0.02) for p in of.parameters()]),
}


@pytest.mark.parametrize("clip", CLIPPERS.values(), ids=CLIPPERS)
def test_clipping_by_any_name_or_part_matches_torch(tmp_path, clip):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    expected = train(theirs, AdamW(theirs.parameters(), **SETTINGS), data, clip)
    for found, norm in zip(train(ours, optimizer, data, clip), expected, strict=True):
        assert torch.allclose(found, norm, rtol=1e-5)
    for name, values in session.engine.read_weights():
        assert torch.allclose(values, dict(theirs.named_parameters())[name], rtol=1e-4, atol=1e-6), name
    session.close()


def scaled(of):
    for number, p in enumerate(of.parameters()):
        p.grad.mul_(torch.tensor(1 / (1 + number)))
        if number % 2:
            p.grad *= 0.3


def test_loop_that_scales_gradients_trains_bitwise_as_in_memory(tmp_path):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    train(ours, optimizer, data, scaled)

    def the_same(of):  # a single factor, since a product of two rounds twice
        for number, p in enumerate(of.parameters()):
            factor = float(torch.tensor(1 / (1 + number)))
            p.grad.mul_(factor * 0.3 if number % 2 else factor)

    train(theirs, AdamW(theirs.parameters(), **SETTINGS), data, the_same)
    assert_equal(session, theirs)
    session.close()


def test_gradient_norms_match_those_of_torch(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)

    def norms(of):
        return torch.stack([p.grad.norm() for p in of.parameters() if p.grad is not None])

    expected = train(theirs, AdamW(theirs.parameters(), **SETTINGS), data, norms)
    for found, each in zip(train(ours, optimizer, data, norms), expected, strict=True):
        assert len(found) == len(list(ours.parameters()))
        assert torch.allclose(found, each, rtol=1e-5)
    session.close()


REFUSED = {
    "by value": lambda of: clip_grad_value_(of.parameters(), 0.1),
    "clamp": lambda of: [p.grad.clamp_(-1, 1) for p in of.parameters()],
    "another norm": lambda of: clip_grad_norm_(of.parameters(), 1.0, norm_type=float("inf")),
    "values": lambda of: [p.grad.sum() for p in of.parameters()],
    "to the host": lambda of: [p.grad.numpy() for p in of.parameters()],
    "noise": lambda of: [p.grad.add_(torch.randn_like(p)) for p in of.parameters()],
    "a matrix of factors": lambda of: [p.grad.mul_(torch.ones(p.shape)) for p in of.parameters()],
    "its own gradient": lambda of: setattr(of.head.weight, "grad", torch.ones(1)),
    "a loss scaler": lambda of: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad for p in of.parameters()], torch.zeros(1), torch.ones(1)
    ),
}


@pytest.mark.parametrize("look", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "as they come"])
def test_unsupported_gradient_use_is_refused_and_the_step_continues(tmp_path, look, wait):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=wait)

    def refused(of):
        scaled = wait and look is REFUSED["a loss scaler"]
        message = "a GradScaler cannot scale a streamed model's gradients" if scaled else r"the gradient of [\w.]+ "
        with pytest.raises((NotStreamable, RuntimeError), match=message) as refusal:
            look(of)
        assert "\n" not in str(refusal.value)

    train(ours, optimizer, data, refused)
    train(theirs, AdamW(theirs.parameters(), **SETTINGS), data, lambda of: None)
    assert_equal(session, theirs)
    session.close()


def test_gradient_consumed_as_it_arrives_is_refused_naming_the_option(tmp_path):
    """torch would find None, clip nothing and return 0."""
    ours, data = model(), batches(1)
    session, optimizer = begin(ours, tmp_path / "run")
    assert all(p.grad is None for p in ours.parameters())
    ours(data[0]).backward()
    for look in (lambda: clip_grad_norm_(ours.parameters(), 1.0), lambda: [p.grad for p in ours.parameters()]):
        with pytest.raises(RuntimeError, match=r"consumed as they arrive.*wait=True"):
            look()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was released by the last step\(\)"):
        [p.grad for p in ours.parameters()]
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours.parameters())
    session.close()


def test_clipping_before_the_last_backward_pass_is_refused(tmp_path):
    ours, data = model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=True, accumulate=2)
    ours(data[0]).backward()
    with pytest.raises(RuntimeError, match="incomplete before the last of 2 backward passes"):
        clip_grad_norm_(ours.parameters(), 1.0)
    ours(data[1]).backward()
    assert clip_grad_norm_(ours.parameters(), 1.0) > 0
    optimizer.step()
    session.close()


def test_frozen_parameter_has_no_gradient(tmp_path):
    ours = model()
    ours.layers[1].norm.weight.requires_grad_(False)
    session, _ = begin(ours, tmp_path / "run", wait=True)
    ours(batches(1)[0]).backward()
    assert ours.layers[1].norm.weight.grad is None
    assert [p.grad is None for p in ours.parameters()].count(True) == 1
    session.close()


def test_user_hook_sees_each_gradient_as_it_arrives(tmp_path):
    ours, theirs, data, found = model(), model(), batches(1), {}
    for name, p in ours.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    session, optimizer = begin(ours, tmp_path / "run")
    ours(data[0]).backward()
    theirs(data[0]).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in theirs.named_parameters())
    optimizer.step()
    session.close()


def test_hook_that_takes_a_gradient_away_is_refused(tmp_path):
    ours = model()
    ours.norm.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    session, _ = begin(ours, tmp_path / "run")
    with pytest.raises(NotStreamable, match=r"took the gradient of norm\.weight before"):
        ours(batches(1)[0]).backward()
    session.close()


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_end_in_any_order_and_restore_torch(tmp_path, first):
    stock = torch.nn.utils.clip_grad.clip_grad_norm_
    models = [model(), model(seed=1)]
    sessions = [begin(of, tmp_path / str(n), wait=True)[0] for n, of in enumerate(models)]
    sessions[first].close()
    other = models[1 - first]
    other(batches(1)[0]).backward()
    assert clip_grad_norm_(other.parameters(), 1.0) > 0
    sessions[1 - first].close()
    assert torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_ is stock is clip_grad_norm_
    for of in models:
        assert all(type(p) is torch.nn.Parameter and p.grad is None for p in of.parameters())


def test_gradient_factors_apply_to_one_step_only(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    reference = AdamW(theirs.parameters(), **SETTINGS)
    for number, ids in enumerate(data):
        for of, made in ((ours, optimizer), (theirs, reference)):
            made.zero_grad()
            of(ids).backward()
            if number == 0:
                for p in of.parameters():
                    p.grad.mul_(0.01)
            made.step()
    assert_equal(session, theirs)
    assert all(stored_gradient(p) is None for p in ours.parameters())
    session.close()


def test_redone_step_keeps_the_gradient_factors_of_the_loop():
    class Waiting:
        def waiting_facts(self):
            return {}

    common = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    settings = [AdamSettings(step=3, **common, grad_factor=factor) for factor in (1.0, 0.25)]
    record = json.loads(json.dumps(Redo.of(Waiting(), settings, {}, []).record))
    assert Redo(record).settings(["a", "b"]) == dict(zip("ab", settings, strict=True))
    for each in record["settings"]:  # as from an earlier version
        each.pop()
    assert Redo(record).settings(["a", "b"])["b"].grad_factor == 1.0


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.chosen = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]), 0

    def forward(self, x):
        return x + self.experts[self.chosen](x)


@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
@pytest.mark.parametrize(
    "options", [{}, {"wait": True}, {"options": EngineOptions(versions=1)}], ids=["direct", "waiting", "one version"]
)
def test_zero_gradients_update_parameters_but_missing_ones_do_not(tmp_path, options, zeroes):
    """zero_grad(set_to_none=False): moments and weights decay, but only of parameters that had a gradient before."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(Experts(), Experts(), Experts())

    def train(of, optimizer):
        torch.manual_seed(1)
        for number in range(5):
            for block in of:
                block.chosen = number % 2
            (optimizer if zeroes == "optimizer" else of).zero_grad(set_to_none=number == 3)
            of(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()

    ours, theirs = made(), made()
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        train(ours, optimizer := session.optimizer(torch.optim.AdamW, lr=0.1, **options))
        train(theirs, other := AdamW(theirs.parameters(), lr=0.1))
        assert all(
            torch.equal(values, dict(theirs.named_parameters())[name]) for name, values in ours.state_dict().items()
        )
        steps = {number: int(state["step"]) for number, state in optimizer.state_dict()["state"].items()}
        assert steps == {number: int(state["step"]) for number, state in other.state_dict()["state"].items()}

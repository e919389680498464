"""Every architecture of transformers trains as in memory, bit by bit, or is refused in one line."""

import json
import os
from pathlib import Path

import pytest
import torch

from memascend import offload_activations
from memascend.engine.errors import NotStreamable
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from tests.zoo.architectures import ARCHITECTURES, MOST_USED, NotBuilt, batch

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM = 0.5
# Largest allowed relative difference of losses and weights from training in memory, with the reason.
CLOSE: dict[str, tuple[float, str]] = {}


CHOSEN = [
    pytest.param(each, id=each.id, marks=() if (each.kind, each.name) in MOST_USED else (pytest.mark.slow,))
    for each in ARCHITECTURES
]


@pytest.fixture
def note(request):
    """Return a function that writes an outcome for the page in docs when that is made (`make zoo`)."""
    folder = os.environ.get("MEMASCEND_ZOO_OUTCOMES")

    def write(architecture, column, outcome, why=""):
        if folder:
            line = {"architecture": architecture.id, "column": column, "outcome": outcome, "why": why}
            Path(folder, f"{architecture.id}.{column}.json").write_text(json.dumps(line))

    return write


def made(architecture, note, column):
    try:
        architecture.try_in_memory()
        return architecture.make()
    except NotBuilt as reason:
        note(architecture, column, "not built", str(reason))
        pytest.skip(f"not built: {reason}")


def trained_parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


def evaluated(model, number):
    model.eval()
    with torch.no_grad():
        loss = model(batch(number)).item()
    model.train()
    return loss


def clip(model):
    """Clip by a power of two: norms may differ in their last digit, and products with it are exact."""
    norms = [p.grad.norm() for p in trained_parameters(model) if p.grad is not None]
    norm = float(torch.stack([torch.as_tensor(float(each)) for each in norms]).norm())
    factor = 1.0
    while norm * factor > MAX_NORM:
        factor /= 2
    for p in trained_parameters(model):
        if p.grad is not None:
            p.grad.mul_(factor)


def steps(model, optimizer, numbers, *, accumulate):
    """Return the losses of training; accumulated steps are clipped and followed by an evaluation."""
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = model(batch(10 * number + micro))
            loss.backward()
            losses.append(loss.item())
        if accumulate > 1:
            clip(model)
        optimizer.step()
        losses.append(evaluated(model, 1000 + number))
    return losses


def begin(model, folder, *, accumulate, resume=False):
    session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(model)
    options = EngineOptions(zero_missing=False)
    return session, session.optimizer(
        torch.optim.AdamW, accumulate=accumulate, wait=accumulate > 1, options=options, **SETTINGS
    )


def same(found, expected):
    """Return whether both are equal bit by bit, with NaN in the same places."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def in_memory(architecture, accumulate):
    model = architecture.make()
    optimizer = AdamW(trained_parameters(model), **SETTINGS)
    torch.manual_seed(7)
    return model, steps(model, optimizer, range(3), accumulate=accumulate)


def streamed(architecture, folder, accumulate):
    """Train three steps, the last one with a new model as in another process."""
    model = architecture.make()
    session, optimizer = begin(model, folder, accumulate=accumulate)
    torch.manual_seed(7)
    losses = steps(model, optimizer, range(2), accumulate=accumulate)
    numbers = torch.get_rng_state()
    session.close()
    model = architecture.make()
    session, optimizer = begin(model, folder, accumulate=accumulate, resume=True)
    torch.set_rng_state(numbers)
    losses += steps(model, optimizer, range(2, 3), accumulate=accumulate)
    weights = {name: values.clone() for name, values in session.engine.read_weights()}
    session.close()
    return losses, weights


@pytest.mark.parametrize(
    "accumulate",
    [pytest.param(1, id="at once", marks=pytest.mark.slow), pytest.param(2, id="accumulated and clipped")],
)
@pytest.mark.parametrize("architecture", CHOSEN)
def test_a_streamed_architecture_trains_as_in_memory(tmp_path, note, architecture, accumulate):
    column = f"engine {accumulate}"
    made(architecture, note, column)
    note(architecture, column, "fails")
    try:
        losses, weights = streamed(architecture, tmp_path / "run", accumulate)
    except NotStreamable as refused:
        note(architecture, column, "refused", str(refused))
        if "\n" in str(refused):
            raise
        return
    model, expected = in_memory(architecture, accumulate)
    apart = [name for name, values in model.named_parameters() if values.numel() and not same(weights[name], values)]
    if same(torch.tensor(losses), torch.tensor(expected)) and not apart:
        note(architecture, column, "equal")
        return
    allowed, why = CLOSE.get(architecture.id, (0.0, ""))
    of_weights = [float(((weights[n] - p).abs().max() / p.abs().max()).detach()) for n, p in model.named_parameters()]
    worst = max(*of_weights, *(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))
    assert 0 < worst <= allowed, f"{len(apart)} parameters differ, {apart[:3]}; losses {losses}, in memory {expected}"
    note(architecture, column, "close", f"within {allowed:.0e}, {why}")


@pytest.mark.parametrize("architecture", CHOSEN)
def test_gradients_are_equal_with_activations_on_the_ssd(tmp_path, note, architecture):
    column = "activations"
    ours, theirs = made(architecture, note, column), architecture.make()
    note(architecture, column, "fails")
    for number in range(2):
        losses = []
        for model in (ours, theirs):
            torch.manual_seed(number)
            cache = {"amount": "all", "minimum_bytes": 512, "reserve_bytes": 0, "device": "cpu"}
            if model is ours:
                with offload_activations(tmp_path, **cache):
                    loss = model(batch(number))
                    loss.backward()
            else:
                loss = model(batch(number))
                loss.backward()
            losses.append(loss.item())
        assert same(*map(torch.tensor, losses))
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        assert found.grad is None or same(found.grad, expected.grad), name
    note(architecture, column, "equal")

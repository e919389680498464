"""On a GPU the engine trains, and the activation cache gives gradients, as the plain module does there, bit by bit."""

import functools
import gc
import os
import warnings

import pytest
import torch

from memascend import offload_activations
from memascend.engine.errors import NotStreamable
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import ROUNDING_SEED
from memascend.ops.adamw8 import AdamW8bit
from tests.late_device.plugin import HostAdamW, on_host
from tests.unit import test_streaming_engine as on_the_cpu
from tests.zoo import architectures, shapes
from tests.zoo.architectures import ARCHITECTURES, MOST_USED, NotBuilt

pytestmark = pytest.mark.gpu

# for reproducible products; read when the GPU is first used
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
STEPS = 3
WAYS = {
    "at once": {},
    "accumulated": {"accumulate": 2},
    "inputs on the GPU": {"checkpoints": "device"},
    "swapped": {"swap": "all"},
    "measured": {"measure": True},
    "one version": {"versions": 1},
    "one version, torn": {"versions": 1, "redo": False},
    "waiting": {"wait": True},
}


@pytest.fixture(autouse=True)
def operations_that_repeat(monkeypatch):
    """Use deterministic algorithms; where an operation has none, torch
    warns, and the test finds out whether it repeats."""
    monkeypatch.setattr("memascend.engine.swap._LEAST_BYTES", 256)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)


def trained(model, optimizer, batch, accumulate):
    """Train, and return the losses of the steps and of an evaluation after each."""
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = model(batch(10 * step + micro).cuda())
            loss.backward()
            losses.append(loss.detach().float().cpu())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(batch(1000 + step).cuda()).float().cpu())
        model.train()
    return torch.stack(losses)


def same(found, expected):
    """Return whether both are equal bit by bit, with NaN in the same places."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def on_the_gpu(make, batch, accumulate=1, kind=HostAdamW):
    """Train a model on the GPU; return it and its losses. Skips if the
    same training gives another result the second time."""
    found = []
    for _ in range(2):
        model = make().cuda()
        optimizer = kind([p for p in model.parameters() if p.requires_grad], **SETTINGS)
        found.append((model, trained(model, optimizer, batch, accumulate)))
    (model, losses), (again, other) = found
    repeats = all(same(a.detach(), b.detach()) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    if not repeats or not same(losses, other):
        pytest.skip("its operations on this GPU do not repeat")
    return model, losses


def streamed(make, batch, folder, accumulate=1, **options):
    """Return the losses and weights of a streamed model that starts in host memory."""
    model = make()
    session = streaming(folder, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(model, device="cuda")
    optimizer = session.optimizer(
        torch.optim.AdamW, accumulate=accumulate, options=EngineOptions(zero_missing=False, **options), **SETTINGS
    )
    losses = trained(model, optimizer, batch, accumulate)
    weights = {name: values.clone() for name, values in session.engine.read_weights()}
    session.close()
    return losses, weights


def assert_alike(found, model, losses):
    ours, weights = found
    assert same(ours, losses), f"losses {ours.tolist()}, on the GPU alone {losses.tolist()}"
    apart = [n for n, p in model.named_parameters() if p.numel() and not same(weights[n], p.detach().cpu())]
    assert not apart, f"{len(apart)} parameters differ, {apart[:3]}"


CHOSEN = [
    pytest.param(each, id=each.id, marks=() if (each.kind, each.name) in MOST_USED else (pytest.mark.slow,))
    for each in ARCHITECTURES
]


def built(architecture):
    """Return what makes the model. Skips if it does not train on token numbers alone, or not on a GPU."""
    try:
        architecture.try_in_memory()
    except NotBuilt as reason:
        pytest.skip(f"not built: {reason}")
    try:
        architecture.make().cuda()(architectures.batch(0).cuda()).backward()
    except Exception as error:
        pytest.skip(f"on a GPU: {type(error).__name__}: {str(error).splitlines()[:1]}")
    return architecture.make


@pytest.mark.parametrize("architecture", CHOSEN)
def test_a_streamed_architecture_trains_as_on_the_gpu_alone(tmp_path, architecture):
    make = built(architecture)
    model, losses = on_the_gpu(make, architectures.batch)
    try:
        found = streamed(make, architectures.batch, tmp_path / "run")
    except NotStreamable as refused:
        found, why = None, str(refused)
    if found is None:
        assert "\n" not in why
        pytest.skip(f"refused: {why}")
    assert_alike(found, model, losses)


@pytest.mark.parametrize("architecture", CHOSEN)
def test_gradients_are_equal_with_activations_on_the_ssd(tmp_path, architecture):
    make = built(architecture)
    found = []
    for offloaded in (False, False, True):
        model = make().cuda()
        torch.manual_seed(0)
        if offloaded:
            with offload_activations(tmp_path, amount="all", minimum_bytes=512, reserve_bytes=0, device="cuda"):
                model(architectures.batch(0).cuda()).backward()
        else:
            model(architectures.batch(0).cuda()).backward()
        found.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    kept, again, ours = found
    if any(not same(kept[name], again[name]) for name in kept):
        pytest.skip("its operations on this GPU do not repeat")
    assert ours.keys() == kept.keys()
    assert [name for name in kept if not same(ours[name], kept[name])] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_option_trains_as_on_the_gpu_alone(tmp_path, way, dtype):
    make = functools.partial(on_the_cpu.model, dtype=dtype, depth=6, dropout=0.1)

    def batch(number):
        return on_the_cpu.batches(1, seed=number)[0]

    options = WAYS[way] | ({"gradients": dtype} if "accumulate" in WAYS[way] else {})
    model, losses = on_the_gpu(make, batch, options.get("accumulate", 1))
    wrapped = streamed(make, batch, tmp_path / "run", **options)
    assert_alike(wrapped, model, losses)


def test_eight_bit_moments_train_as_adamw8bit(tmp_path):
    make = functools.partial(on_the_cpu.model, dtype=torch.bfloat16, depth=6)

    def batch(number):
        return on_the_cpu.batches(1, seed=number)[0]

    model, losses = on_the_gpu(make, batch, kind=functools.partial(on_host(AdamW8bit), seed=ROUNDING_SEED))
    assert_alike(streamed(make, batch, tmp_path / "run", states=torch.int8), model, losses)


@pytest.mark.parametrize("name", [name for name in shapes.SHAPES if name not in shapes.REFUSED])
def test_a_streamed_shape_trains_as_on_the_gpu_alone(tmp_path, name):
    def make():
        torch.manual_seed(0)
        return shapes.SHAPES[name]()

    try:
        make().cuda()(shapes.batch(0).cuda()).backward()
    except Exception as error:
        pytest.skip(f"on a GPU: {type(error).__name__}: {str(error).splitlines()[:1]}")
    model, losses = on_the_gpu(make, shapes.batch)
    if (name, "as they come") in shapes.CLOSE:
        pytest.skip("its results are close, not equal")
    assert_alike(streamed(make, shapes.batch, tmp_path / "run"), model, losses)


def test_gpu_memory_does_not_grow_with_model_depth(tmp_path):
    peaks = []
    for depth in (3, 12):
        model = on_the_cpu.model(depth=depth, hidden=256)
        with streaming(tmp_path / str(depth)) as session:
            session.hook(model, device="cuda")
            optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS)
            for number, ids in enumerate(on_the_cpu.batches(4)):
                if number == 2:
                    gc.collect()
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                model(ids.cuda()).backward()
                optimizer.step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            waiting = session.engine.updates.most_waiting_bytes  # of gradients, by which the updates lag behind
    assert peaks[1] <= peaks[0] + waiting

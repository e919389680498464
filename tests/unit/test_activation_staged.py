"""Device tensors on their way to a tier: order of copies and events,
space, errors, gradients. The device is simulated."""

import contextlib
import errno
import time

import pytest
import torch

from memascend.activation.cache import ActivationCache, ActivationError
from memascend.activation.options import CacheOptions
from memascend.activation.staged import StagedTier
from memascend.storage.engine_tiers import DirectTier
from tests.unit.device_streams import Streams

MAX_S = 20


@pytest.fixture
def staged(tmp_path):
    streams = Streams()
    with contextlib.ExitStack() as stack:

        def make(**options):
            tier = StagedTier(DirectTier.in_file(tmp_path, "tests"), streams=lambda _: streams, **options)
            stack.callback(tier.close)
            return tier, streams

        yield make


def test_copies_follow_the_callers_stream_and_writes_follow_copies(staged):
    tier, streams = staged()
    streams.side.open = False
    tensor = torch.arange(3000, dtype=torch.float32)
    written = tier.write("a", tensor)
    while ("copy", "side") not in streams.log:
        time.sleep(0.001)
    time.sleep(0.01)
    assert not written.done()
    assert tier._tier.size_of("a") is None  # nothing of it has been passed to the tier
    streams.side.reach()
    written.wait(MAX_S)
    expected = [("record", "compute"), ("wait", "side", 1), ("copy", "side"), ("record", "side")]
    assert streams.log == expected
    streams.log.clear()
    streams.side.open = False
    read = tier.read("a", out := torch.zeros(3000))
    while ("copy", "side") not in streams.log:
        time.sleep(0.001)
    time.sleep(0.01)
    assert not read.done()
    streams.side.reach()
    read.wait(MAX_S)
    assert streams.log == expected
    assert torch.equal(out, tensor)


def test_staging_slots_are_bounded_reused_and_waited_for(staged):
    tier, streams = staged(most_bytes=3 * 4096)
    taken, most = tier._allocator.allocate, []

    def counted(*args, **names):
        most.append(tier._used_bytes)
        return taken(*args, **names)

    tier._allocator.allocate = counted
    streams.side.open = False
    tensors = [torch.full((1024,), float(number)) for number in range(8)]
    written = [tier.write(str(number), tensor) for number, tensor in enumerate(tensors)]
    time.sleep(0.05)
    assert tier._used_bytes == 3 * 4096
    assert streams.log.count(("copy", "side")) == 3
    streams.side.reach()
    for each in written:
        each.wait(MAX_S)
    assert len(most) <= 3
    large = torch.ones(8 * 1024)
    tier.write("large", large).wait(MAX_S)  # more than the limit: it is written alone
    for number, tensor in enumerate(tensors):
        tier.read(str(number), out := torch.empty(1024)).wait(MAX_S)
        assert torch.equal(out, tensor)
    while tier._used_bytes:
        time.sleep(0.001)
    assert tier._idle_bytes <= 8 * 4096


def test_tier_error_reaches_the_transfer_and_frees_its_slot(tmp_path, staged):
    tier, _ = staged()
    with pytest.raises(ValueError, match="no such tensor"):
        tier.read("nothing", torch.empty(1024)).wait(MAX_S)
    stock = tier._tier.write
    tier._tier.write = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "failed"))
    with pytest.raises(OSError, match="failed"):
        tier.write("a", torch.ones(1024)).wait(MAX_S)
    tier._tier.write = stock
    tier.write("a", torch.ones(1024)).wait(MAX_S)
    while tier._used_bytes:
        time.sleep(0.001)
    assert tier._queued_bytes == 0


def net():
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers)


def gradients(model):
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    model(x.requires_grad_()).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_cache_over_staged_tier_keeps_gradients_and_names_lost_activations(staged):
    expected = gradients(net())
    options = CacheOptions(amount="all", minimum_bytes=4096, reserve_bytes=0, device="cpu", prefetch_bytes=1)
    tier, _ = staged(most_bytes=300_000)
    cache = ActivationCache(tier, options)
    with cache.active():
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(gradients(net()), expected, strict=True))
    assert cache.statistics.written > 3 * 512 * 64 * 4
    tier._tier.write = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "failed"))
    with cache.active():
        loss = net()(torch.randn(512, 64, requires_grad=True)).square().mean()
        while any(saved.writing is not None for saved in tuple(cache._live)):
            time.sleep(0.001)
        with pytest.raises(ActivationError, match=r"activation .* is lost: .*failed"):
            loss.backward()


@pytest.mark.gpu
def test_gpu_offloading_keeps_gradients_equal_and_lowers_device_memory(tmp_path):
    import memascend

    def one(cache=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(16))).cuda()
        x = torch.randn(4096, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        for _ in range(2):  # the second step knows the sizes of the first
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).square().mean()
            while cache is not None and any(saved.writing is not None for saved in tuple(cache._live)):
                time.sleep(0.001)
            allocated = torch.cuda.memory_allocated()
            loss.backward()
        return allocated, [p.grad.cpu() for p in model.parameters()]

    kept, expected = one()
    with memascend.offload_activations(tmp_path, amount="all", reserve_bytes=0, device="cuda") as cache:
        sent, found = one(cache)
        assert cache.statistics.read > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sent < kept - 8 * 4096 * 2048 * 4

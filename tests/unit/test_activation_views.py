"""Saved views of every kind return the same bytes, whatever state their region is in when backward needs it."""

import threading
import time

import numpy
import pytest
import torch
import torch.nn.functional as F
from test_activation_cache import MemoryTier, drained, offloading
from torch import nn

KEPT, FORWARDED, READ = "kept in memory", "still being written", "read from the tier"


def gradients_of(program):
    torch.manual_seed(0)
    leaves, loss = program()
    return torch.autograd.grad(loss, leaves)


def offloaded_gradients_of(program, state):
    """Return the same gradients with every saved tensor of 512 bytes and more in `state` when backward begins."""
    tier = MemoryTier()
    cache = offloading(tier, minimum_bytes=512, amount=0 if state == KEPT else "all")
    if state == FORWARDED:
        tier.gates["write"].clear()
    torch.manual_seed(0)
    try:
        with cache.active():
            leaves, loss = program()
        if state == READ:
            end = time.monotonic() + 20
            while cache.statistics.resident and time.monotonic() < end:
                time.sleep(0.001)
        found = torch.autograd.grad(loss, leaves)
        counts = cache.statistics
        assert state != KEPT or (counts.kept and not counts.written)
        assert state != FORWARDED or (counts.forwarded and not counts.read)
        assert state != READ or (counts.read and not counts.forwarded)
    finally:
        tier.gates["write"].set()
    del loss
    assert drained(cache, tier)
    return found


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def a_loss_over_chunks():
    hidden, weight = leaf(1, 64, 32), leaf(32, 16)
    return [hidden, weight], sum((part.sin() @ weight).square().mean() for part in (hidden * 2).split(16, dim=1))


def micro_batches():
    x, w = leaf(32, 32), leaf(32, 32)
    doubled = x * 2
    return [x, w], sum((doubled[i : i + 8] @ w).exp().mean() for i in range(0, 32, 8))


def time_steps():
    x, w = leaf(8, 64, 16), leaf(16, 16)
    state, steps = x.new_zeros(64, 16), x * 3
    for step in range(8):
        state = torch.tanh(steps[step] @ w + state * steps[step])
    return [x, w], state.sum()


def channels_last():
    x, w = leaf(4, 8, 8, 8), leaf(8, 8, 3, 3)
    y = (x * 2).contiguous(memory_format=torch.channels_last)
    return [x, w], F.conv2d(y[1:], w).square().sum()


def expanded():
    x, y = leaf(16, 32), leaf(8, 16, 32)
    return [x, y], ((x * 2).expand(8, 16, 32) * y).sin().sum()


def overlapping():
    x, y = leaf(512), leaf(64, 16)
    windows = (x * 2)[128:].as_strided((64, 16), (2, 1), 160)
    return [x, y], (windows * y).square().sum()


def transposed():
    x, w = leaf(4, 32, 32), leaf(32, 32)
    return [x, w], sum((each.t() @ w).sin().sum() for each in x * 2)


def real_and_imaginary_parts():
    z, w = leaf(4, 256, dtype=torch.complex64), leaf(256)
    doubled = z * 2
    return [z, w], sum((each.real * w + (each.imag * w).square()).sum() for each in doubled)


def a_lazy_conjugate():
    z, w = leaf(4, 256, dtype=torch.complex64), leaf(4, 256, dtype=torch.complex64)
    return [z, w], ((z * 2).conj()[2:] * w[2:]).abs().square().sum()


def a_lazy_negative():
    z, w = leaf(4, 256, dtype=torch.complex64), leaf(256)
    return [z, w], ((z * 2).conj().imag[3] * w).square().sum()


def bytes_as_another_type():
    x, w = leaf(16, 64), leaf(16, 64)
    mask = ((x * 2).detach().view(torch.int32) & 1)[4:] == 1
    return [x, w], ((x[4:] * w[4:]).masked_fill(mask, 0.0) * w[4:]).sum()


def halves_of_one_storage():
    x = leaf(2, 16, 32)
    both = x * 2
    first, second = both.unbind()
    return [x], (first * second + both.sin().sum(0) * second.exp()).sum()


def a_storage_that_is_no_multiple_of_the_type():
    x = leaf(256)
    storage = torch.zeros(1026, dtype=torch.uint8)
    noise = storage[:1024].view(torch.float32).normal_()
    return [x], (x * noise).sin().sum()


def chunks_that_count_versions_for_themselves():
    x, w = leaf(64, 32), leaf(32, 96)
    a, b, c = torch.unsafe_chunk(x @ w, 3, dim=1)
    return [x, w], (a.sigmoid_() * b.sigmoid_() * c.tanh_()).sum()


def cells_of_a_gru():
    torch.manual_seed(0)
    gru = nn.GRU(48, 48, batch_first=True)
    return [*gru.parameters()], gru(torch.randn(32, 4, 48))[0].square().mean()


PROGRAMS = [
    a_loss_over_chunks,
    micro_batches,
    time_steps,
    channels_last,
    expanded,
    overlapping,
    transposed,
    real_and_imaginary_parts,
    a_lazy_conjugate,
    a_lazy_negative,
    bytes_as_another_type,
    halves_of_one_storage,
    a_storage_that_is_no_multiple_of_the_type,
    chunks_that_count_versions_for_themselves,
    cells_of_a_gru,
]


@pytest.mark.parametrize("state", [KEPT, FORWARDED, READ])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_through_saved_views_are_bit_identical(program, state):
    found, expected = offloaded_gradients_of(program, state), gradients_of(program)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TiedHead(nn.Module):
    """GPT's kind of model: the head is the embedding's weight, used by the root's own forward."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(512, 32), nn.Linear(32, 32)

    def forward(self, ids):
        return F.linear(self.body(self.embed(ids)).tanh(), self.embed.weight).square().mean()


@pytest.mark.parametrize("outside", [False, True], ids=["in the root's forward", "in the loop"])
def test_weight_shared_with_another_module_or_loop_stays_in_memory(outside):
    tier, model = MemoryTier(), TiedHead()
    cache = offloading(tier, minimum_bytes=512)
    with cache.active():
        loss = model(torch.arange(64))
        if outside:
            loss = loss + F.linear(model.body.weight[:16] * 2, model.embed.weight).sin().mean()
    loss.backward()
    assert 512 * 32 * 4 not in tier.sizes
    assert tier.sizes
    del loss
    assert drained(cache, tier)


@pytest.mark.parametrize("kept", [0, 1], ids=["all offloaded", "every other one kept"])
def test_read_ahead_visits_each_region_a_few_times_at_most(kept):
    tier, depth = MemoryTier(), 400
    cache = offloading(tier, minimum_bytes=512, prefetch_bytes=16 << 10)
    body = nn.Sequential(*[nn.Sigmoid() for _ in range(depth)])
    x = torch.randn(8, 32, requires_grad=True)
    with cache.active():
        y = body(x)
        if kept:
            cache.plan = type(cache.plan)(offload_bytes=0)
            z = body(x)
            y = y + z
    sweep = next(iter(cache._live)).sweep
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert cache.statistics.read >= depth * 8 * 32 * 4 // 2
    assert sweep.steps <= 6 * depth
    del y
    cache.close()


def test_a_region_whose_write_ends_during_backward_is_read_ahead():
    tier = MemoryTier()
    cache = offloading(tier, minimum_bytes=512)
    body = nn.Sequential(*[nn.Sigmoid() for _ in range(6)])
    x = torch.randn(64, 64, requires_grad=True)
    reached, go_on = threading.Event(), threading.Event()

    def wait(*_):
        reached.set()
        assert go_on.wait(20)

    tier.gates["write"].clear()
    with cache.active():
        y = body(x)
    y.grad_fn.register_hook(wait)  # the last region has been unpacked: the cursor has passed all others
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    assert reached.wait(20)
    tier.gates["write"].set()
    end = time.monotonic() + 20
    while len(tier.kept) < 6 and time.monotonic() < end:
        time.sleep(0.001)
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    assert x.grad is not None
    assert cache.statistics.read
    cache.close()


@pytest.mark.parametrize("in_modules", [False, True], ids=["in a function", "in a module"])
def test_buffer_refilled_without_a_new_version_gives_current_gradients(in_modules):
    """This may be a data loader's memory, while the graph of an earlier loss, which is only logged, is alive."""
    weight = torch.ones(32, 32, requires_grad=True)
    layer = nn.Linear(32, 32, bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    array = numpy.zeros((32, 32), numpy.float32)
    batch = torch.from_numpy(array)
    cache = offloading(tier := MemoryTier(), minimum_bytes=512, amount="all")
    with cache.active():
        array[:] = 1.0
        logged = (layer(batch) if in_modules else batch @ weight).sum()
        end = time.monotonic() + 20
        while cache.statistics.resident and time.monotonic() < end:
            time.sleep(0.001)
        array[:] = 2.0
        (layer(batch) if in_modules else batch @ weight).sum().backward()
    gradient = layer.weight.grad if in_modules else weight.grad
    assert torch.equal(gradient, torch.full((32, 32), 64.0))
    del logged
    assert drained(cache, tier)


def test_leaf_changed_through_data_gives_current_gradients():
    """The change is by `.data`, for which torch counts no version, while the graph of an earlier loss is alive."""
    weight = torch.ones(32, 32, requires_grad=True)
    cache = offloading(tier := MemoryTier(), minimum_bytes=512, amount="all")
    with cache.active():
        logged = weight.square().sum()
        end = time.monotonic() + 20
        while cache.statistics.resident and time.monotonic() < end:
            time.sleep(0.001)
        weight.data.mul_(2)
        weight.square().sum().backward()
    assert torch.equal(weight.grad, torch.full((32, 32), 4.0))
    del logged
    assert drained(cache, tier)

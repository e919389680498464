"""Saved tensors that are changed in place before backward: refused where plain PyTorch refuses them, and only there."""

import time
import weakref

import pytest
import torch
from test_activation_cache import MemoryTier, drained, offloading
from torch import nn

from memascend.activation.cache import ActivationError
from memascend.activation.saved import Version

KEPT, FORWARDED, READ = "kept in memory", "still being written", "read from the tier"
STATES = (KEPT, FORWARDED, READ)


def leaf():
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()


def written(cache):
    end = time.monotonic() + 20
    while cache.statistics.resident and time.monotonic() < end:
        time.sleep(0.001)
    assert not cache.statistics.resident


def offloaded(program, state):
    """Return (the result of `program(wait)` under offloading, the error that it raises); one of them is None.

    Its saved tensors are in `state` once `wait` has returned.
    """
    tier = MemoryTier()
    cache = offloading(tier, minimum_bytes=512, amount=0 if state == KEPT else "all")
    if state == FORWARDED:
        tier.gates["write"].clear()
    found = failure = None
    try:
        with cache.active():
            found = program(lambda: written(cache) if state == READ else None)
    except RuntimeError as error:
        failure = error.with_traceback(None)  # a traceback would keep the graph
    finally:
        tier.gates["write"].set()
    assert drained(cache, tier)
    return found, failure


def the_tensor_itself(wait):
    a = leaf()
    y = a * 1
    z = y.square()
    wait()
    y.mul_(2)
    return torch.autograd.grad(z.sum(), a)


def what_needs_no_gradient(wait):
    a, mask = leaf(), torch.ones(32, 32)
    z = a * mask
    wait()
    mask.zero_()
    return torch.autograd.grad(z.sum(), a)


def a_residual(wait):
    a = leaf()
    h = a.tanh()
    z = h * h
    wait()
    h += 1
    return torch.autograd.grad(z.sum(), a)


def a_part_of_it(wait):
    a = leaf()
    y = a * 1
    z = y.square()
    wait()
    y[:3].zero_()
    return torch.autograd.grad(z.sum(), a)


def what_it_is_a_part_of(wait):
    a = leaf()
    y = a * 1
    z = y[:16].square()
    wait()
    y[16:].zero_()  # torch has one version counter for the whole tensor
    return torch.autograd.grad(z.sum(), a)


def its_detached_alias(wait):
    a = leaf()
    y = a * 1
    z = y.square()
    wait()
    y.detach().t().zero_()
    return torch.autograd.grad(z.sum(), a)


def the_first_of_two_versions(wait):
    a = leaf()
    y = a * 1
    first = y.square()
    wait()
    second = y.mul_(2).square()
    return torch.autograd.grad((first + second).sum(), a)


def after_the_first_of_two_backward_passes(wait):
    a = leaf()
    y = a * 1
    z = y.square().sum()
    wait()
    torch.autograd.grad(z, a, retain_graph=True)
    y.mul_(2)
    return torch.autograd.grad(z, a)


def what_shares_the_memory_and_counts_for_itself(wait):
    a = leaf()
    y = a * 1
    other = y.data
    z = a * other + y.square()  # backward begins with the last term, so its queue is empty when the first fails
    wait()
    other.mul_(2)
    return torch.autograd.grad(z.sum(), a)


REFUSED = (
    the_tensor_itself,
    what_needs_no_gradient,
    a_residual,
    a_part_of_it,
    what_it_is_a_part_of,
    its_detached_alias,
    the_first_of_two_versions,
    after_the_first_of_two_backward_passes,
    what_shares_the_memory_and_counts_for_itself,
)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("program", REFUSED)
def test_in_place_changes_are_refused_in_every_state(program, state):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(lambda: None)
    _, failure = offloaded(program, state)
    assert isinstance(failure, ActivationError)
    assert "activation no module" in str(failure)
    assert "was modified in place after it had been saved" in str(failure)


def a_saved_value_that_is_not_needed(wait):
    a, b = leaf(), leaf()
    y, mask = a * 1, torch.ones(32, 32)
    z, unused = b * y.sin(), b * mask
    wait()
    y.mul_(2)
    mask.zero_()
    return torch.autograd.grad((z + y + unused.detach()).sum(), b)


def the_second_of_two_versions(wait):
    a = leaf()
    y = a * 1
    y.square()
    wait()
    second = y.mul_(2).square()
    wait()
    return torch.autograd.grad(second.sum(), a)


def operations_in_place_that_save_their_result(wait):
    a = leaf()
    z = (a * 1).exp_() * (a * 2).tanh_() * (a * 3).relu_()
    wait()
    return torch.autograd.grad(z.sum(), a)


def a_change_of_a_view_in_the_graph(wait):
    a = leaf()
    y = a * 1
    y[:8].mul_(3)
    z = y.exp() * y[4:12].sum()
    wait()
    return torch.autograd.grad(z.sum(), a)


def two_backward_passes_and_a_second_derivative(wait):
    a = leaf()
    z = (a * 1).exp().square()
    wait()
    torch.autograd.grad(z.sum(), a, retain_graph=True)
    (first,) = torch.autograd.grad(z.sum(), a, create_graph=True)
    return first.detach(), *torch.autograd.grad(first.sum(), a)


ACCEPTED = (
    a_saved_value_that_is_not_needed,
    the_second_of_two_versions,
    operations_in_place_that_save_their_result,
    a_change_of_a_view_in_the_graph,
    two_backward_passes_and_a_second_derivative,
)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("program", ACCEPTED)
def test_programs_accepted_by_plain_pytorch_are_accepted_when_offloaded(program, state):
    expected = program(lambda: None)
    found, failure = offloaded(program, state)
    assert failure is None
    assert all(map(torch.equal, expected, found))


class Chain(nn.Module):
    def forward(self, x):
        self.first = x * 2
        return self.first.sin().exp().square().sum()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain()

    def forward(self, x):
        return self.chain(x) * 2


def test_in_place_change_of_read_ahead_tensor_names_its_module():
    def program(wait):
        model, a = Outer(), leaf()
        loss = model(a)
        wait()
        with torch.no_grad():
            model.chain.first.add_(1)
        loss.backward()

    _, failure = offloaded(program, READ)
    assert isinstance(failure, ActivationError)
    assert str(failure).startswith("activation chain[0] ((32, 32), torch.float32) was modified in place")


def test_saved_tensor_releases_its_memory_and_graph():
    tier = MemoryTier()
    cache = offloading(tier, minimum_bytes=512)
    a = leaf()
    with cache.active():
        y = a.exp()
        z = y.sin().sum()
        storage = weakref.ref(y.untyped_storage())
        del y
        written(cache)
        end = time.monotonic() + 20
        while storage() is not None and time.monotonic() < end:
            time.sleep(0.001)
        assert storage() is None
        z.backward()
    del z
    assert drained(cache, tier)


def test_graph_dropped_without_backward_releases_tensors_kept_in_memory():
    tier = MemoryTier()
    cache = offloading(tier, minimum_bytes=512, amount=0)
    with cache.active():
        z = leaf().exp()  # saves its own result
        assert cache.statistics.live_tensors == 1
        del z
    assert cache.statistics.live_tensors == 0
    cache.close()


def test_version_holds_no_memory_and_ignores_inference_tensors():
    x = torch.randn(8, 8)
    version = Version(x.t()[2:])
    storage = weakref.ref(x.untyped_storage())
    version.check("x")
    x.mul_(2)
    with pytest.raises(ActivationError, match=r"^x was modified in place .*\(version 1, expected 0\)"):
        version.check("x")
    del x
    assert storage() is None
    with torch.inference_mode():
        x = torch.ones(3)
        version = Version(x)
        x.mul_(2)
    version.check("x")

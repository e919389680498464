"""AdamW against torch.optim.AdamW, and bf16 states against the properties of stochastic rounding."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from memascend.ops.adamw import adamw_
from tests.ars5 import S_BOX, words

HALVES = [torch.float16, torch.bfloat16]


def states(numel: int, dtype=torch.float32, grad_dtype=None, seed: int = 0) -> list[torch.Tensor]:
    """Return parameter, gradient, momentum, variance."""
    make = torch.Generator().manual_seed(seed)
    values = [torch.randn(numel, generator=make) * size for size in (1, 0.1, 0.01)]
    values.append(torch.rand(numel, generator=make) * 0.01)
    return [v.to(grad_dtype or dtype) if i == 1 else v.to(dtype) for i, v in enumerate(values)]


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.95)}, {"eps": 1e-4}])
def test_fp32_matches_torch_over_many_steps(options):
    make = torch.Generator().manual_seed(3)
    start = torch.randn(2000, generator=make)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], **options)
    ours, exp_avg, exp_avg_sq = start.clone(), torch.zeros(2000), torch.zeros(2000)
    for step in range(1, 51):
        grad = torch.randn(2000, generator=make) * 10.0 ** (step % 7 - 5)
        theirs.grad = grad.clone()
        optimizer.step()
        adamw_(ours, grad, exp_avg, exp_avg_sq, step=step, **options)
    kept = optimizer.state[theirs]
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg, kept["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(exp_avg_sq, kept["exp_avg_sq"], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("copy_dtype", HALVES)
def test_half_gradients_are_converted_and_the_copy_matches_the_parameter(grad_dtype, copy_dtype):
    param, grad, exp_avg, exp_avg_sq = states(1003, grad_dtype=grad_dtype)
    wide = [param.clone(), grad.float() * 0.5, exp_avg.clone(), exp_avg_sq.clone()]
    copy = torch.empty(1003, dtype=copy_dtype)
    adamw_(param, grad, exp_avg, exp_avg_sq, copy, step=7, grad_scale=0.5)
    adamw_(*wide, step=7)
    assert torch.equal(param, wide[0])
    assert torch.equal(exp_avg, wide[2])
    assert torch.equal(copy, param.to(copy_dtype))


@pytest.mark.parametrize("copy_dtype", HALVES)
def test_with_bf16_states_the_copy_is_the_rounded_parameter(copy_dtype):
    tensors = states(1003, torch.bfloat16)
    again = [t.clone() for t in tensors]
    copy = torch.empty(1003, dtype=copy_dtype)
    adamw_(*tensors, copy, step=2, seed=5)
    adamw_(*again, step=2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, again))
    assert torch.equal(copy, tensors[0].to(copy_dtype))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, *HALVES]),
    st.integers(0, 3000),
    st.integers(0, 100),
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(1, 4),
)
def test_results_are_bit_identical_across_slices_and_threads(dtype, grad_dtype, numel, offset, cuts, threads):
    whole = states(numel, dtype, grad_dtype)
    sliced = [t.clone() for t in whole]
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        adamw_(*whole, step=3, seed=9, element_offset=offset)
        torch.set_num_threads(threads)
        for begin, end in reversed(list(itertools.pairwise(edges))):
            adamw_(*(t[begin:end] for t in sliced), step=3, seed=9, element_offset=offset + begin)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced))


def test_reference_sbox_matches_the_aes_standard():
    assert [S_BOX[0x00], S_BOX[0x01], S_BOX[0x53], S_BOX[0xFF]] == [0x63, 0x7C, 0xED, 0x16]  # FIPS 197, figure 7


def test_stochastic_rounding_uses_the_documented_random_words():
    """With a learning rate of zero, and betas of zero, the new states are known in float32 before they are rounded."""
    seed, step, numel, offset = 0x1234_5678_9ABC_DEF0, (1 << 33) + 5, 100, (1 << 36) + 7
    grad = torch.rand(numel, generator=torch.Generator().manual_seed(1)) + 0.5
    param, exp_avg, exp_avg_sq = (torch.ones(numel, dtype=torch.bfloat16) for _ in range(3))
    adamw_(param, grad, exp_avg, exp_avg_sq, step=step, lr=0.0, betas=(0.0, 0.0), seed=seed, element_offset=offset)
    for i in range(numel):
        _, momentum, variance = words(offset + i, step, seed)
        for state, exact, noise in [(exp_avg, grad[i], momentum), (exp_avg_sq, grad[i] * grad[i], variance)]:
            bits = (exact.view(torch.int32).item() + noise) >> 16
            assert state[i].view(torch.int16).item() == bits
        assert param[i] == 1


def rounded_up(numel: int, gradient: float, weight_decay: float, step: int) -> tuple[list[torch.Tensor], list[float]]:
    """Return which elements of parameter, momentum and variance were rounded up, and how often each should be.

    The exact values are known: betas of zero leave the gradient and its square, and a huge epsilon leaves only the
    decay.
    """
    grad = torch.full((numel,), gradient)
    param, exp_avg, exp_avg_sq = (torch.ones(numel, dtype=torch.bfloat16) for _ in range(3))
    options = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e30, "weight_decay": weight_decay, "seed": 5}
    adamw_(param, grad, exp_avg, exp_avg_sq, step=step, **options)
    up, share = [], []
    for state, exact in [(param, torch.tensor(1 - weight_decay)), (exp_avg, grad[0]), (exp_avg_sq, grad[0] * grad[0])]:
        bits = exact.view(torch.int32).item()
        gained = state.view(torch.int16).int() - (bits >> 16)
        assert set(gained.unique().tolist()) <= {0, 1}
        up.append(gained.double())
        share.append((bits & 0xFFFF) / 65536)
    return up, share


def test_rounding_is_uniform_and_pairwise_independent():
    """Checked for states of one element, for neighbours at several distances
    in a block and beyond, and for consecutive steps."""
    numel, steps = 1 << 17, [1, 2]
    bound = 5 / math.sqrt(numel)  # five standard deviations of a mean of products of standardised numbers
    for gradient, weight_decay in [(1 + 2**-8, 2**-9), (1.0041, 2**-9 * 1.7)]:
        seen = []
        for step in steps:
            for up, share in zip(*rounded_up(numel, gradient, weight_decay, step)):
                if 0 < share < 1:
                    centred = (up - share) / math.sqrt(share * (1 - share))
                    assert abs(centred.mean().item()) < bound
                    seen.append(centred)
        for one, other in itertools.combinations(seen, 2):
            assert abs((one * other).mean().item()) < bound
        for one, other in itertools.product(seen, repeat=2):
            for distance in (1, 2, 7, 8, 32):
                assert abs((one[distance:] * other[:-distance]).mean().item()) < bound


def test_stochastic_rounding_keeps_updates_that_nearest_rounding_loses():
    """A thousand steps of 1/20 of a unit in the last place: rounding to nearest would never change the parameter."""
    numel = 4096
    param = torch.ones(numel, dtype=torch.bfloat16)
    for step in range(1, 1001):
        exp_avg, exp_avg_sq = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
        grad = torch.full((numel,), -1.0, dtype=torch.bfloat16)
        # Betas of zero make the step exactly lr, whatever happened before.
        adamw_(param, grad, exp_avg, exp_avg_sq, step=step, lr=2.0**-7 / 20, betas=(0, 0), weight_decay=0, seed=1)
    assert param.double().mean().item() == pytest.approx(1 + 1000 * 2.0**-7 / 20, rel=2e-3)


def test_training_with_bf16_states_converges_like_fp32():
    """Least squares: the loss falls alike, and far below the value at which rounding to nearest gets stuck."""
    make = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 32, generator=make)
    targets = inputs @ torch.randn(32, generator=make)

    def final_loss(dtype):
        param = torch.zeros(32, dtype=dtype)
        exp_avg, exp_avg_sq = torch.zeros(32, dtype=dtype), torch.zeros(32, dtype=dtype)
        for step in range(1, 1001):
            weight = param.float().clone().requires_grad_()
            loss = (inputs @ weight - targets).square().mean()
            loss.backward()
            adamw_(param, weight.grad.to(dtype), exp_avg, exp_avg_sq, step=step, lr=2e-2, weight_decay=0.0, seed=7)
        return loss.item()

    start = targets.square().mean().item()
    assert final_loss(torch.float32) < 1e-2 * start
    assert final_loss(torch.bfloat16) < 1e-2 * start


def test_seed_and_element_offset_change_the_rounding():
    def run(**options):
        tensors = states(4000, torch.bfloat16)
        adamw_(*tensors, lr=0.0, **options)
        return tensors[2]

    base = run(step=5, seed=1)
    assert torch.equal(base, run(step=5, seed=1))
    assert not torch.equal(base, run(step=5, seed=2))
    assert not torch.equal(base, run(step=5, seed=1, element_offset=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("index", "name"), [(0, "parameter"), (1, "gradient"), (2, "momentum"), (3, "variance")])
def test_nan_values_are_reported_by_tensor_and_element(dtype, index, name):
    tensors = states(5000, dtype)
    tensors[index][4321] = math.nan
    kept = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=f"{name} is nan at element 14321 before step 6"):
        adamw_(*tensors, step=6, element_offset=10_000)
    group = slice(4321 - 14321 % 32, 4321)
    assert torch.equal(tensors[0][group], kept[0][group])
    assert not torch.equal(tensors[0][:64], kept[0][:64])


def test_bad_input_is_refused():
    good = states(8)
    for index, other, says in [
        (1, torch.ones(9), r"grad has shape \[9\], param \[8\]"),
        (2, torch.ones(2, 4), "exp_avg has shape"),
        (3, torch.ones(16)[::2], "exp_avg_sq is not contiguous"),
        (1, torch.ones(8, dtype=torch.float64), "grad has dtype Double"),
        (2, torch.ones(8, dtype=torch.bfloat16), "all float32 or all bfloat16"),
    ]:
        bad = [other if i == index else t for i, t in enumerate(good)]
        with pytest.raises(ValueError, match=says):
            adamw_(*bad, step=1)
    halves = [t.half() for t in good]
    with pytest.raises(ValueError, match="all float32 or all bfloat16"):
        adamw_(*halves, step=1)
    with pytest.raises(ValueError, match="half_copy is float16 or bfloat16"):
        adamw_(*good, torch.ones(8), step=1)
    for options, says in [({"step": 0}, "counted from one"), ({"step": 1, "lr": -1.0}, "learning rate")]:
        with pytest.raises(ValueError, match=says):
            adamw_(*good, **options)


def test_empty_tensors_and_parameters_requiring_gradients_are_accepted():
    adamw_(*states(0), torch.empty(0, dtype=torch.float16), step=1)
    param, grad, exp_avg, exp_avg_sq = states(100)
    weight = torch.nn.Parameter(param)
    adamw_(weight, grad, exp_avg, exp_avg_sq, step=1)
    assert weight.requires_grad


def test_operator_has_a_fake_for_tracing():
    op = torch.ops.memascend.adamw_.default
    options = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    library.opcheck(op, tuple(states(40)), options)
    library.opcheck(op, (*states(40, torch.bfloat16), torch.empty(40, dtype=torch.float16)), options)
    with pytest.raises(ValueError, match="shape"):
        op(*(torch.empty(3, device="meta") for _ in range(3)), torch.empty(4, device="meta"), **options)

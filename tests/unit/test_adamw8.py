"""AdamW with 8-bit moments: against a slow reference of the format, fp32 AdamW, and the properties of rounding."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import adamw_
from memascend.ops.adamw8 import (
    BYTES_PER_PARAMETER,
    AdamW8bit,
    adamw8_,
    decode_moments,
    encode_moments,
    rounding_bounds,
    scales_shape,
)
from tests.ars5 import words

GRADIENTS = [torch.float32, torch.float16, torch.bfloat16]


def states(numel: int, grad_dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return parameter, gradient, codes of momentum and variance (every byte is one), scales."""
    make = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 1, (numel,), generator=make))
    codes = [torch.randint(0, 256, (numel,), generator=make).to(torch.uint8) for _ in range(2)]
    scales = torch.randint(110, 124, scales_shape(numel), generator=make).to(torch.uint8)
    param = torch.randn(numel, generator=make).bfloat16()
    return [param, (torch.randn(numel, generator=make) * sizes).to(grad_dtype), *codes, scales]


def zeros(numel: int) -> list[torch.Tensor]:
    """Return the moments before the first step."""
    shapes = [(numel,), (numel,), scales_shape(numel)]
    return [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]


def threads_and(number: int, body):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        body()
    finally:
        torch.set_num_threads(before)


# --- A reference in fractions: the format as its page describes it, without the kernel's bit arithmetic.


def value_of(code: int, bits: int) -> Fraction:
    exponent, fraction = divmod(code, 1 << bits)
    unit = Fraction(1, 1 << bits)
    return fraction * unit / 64 if exponent == 0 else (1 + fraction * unit) * Fraction(2) ** (exponent - 7)


def power_of(value: Fraction) -> int:
    """Return the largest e with 2^e <= value."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def stochastic_code(value: Fraction, bits: int, word: int) -> int:
    """Round to one of the neighbouring codes, to the upper with the probability that makes the expectation exact.

    float32 has 23 bits of fraction, so the distance is known to 23 - bits of them, of which `word` decides the first
    16.
    """
    if value < Fraction(1, 64):
        position = value * 64 * (1 << bits)
    else:
        octave = power_of(value)
        position = (octave + 7 + value / Fraction(2) ** octave - 1) * (1 << bits)
    below = 23 - bits
    return (round(position * (1 << below)) + (word << (below - 16))) >> below


def scale_of(largest: Fraction, bits: int) -> int:
    """Return the exponent code of the power of two below the largest value, or above it if rounding may reach that."""
    if largest < Fraction(2) ** -119:
        return 8
    e = power_of(largest)
    return 127 + e + (largest / Fraction(2) ** e >= 2 - Fraction(1, 1 << bits))


def f32(value: float) -> float:
    return float(np.float32(value))


def fma(a: float, b: float, c: float) -> float:
    """Return the fused product and sum: products of two float32 are exact in float64. The
    sum is rounded twice, which makes no difference in these cases."""
    return f32(a * b + c)


def reference(tensors, *, step, lr, betas, eps, weight_decay, seed, offset):
    param, grad, m_codes, r_codes, scales = (t.clone() for t in tensors)
    one_minus = [f32(1 - beta) for beta in betas]
    correction = f32(1 / math.sqrt(1 - betas[1] ** step))
    step_size, decay = f32(lr / (1 - betas[0] ** step)), f32(1 - lr * weight_decay)
    for begin in range(0, param.numel(), 32):
        block = range(begin, min(begin + 32, param.numel()))
        new = {}
        for i in block:
            m_scale, r_scale = (Fraction(2) ** (max(8, int(s)) - 127) for s in scales[begin // 32])
            code = int(m_codes[i])
            m = float((-1 if code & 128 else 1) * value_of(code & 127, 4) * m_scale)
            r = float(value_of(int(r_codes[i]), 5) * r_scale)
            g = float(grad[i])
            m = fma(f32(g - m), one_minus[0], m)
            v = fma(f32(g * g), one_minus[1], f32(f32(r * r) * f32(betas[1])))
            r = float(np.sqrt(np.float32(v)))
            p = fma(f32(m / fma(r, correction, f32(eps))), -step_size, f32(float(param[i]) * decay))
            new[i] = (m, r, p)
        tops = [max(abs(Fraction(new[i][k])) for i in block) for k in (0, 1)]
        exponents = [scale_of(top, bits) for top, bits in zip(tops, (4, 5))]
        for i in block:
            m, r, p = new[i]
            p_word, m_word, r_word = words(offset + i, step, seed)
            inverse = [Fraction(2) ** (127 - e) for e in exponents]
            negative = math.copysign(1, m) < 0
            m_codes[i] = stochastic_code(abs(Fraction(m)) * inverse[0], 4, m_word) | (128 if negative else 0)
            r_codes[i] = max(1, stochastic_code(Fraction(r) * inverse[1], 5, r_word))
            bits = (int(np.float32(p).view(np.uint32)) + p_word) >> 16
            param[i] = torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32).view(torch.float32)
        scales[begin // 32] = torch.tensor(exponents, dtype=torch.uint8)
    return [param, grad, m_codes, r_codes, scales]


@pytest.mark.parametrize("grad_dtype", GRADIENTS)
def test_every_bit_matches_the_reference(grad_dtype):
    options = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "seed": 0x1234_5678_9ABC}
    tensors, offset = states(75, grad_dtype), (1 << 36) + 32
    for step in (1, 2, (1 << 33) + 5):
        expected = reference(tensors, step=step, offset=offset, **options)
        adamw8_(*tensors, step=step, element_offset=offset, **options)
        for ours, theirs in zip(tensors, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_zero_states_with_zero_and_outlier_gradients_match_the_reference():
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "seed": 3}
    tensors = [torch.ones(64).bfloat16(), torch.zeros(64), *zeros(64)]
    for step in (1, 2, 3):
        tensors[1][:32] = torch.linspace(-1e-4, 1e-4, 32)
        tensors[1][5] = 1e3 * step
        expected = reference(tensors, step=step, offset=0, **options)
        adamw8_(*tensors, step=step, **options)
        for ours, theirs in zip(tensors, expected, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(tensors[0][32:], torch.ones(32).bfloat16())
    assert tensors[4][1].tolist() == [8, 8]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(GRADIENTS),
    st.integers(0, 3000),
    st.integers(0, 100),
    st.lists(st.integers(0, 90), max_size=6),
    st.integers(1, 4),
)
def test_results_are_bit_identical_across_slices_and_threads(grad_dtype, numel, offset, cuts, threads):
    whole = states(numel, grad_dtype)
    sliced = [t.clone() for t in whole]
    threads_and(1, lambda: adamw8_(*whole, step=3, seed=9, element_offset=32 * offset))

    def in_slices():
        edges = sorted({0, numel, *(32 * cut for cut in cuts if 32 * cut < numel)})
        for begin, end in reversed(list(itertools.pairwise(edges))):
            rows = slice(begin // 32, -(-end // 32))
            part = [*(t[begin:end] for t in sliced[:4]), sliced[4][rows]]
            adamw8_(*part, step=3, seed=9, element_offset=32 * offset + begin)

    threads_and(threads, in_slices)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced))


def test_resumed_run_draws_the_same_random_numbers():
    def go_on(tensors, first, last):
        for step in range(first, last):
            adamw8_(*tensors, step=step, seed=4)

    whole = states(1000)
    resumed = [t.clone() for t in whole]
    go_on(whole, 1, 7)
    go_on(resumed, 1, 4)
    saved = [t.clone() for t in resumed]
    go_on(saved, 4, 7)
    assert all(torch.equal(a, b) for a, b in zip(whole, saved))
    other = [t.clone() for t in resumed]
    adamw8_(*other, step=4, seed=5)
    adamw8_(*resumed, step=4, seed=4)
    assert not torch.equal(other[2], resumed[2])


def test_one_rounding_stays_within_its_bounds():
    """The update itself is that of fp32 AdamW from the decoded moments."""
    tensors = states(4096)
    momentum, variance = decode_moments(*tensors[2:])
    wide = [tensors[0].float(), tensors[1].clone(), momentum, variance]
    adamw_(*wide, step=5)
    adamw8_(*tensors, step=5)
    now_momentum, now_variance = decode_moments(*tensors[2:])
    by_momentum, by_root = rounding_bounds(wide[2], wide[3])
    assert torch.all((now_momentum - wide[2]).abs() <= by_momentum * 1.00001)
    live = now_variance.sqrt() > by_root * 1.001  # elements that were not raised to the smallest code
    assert torch.all(((now_variance.sqrt() - wide[3].sqrt()).abs() <= by_root * 1.00001)[live])
    assert live.float().mean() > 0.9
    near = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(tensors[0].float(), wide[0], rtol=near, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 300), st.integers(0, 1000))
def test_codes_survive_decoding_and_encoding(numel, seed):
    codes = states(numel, seed=seed)[2:]
    for _ in range(2):  # encoding is idempotent
        moments = decode_moments(*codes)
        codes = encode_moments(*moments)
        again = decode_moments(*codes)
        assert torch.equal(again[0], moments[0])
        unfloored = moments[1] > 0
        assert torch.equal(again[1][unfloored], moments[1][unfloored])


def test_encoding_rounds_to_nearest_and_refuses_invalid_moments():
    make = torch.Generator().manual_seed(1)
    momentum, variance = torch.randn(5, 77, generator=make), torch.rand(5, 77, generator=make).square()
    codes = encode_moments(momentum, variance)
    assert [tuple(t.shape) for t in codes] == [(5, 77), (5, 77), scales_shape(5 * 77)]
    again = decode_moments(*codes)
    by_momentum, by_root = rounding_bounds(momentum, variance)
    assert torch.all((again[0] - momentum).abs() <= by_momentum / 2 * 1.00001)
    assert torch.all((again[1].sqrt() - variance.sqrt()).abs() <= by_root * 1.00001)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="momentum has values that are infinite, NaN, negative"):
            encode_moments(torch.tensor([bad]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="variance has values"):
        encode_moments(torch.tensor([1.0]), torch.tensor([-1.0]))


def test_variance_decays_with_its_gradients_unlike_nearest_rounding():
    """Gradients of one size, then a tenth of it: after 3,000 more steps an
    average over 1,000 steps is well on its way down."""
    numel, make = 1024, torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(numel, generator=make))
    param, moments = torch.zeros(numel).bfloat16(), zeros(numel)
    exact, nearest = torch.zeros(numel), zeros(numel)
    for step in range(1, 4001):
        grad = torch.randn(numel, generator=make) * sizes * (1 if step <= 1000 else 0.1)
        adamw8_(param, grad, *moments, step=step, lr=0.0, weight_decay=0.0, seed=1)
        exact = 0.999 * exact + 0.001 * grad.square()
        if step > 1000 and step % 20 == 0:  # one step in twenty suffices to see that none of them changes it
            _, old = decode_moments(*nearest)
            nearest = list(encode_moments(torch.zeros(numel), 0.999 * old + 0.001 * grad.square()))
        elif step == 1000:
            nearest = list(encode_moments(torch.zeros(numel), exact))
            stale = decode_moments(*nearest)[1]
    ratio = (decode_moments(*moments)[1] / exact).sqrt()
    assert ratio.median().item() == pytest.approx(1, abs=0.05)
    assert ratio.quantile(0.02) > 0.5
    assert ratio.quantile(0.98) < 1.6
    assert (decode_moments(*nearest)[1] >= stale * 0.98).float().mean() > 0.9
    assert (stale / exact).sqrt().median() > 2.5


def test_outlier_gradient_causes_no_huge_step_in_its_block():
    """One gradient is 10^10 times its neighbours: their variance is below every code and must not become zero."""
    param, grad, moments = torch.zeros(32).bfloat16(), torch.full((32,), 1e-5), zeros(32)
    for step in range(1, 100):
        grad[0] = 1e5 if step == 1 else 1e-5
        adamw8_(param, grad, *moments, step=step, lr=1e-3, weight_decay=0.0)
        assert torch.all(decode_moments(*moments)[1] > 0)
    assert param.abs().max() < 99 * 1e-3 * 4


def test_training_converges_like_fp32():
    """Least squares: the loss falls alike."""
    make = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 96, generator=make) * torch.exp(torch.randn(96, generator=make))
    targets = inputs @ torch.randn(96, generator=make)

    def final_loss(eight: bool):
        param = torch.zeros(96, dtype=torch.bfloat16 if eight else torch.float32)
        moments = zeros(96) if eight else [torch.zeros(96), torch.zeros(96)]
        for step in range(1, 1001):
            weight = param.float().clone().requires_grad_()
            loss = (inputs @ weight - targets).square().mean()
            loss.backward()
            update = adamw8_ if eight else adamw_
            update(param, weight.grad, *moments, step=step, lr=2e-2, weight_decay=0.0, seed=7)
        return loss.item()

    start = targets.square().mean().item()
    assert final_loss(False) < 1e-2 * start
    assert final_loss(True) < 1e-2 * start


def test_bytes_per_parameter_match_the_constant():
    tensors = states(3200)
    kept = [tensors[0], *tensors[2:]]
    assert sum(t.nbytes for t in kept) == 3200 * BYTES_PER_PARAMETER
    assert BYTES_PER_PARAMETER <= 4.2


@pytest.mark.parametrize(("index", "name"), [(0, "parameter"), (1, "gradient")])
def test_nan_values_are_reported_by_tensor_and_element(index, name):
    tensors = states(5000)
    tensors[index][4321] = math.nan
    kept = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=f"{name} is nan at element 14561 before step 6"):
        adamw8_(*tensors, step=6, element_offset=10_240)
    block = slice(4320, 4352)
    for now, then in zip(tensors[:4], kept[:4]):
        assert torch.equal(now[block].nan_to_num(), then[block].nan_to_num())
    assert torch.equal(tensors[4][135], kept[4][135])
    assert not torch.equal(tensors[2][:64], kept[2][:64])


def test_invalid_scale_is_reported_by_tensor_and_block():
    tensors = states(64)
    tensors[4][1, 0] = 255
    tensors[2][32:] = 7
    with pytest.raises(RuntimeError, match="momentum has scale 255, which is no number, in the block of element 32 "):
        adamw8_(*tensors, step=1)


def test_bad_input_is_refused():
    good = states(64)
    for index, other, says in [
        (0, torch.ones(64), "param has dtype Float: use bfloat16"),
        (1, torch.ones(63), r"grad has shape \[63\], param \[64\]"),
        (1, torch.ones(64, dtype=torch.float64), "grad has dtype Double"),
        (1, torch.ones(128)[::2], "grad is not contiguous"),
        (2, torch.ones(64, dtype=torch.int8), "exp_avg has dtype Char: use uint8"),
        (2, good[2].view(2, 32), r"exp_avg has shape \[2, 32\], expected \[64\]"),
        (3, torch.zeros(128, dtype=torch.uint8)[::2], "exp_avg_sq is not contiguous"),
        (4, torch.zeros(1, 2, dtype=torch.uint8), r"scales has shape \[1, 2\], expected \[2, 2\]"),
    ]:
        bad = [other if i == index else t for i, t in enumerate(good)]
        with pytest.raises(ValueError, match=says):
            adamw8_(*bad, step=1)
    for options, says in [
        ({"step": 0}, "adamw8: step 0: steps are counted from one"),
        ({"step": 1, "lr": -1.0}, "learning rate"),
        ({"step": 1, "element_offset": 16}, "element offset 16 is inside a block: cut tensors at multiples of 32"),
    ]:
        with pytest.raises(ValueError, match=says):
            adamw8_(*good, **options)


def test_empty_tensors_and_parameters_requiring_gradients_are_accepted():
    adamw8_(*states(0), step=1)
    param, grad, *moments = states(100)
    weight = torch.nn.Parameter(param)
    adamw8_(weight, grad, *moments, step=1)
    assert weight.requires_grad


def test_operator_has_a_fake_for_tracing():
    op = torch.ops.memascend.adamw8_.default
    options = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    library.opcheck(op, tuple(states(40)), options)
    with pytest.raises(ValueError, match="shape"):
        op(*(t.to("meta") for t in [*states(64)[:4], states(96)[4]]), **options)


# --- The optimizer.


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(33, 17), (129,), (), (4, 5, 6)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()


def allocator(**options):
    return PageAlignedPinnedAllocator(Ledger(**options), lock=False)


def test_optimizer_matches_the_operator_with_parameters_aligned_to_blocks():
    params, first = parameters(), 0
    optimizer = AdamW8bit(params, lr=1e-2, seed=6, allocator=allocator())
    expected = [[p.detach().clone(), *(t.view(-1) for t in zeros(p.numel())[:2]), zeros(p.numel())[2]] for p in params]
    for step in (1, 2, 3):
        give_gradients(params, step)
        optimizer.step()
        first = 0
        for parameter, (kept, *moments) in zip(params, expected, strict=True):
            moments[:2] = [t.view(parameter.shape) for t in moments[:2]]
            adamw8_(kept, parameter.grad, *moments, step=step, lr=1e-2, seed=6, element_offset=first)
            first += scales_shape(parameter.numel())[0] * 32
            assert torch.equal(parameter.detach(), kept)


def test_resume_from_saved_state_gives_the_same_bits(tmp_path):
    whole = parameters()
    optimizer = AdamW8bit(whole, allocator=allocator())
    for step in range(3):
        give_gradients(whole, step)
        optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in whole]}, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved")
    resumed = [torch.nn.Parameter(weight) for weight in saved["weights"]]
    other = AdamW8bit(resumed, lr=1.0, allocator=allocator())
    other.load_state_dict(saved["optimizer"])
    for step in range(3, 5):
        for params, each in ((whole, optimizer), (resumed, other)):
            give_gradients(params, step)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))
    assert other.state[resumed[0]]["exp_avg"].dtype == torch.uint8


def test_ledger_records_every_state_by_name():
    ledger = Ledger()
    params = [("weight", torch.nn.Parameter(torch.zeros(40, 8).bfloat16()))]
    AdamW8bit(params, allocator=PageAlignedPinnedAllocator(ledger, lock=False)).allocate_states()
    sizes = {entry.name: entry.requested_bytes for entry in ledger.entries()}
    assert sizes == {"weight exp_avg": 320, "weight exp_avg_sq": 320, "weight scales": 20}


def test_optimizer_refuses_fp32_parameters_and_states_of_other_optimizers():
    with pytest.raises(ValueError, match=r"AdamW8bit: a parameter of .* contiguous CPU tensors of bfloat16 are needed"):
        AdamW8bit([torch.nn.Parameter(torch.ones(3))])
    params = parameters()
    give_gradients(params, 0)
    theirs = torch.optim.AdamW(params)
    theirs.step()
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is not a uint8 tensor: convert float32 states"):
        AdamW8bit(params, allocator=allocator()).load_state_dict(theirs.state_dict())

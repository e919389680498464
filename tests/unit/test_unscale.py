"""Unscale, norm and overflow in one pass, against torch doing the three one after the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from memascend.ops.unscale import unscale_norm_overflow_

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INT_OF = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def reference(grad: torch.Tensor, inverse_scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, float, bool]:
    out = (grad.float() * torch.tensor(inverse_scale, dtype=torch.float32)).to(dtype)
    return out, out.double().square().sum().item(), not bool(torch.isfinite(out).all())


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    finite = torch.isfinite(b)
    same = torch.equal(a.view(INT_OF[a.dtype])[finite], b.view(INT_OF[b.dtype])[finite])
    return same and torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(torch.isinf(a), torch.isinf(b))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.booleans(), st.floats(-1e3, 1e3), st.data())
def test_result_agrees_with_torch_on_random_bits(dtype, widen, inverse_scale, data):
    bits = 16 if dtype.itemsize == 2 else 32
    words = data.draw(st.lists(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), max_size=150))
    if data.draw(st.booleans()):  # mostly finite values; otherwise nearly every example would overflow
        words = [word & ~0x4000 if bits == 16 else word & ~0x40000000 for word in words]
    grad = torch.tensor(words, dtype=INT_OF[dtype]).view(dtype)
    out_dtype = torch.float32 if widen else dtype
    expected, squares, overflow = reference(grad, inverse_scale, out_dtype)
    out = torch.empty(len(words), dtype=torch.float32) if widen else None
    result = unscale_norm_overflow_(grad, inverse_scale, out)
    assert equal_bits(out if widen else grad, expected)
    assert result.overflow.item() == overflow
    assert (
        not math.isfinite(result.sum_squares) if overflow else math.isclose(result.sum_squares, squares, rel_tol=1e-12)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_has_the_same_bits_with_any_thread_count(dtype):
    grad = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.get_num_threads()
    sums = set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            sums |= {unscale_norm_overflow_(grad.clone(), 0.125).sum_squares.item() for _ in range(3)}
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def test_norm_is_accurate_where_a_float32_sum_is_not():
    grad = torch.full((3_000_000,), 1e-3)
    grad[0] = 1e6
    squares = unscale_norm_overflow_(grad, 1.0).sum_squares.item()
    assert squares == pytest.approx(1e12 + 2_999_999 * float(grad[1]) ** 2, rel=1e-14)


@pytest.mark.parametrize("place", [0, 31, 65_535, 65_536, 99_999])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_nonfinite_value_anywhere_is_an_overflow(place, bad):
    grad = torch.ones(100_000)
    grad[place] = bad
    assert unscale_norm_overflow_(grad, 0.5).overflow.item() is True
    assert (grad == 0.5).sum() == 99_999


def test_dense_permuted_and_empty_layouts_are_accepted():
    grad = torch.randn(4, 5, 6)
    expected = grad * 0.25
    result = unscale_norm_overflow_(grad.permute(2, 0, 1), 0.25)
    assert torch.equal(grad, expected)
    assert result.sum_squares.item() == pytest.approx(expected.double().square().sum().item(), rel=1e-12)
    assert unscale_norm_overflow_(torch.empty(0), 2.0) == (torch.tensor(0.0, dtype=torch.float64), torch.tensor(False))


def test_bad_input_is_refused():
    ones = torch.ones(4)
    for grad, out, says in [
        (torch.ones(4, 4)[:, ::2], None, "not one dense run"),
        (torch.ones(4, dtype=torch.float64), None, "use float32, float16 or bfloat16"),
        (torch.ones(4, dtype=torch.int32), None, "use float32, float16 or bfloat16"),
        (ones, torch.ones(5), "shape"),
        (ones.half(), torch.ones(4, dtype=torch.bfloat16), "out is float32"),
        (ones, ones, "shares memory"),
    ]:
        with pytest.raises(ValueError, match=says):
            unscale_norm_overflow_(grad, 0.5, out)
    for scale in (math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="is the loss scale zero"):
            unscale_norm_overflow_(ones, scale)
    assert torch.equal(ones, torch.ones(4))


def test_operators_have_fakes_for_tracing():
    in_place = torch.ops.memascend.unscale_norm_overflow_.default
    to_other = torch.ops.memascend.unscale_norm_overflow.default
    for dtype in DTYPES:
        grad = torch.ones(5, dtype=dtype)
        library.opcheck(in_place, (grad, 0.5))
        library.opcheck(to_other, (grad, 0.5, torch.empty(5)))
    with pytest.raises(ValueError, match="shape"):
        to_other(torch.empty(3, device="meta"), 0.5, torch.empty(4, device="meta"))

"""The overflow checks against torch.isfinite, on every class of bit patterns and every layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

from memascend.memory import tracking
from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

CHECKS = [has_overflow, has_overflow_chain, has_overflow_aminmax]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INT_OF = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def reference(tensor: torch.Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_patterns_overflow_only_when_not_finite(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    assert not any(check(finite) for check in CHECKS)
    for bad in patterns[~torch.isfinite(patterns)][::7]:
        assert has_overflow(bad)
    assert len(finite) < 2**16


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "max", "-max", "tiny", "0"])
def test_special_values_are_found_at_any_position(check, dtype, value):
    limits = torch.finfo(dtype)
    number = {"max": limits.max, "-max": limits.min, "tiny": limits.smallest_normal / 2}.get(value)
    number = float(value) if number is None else number
    for numel in (1, 63, 64, 65, 1000, 200_001):
        for place in {0, numel // 2, numel - 1}:
            tensor = torch.full((numel,), -1.0, dtype=dtype)
            tensor[place] = number
            assert check(tensor) == reference(tensor) == (value in ("inf", "-inf", "nan"))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.data())
def test_checks_agree_with_isfinite_on_random_bits_and_views(dtype, data):
    bits = 16 if dtype.itemsize == 2 else 32
    words = data.draw(st.lists(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), min_size=1, max_size=200))
    if data.draw(st.booleans()):  # mostly finite values; otherwise nearly every example would overflow
        words = [word & ~0x4000 if bits == 16 else word & ~0x40000000 for word in words]
    tensor = torch.tensor(words, dtype=INT_OF[dtype]).view(dtype)
    start = data.draw(st.integers(0, len(words)))
    step = data.draw(st.integers(1, 5))
    for view in (tensor, tensor[start:], tensor[start::step], tensor.expand(3, -1), tensor[:, None].expand(-1, 2)):
        results = {check(view) for check in CHECKS}
        assert results == {reference(view)}


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 2, 1), (4, 5, 6)])
def test_views_are_checked_for_exactly_their_own_elements(place):
    base = torch.ones(5, 6, 7)
    base[place] = float("nan")
    views = [
        base,
        base.t() if base.dim() == 2 else base.transpose(0, 2),
        base.permute(1, 2, 0),
        base[::2],
        base[:, 1:4],
        base[..., ::3],
        base[2:, :3, 1],
        base.transpose(0, 1)[1:],
        base[0].expand(4, 6, 7),
        base.unfold(2, 3, 1),
        base.as_strided((3, 3), (1, 1)),
    ]
    for view in views:
        assert has_overflow(view) == reference(view), (view.shape, view.stride())
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    image[1, 2, 3, 4] = float("inf")
    assert has_overflow(image)
    assert not has_overflow(image[:1])


@pytest.mark.parametrize("check", CHECKS)
def test_empty_tensors_and_scalars_are_checked(check):
    assert check(torch.empty(0)) is False
    assert check(torch.empty(3, 0, 2)) is False
    assert check(torch.tensor(1.0)) is False
    assert check(torch.tensor(float("nan"))) is True


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("check", CHECKS)
def test_integers_are_refused(check, dtype):
    with pytest.raises(ValueError, match="not supported: use"):
        check(torch.zeros(3, dtype=dtype))


def test_fused_check_refuses_unsupported_tensors():
    with pytest.raises(ValueError, match="Double is not supported: use float32, float16 or bfloat16"):
        has_overflow(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="use has_overflow_aminmax"):
        has_overflow(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="dense CPU tensors"):
        has_overflow(torch.zeros(3).to_sparse())


def test_tensors_that_require_gradients_can_be_checked():
    weight = torch.ones(10, requires_grad=True)
    assert not has_overflow(weight)
    assert not has_overflow(weight * 2)
    assert torch.ops.memascend.has_overflow(weight * float("inf"))


def test_overflow_is_found_with_any_number_of_threads():
    tensor = torch.ones(3_000_000)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert not has_overflow(tensor)
            tensor[2_999_999] = float("inf")
            assert has_overflow(tensor)
            tensor[2_999_999] = 1.0
    finally:
        torch.set_num_threads(before)


def test_fused_check_takes_no_memory_and_chain_takes_five_quarters():
    """The peak that the paper measures: an absolute copy (4 B) and a flag (1 B) per element, on top of 4 B."""
    tensor = torch.ones(1_000_000)
    strided = torch.ones(1000, 2000)[:, ::2]

    def spike(check, subject):
        tracking.install()
        try:
            start = tracking.live_bytes()["host"]
            tracking.reset_peaks()
            check(subject)
            return tracking.peak_bytes()["host"] - start
        finally:
            tracking.uninstall()

    assert spike(has_overflow, tensor) == spike(has_overflow, strided) == 0
    assert spike(has_overflow_chain, tensor) == pytest.approx(1.25 * 4_000_000, rel=0.01)
    assert spike(has_overflow_aminmax, tensor) < 100_000


def test_operator_supports_tracing_with_fake_tensors():
    assert torch.ops.memascend.has_overflow(torch.tensor([1.0, float("nan")])).item() is True
    with FakeTensorMode():
        result = torch.ops.memascend.has_overflow(torch.empty(5))
    assert (result.shape, result.dtype) == ((), torch.bool)
    library.opcheck(torch.ops.memascend.has_overflow.default, (torch.ones(5),))

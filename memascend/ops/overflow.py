"""Overflow checks (is any element infinite or NaN?): the baseline's chain, a torch reduction, and a fused native pass.

The fused check (MemAscend, fused overflow check) reads every element once, tests the exponent bits, stops soon after
the first hit, and needs no temporary memory; the chain needs 1.25 times the buffer at its peak (fp32: a copy of 4 bytes
and a flag of 1 byte per element).
"""

from __future__ import annotations

import torch

from memascend import _C


def has_overflow(tensor: torch.Tensor) -> bool:
    """Return whether any element is infinite or NaN, by the fused native pass.

    `tensor` is a dense CPU tensor of float32, float16 or bfloat16, of any shape and strides. Uses
    `torch.get_num_threads()` threads. Returns False for an empty tensor. Raises ValueError for other dtypes, layouts
    and devices. The operator `torch.ops.memascend.has_overflow` does the same and returns a 0-d bool tensor.
    """
    return _C.has_overflow(tensor)


def has_overflow_chain(tensor: torch.Tensor) -> bool:
    """Check as ZeRO-3 does (DeepSpeed `stage3.has_overflow`): `isinf().any()`, then `isnan().any()`, always both."""
    _require_float(tensor)
    infinite = torch.isinf(tensor).any()
    not_a_number = torch.isnan(tensor).any()
    return bool(infinite | not_a_number)


def has_overflow_aminmax(tensor: torch.Tensor) -> bool:
    """Check by one torch reduction: both extremes are finite exactly if all elements are, because NaN propagates."""
    _require_float(tensor)
    if tensor.numel() == 0:
        return False
    low, high = torch.aminmax(tensor)
    return not (bool(torch.isfinite(low)) and bool(torch.isfinite(high)))


def _require_float(tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"overflow check: dtype {tensor.dtype} is not supported: use a floating-point tensor")

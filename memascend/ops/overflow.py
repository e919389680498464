"""Is any element infinite or NaN? Three ways: the baseline's chain, one line of torch, and one fused native pass.

The fused check (MemAscend, fused overflow check) reads every element once, tests the exponent bits, stops soon after
the first hit, and takes no temporary memory; the chain takes 1.25 times the buffer at its peak (fp32: a copy of 4 bytes
and a flag of 1 byte an element).
"""

from __future__ import annotations

import torch

from memascend import _C


def has_overflow(tensor: torch.Tensor) -> bool:
    """Fused native check of a dense CPU tensor of float32, float16 or bfloat16, of any shape and strides.

    Uses `torch.get_num_threads()` threads. False for an empty tensor. Raises ValueError for other dtypes, layouts and
    devices. The same check is the operator `torch.ops.memascend.has_overflow`, which returns a 0-d bool tensor.
    """
    return _C.has_overflow(tensor)


def has_overflow_chain(tensor: torch.Tensor) -> bool:
    """As ZeRO-3 does it (DeepSpeed `stage3.has_overflow`): `isinf().any()`, then `isnan().any()`, both always run."""
    _require_float(tensor)
    infinite = torch.isinf(tensor).any()
    not_a_number = torch.isnan(tensor).any()
    return bool(infinite | not_a_number)


def has_overflow_aminmax(tensor: torch.Tensor) -> bool:
    """One reduction of torch: the extremes are finite exactly if all elements are (NaN wins both)."""
    _require_float(tensor)
    if tensor.numel() == 0:
        return False
    low, high = torch.aminmax(tensor)
    return not (bool(torch.isfinite(low)) and bool(torch.isfinite(high)))


def _require_float(tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"overflow check: dtype {tensor.dtype} is not supported: use a floating-point tensor")

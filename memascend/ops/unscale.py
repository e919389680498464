"""Unscale gradients, sum their squares and look for overflow: one pass, where a step otherwise takes three or four."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memascend import _C

_LOADED = _C.__name__  # importing it registers the operators


class UnscaleResult(NamedTuple):
    """`sum_squares`: float64, of the values as written; infinite or NaN with an overflow. Both are 0-d CPU tensors."""

    sum_squares: torch.Tensor
    overflow: torch.Tensor


def unscale_norm_overflow_(grad: torch.Tensor, inverse_scale: float, out: torch.Tensor | None = None) -> UnscaleResult:
    """grad *= inverse_scale, in place, or into `out` (float32, of the same shape, where a 16-bit gradient is widened).

    `grad`: dense CPU tensor of float32, float16 or bfloat16; in place any layout that is one run of memory, with `out`
    contiguous. The product is taken in float32 and rounded to the output's dtype. The sum's bits depend on the number
    of elements alone, not on threads or instruction set. With an inverse scale of 1 in place nothing is written.
    The whole pass is done with an overflow too, so that what is left behind does not depend on timing.
    Raises ValueError for other dtypes, shapes and layouts, and for an inverse scale that is not finite.
    """
    with torch.no_grad():
        if out is None:
            return UnscaleResult(*torch.ops.memascend.unscale_norm_overflow_(grad, inverse_scale))
        return UnscaleResult(*torch.ops.memascend.unscale_norm_overflow(grad, inverse_scale, out))

"""Unscaling of gradients, sum of squares and overflow check in one pass, for which a step otherwise needs 3 or 4."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memascend import _C

_LOADED = _C.__name__  # importing it registers the operators


class UnscaleResult(NamedTuple):
    """Results of the pass, both 0-d CPU tensors.

    `sum_squares` is float64, the sum over the values as written; infinite or NaN if there is an overflow.
    """

    sum_squares: torch.Tensor
    overflow: torch.Tensor


def unscale_norm_overflow_(grad: torch.Tensor, inverse_scale: float, out: torch.Tensor | None = None) -> UnscaleResult:
    """Multiply `grad` by `inverse_scale` in place, or into `out`, and return sum of squares and overflow.

    `grad` is a dense CPU tensor of float32, float16 or bfloat16; in place it may have any layout that is one run of
    memory, with `out` it must be contiguous. `out` is float32 and of the same shape, for widening a 16-bit gradient.
    The product is computed in float32 and rounded to the output's dtype. The order of the sum depends only on the
    number of elements, so threads and instruction set change no bit of it. In place, an inverse scale of 1 writes
    nothing. The pass is completed even after an overflow, so that the tensor's contents afterwards do not depend on
    timing. Raises ValueError for other dtypes, shapes and layouts, and for an inverse scale that is not finite.
    """
    with torch.no_grad():
        if out is None:
            return UnscaleResult(*torch.ops.memascend.unscale_norm_overflow_(grad, inverse_scale))
        return UnscaleResult(*torch.ops.memascend.unscale_norm_overflow(grad, inverse_scale, out))

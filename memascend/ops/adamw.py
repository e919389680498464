"""One AdamW step over CPU memory, in one pass: fp32 states, or bf16 states with stochastic rounding."""

from __future__ import annotations

import torch

from memascend import _C

_LOADED = _C.__name__  # importing it registers the operators


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    half_copy: torch.Tensor | None = None,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
    seed: int = 0,
    element_offset: int = 0,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; the defaults are those of torch.optim.AdamW.

    All tensors: contiguous, CPU, one shape. The three states are all float32, or all bfloat16 and then rounded
    stochastically by a counter-based generator (ARS-5 keyed by `seed`, `step` and the element's index; 16 bits a state,
    of which any two are independent): equal
    inputs give equal bits, with any number of threads and on any processor. `grad` is float32, float16 or bfloat16 and
    multiplied by `grad_scale` (1 / loss scale, clipping) as it is read. `half_copy` (float16 or bfloat16) receives the
    updated parameter, rounded to nearest. `step` counts from one.

    A slice of a larger tensor gives the bits of the whole if `element_offset` is the index of its first element.

    Raises ValueError for shapes, dtypes and options that do not fit. Raises RuntimeError, naming tensor and element, if
    a number is infinite or NaN before or after the step (or a variance negative); the group of 32 elements around it is
    then unchanged and the rest is updated. Call has_overflow or unscale_norm_overflow_ on the gradients first.
    """
    with torch.no_grad():
        torch.ops.memascend.adamw_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            half_copy,
            step=step,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            seed=seed,
            element_offset=element_offset,
        )

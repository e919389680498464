"""`F.linear` of 16-bit tensors on a CPU with products in fp32: PyTorch's fp16 products are some 800 times slower."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Of a weight: its fp32 copy, and what MKL packs of it (5 MiB for the output matrix of a 7B twin at k = 16, pageable),
# would be held at once; a GPU holds neither.
_ROWS_AT_ONCE = 256


def linear_in_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` of 16-bit tensors, products and sums in fp32, rounded once; (..., in), (out, in) -> (..., out)."""
    y, x = x.new_empty(*x.shape[:-1], len(weight)), x.float()
    for rows in (slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(weight), _ROWS_AT_ONCE)):
        part = x @ weight[rows].float().t()
        y[..., rows] = part + bias[rows].float() if bias is not None else part
    return y


class _LinearInFp32(torch.autograd.Function):
    """``F.linear`` of 16-bit tensors with products in fp32; what is saved stays 16-bit."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # x (..., in), weight (out, in), bias (out) or None -> (..., out)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear_in_fp32(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = grad.float()
        grad_x = (g @ weight.float()).to(x.dtype)
        rows = g.reshape(-1, g.shape[-1])
        grad_w = (rows.t() @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype)
        grad_b = rows.sum(0).to(weight.dtype) if ctx.has_bias else None
        return grad_x, grad_w, grad_b


def products_in_fp32(*dtypes: torch.dtype) -> Callable[[], None]:
    """Keep storage and rounding of 16-bit results; compute the products of ``F.linear`` in fp32. On the CPU only.

    Returns what undoes it.
    """
    stock = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype in dtypes and x.device.type == "cpu":
            return _LinearInFp32.apply(x, weight, bias)
        return stock(x, weight, bias)

    torch.nn.functional.linear = linear

    def undo() -> None:
        torch.nn.functional.linear = stock

    return undo


def fp16_products_in_fp32() -> Callable[[], None]:
    """As training in fp16 on a CPU needs it."""
    return products_in_fp32(torch.float16)

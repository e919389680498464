"""`F.linear` of 16-bit tensors on a CPU with products in fp32, for CPUs without arithmetic of that type.

PyTorch's fp16 products are some 800 times slower. Its bf16 products are fast where the CPU has instructions for them
(AVX-512 and later); without these instructions a product of the backward pass takes far longer than one in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# Rows of a weight converted at a time. Otherwise a whole fp32 copy of the weight and MKL's packed copy of that (5 MiB
# for the output matrix of a 7B twin at k = 16, pageable) would be in memory together; a GPU needs neither.
_ROWS_AT_ONCE = 256


def bf16_is_native() -> bool:
    """Return whether PyTorch has bf16 products for this CPU, in oneDNN."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def computed_in_fp32(tensor: torch.Tensor) -> bool:
    """Return whether products with this tensor are computed in fp32: on a CPU those of fp16, and of the dtypes that
    `products_in_fp32` was called with."""
    in_fp32 = (torch.float16, *getattr(torch.nn.functional.linear, "in_fp32", ()))
    return tensor.device.type == "cpu" and tensor.dtype in in_fp32


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` of 16-bit matrices (m, k) and (k, n) in fp32, without a whole fp32 copy of `b`."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for rows in _slices(b):
        total.addmm_(a[:, rows].float(), b[rows].float())
    return total


def linear_in_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``F.linear`` of 16-bit tensors (..., in), (out, in) -> (..., out), summed in fp32 and rounded once."""
    y, x = x.new_empty(*x.shape[:-1], len(weight)), x.float()
    for rows in _slices(weight):
        part = x @ weight[rows].float().t()
        y[..., rows] = part + bias[rows].float() if bias is not None else part
    return y


def _slices(weight: torch.Tensor) -> Iterator[slice]:
    """Return slices of the weight's rows that are small enough to be converted as a whole."""
    return (slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(weight), _ROWS_AT_ONCE))


class _LinearInFp32(torch.autograd.Function):
    """``F.linear`` of 16-bit tensors with products in fp32; the tensors saved for backward stay 16-bit."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # x (..., in), weight (out, in), bias (out) or None -> (..., out)
        ctx.save_for_backward(x, weight)
        return linear_in_fp32(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_rows = grad.reshape(-1, grad.shape[-1]).float()
        x_rows = x.reshape(-1, x.shape[-1]).float() if of_weight else None
        grad_x = grad_rows.new_zeros(len(grad_rows), weight.shape[1]) if of_x else None
        grad_w = torch.empty_like(weight) if of_weight else None
        for rows in _slices(weight):
            if grad_x is not None:
                grad_x.addmm_(grad_rows[:, rows], weight[rows].float())
            if grad_w is not None:
                grad_w[rows] = grad_rows[:, rows].t() @ x_rows
        grad_b = grad_rows.sum(0).to(weight.dtype) if of_bias else None
        return grad_x.to(x.dtype).view(x.shape) if grad_x is not None else None, grad_w, grad_b


def products_in_fp32(*dtypes: torch.dtype) -> Callable[[], None]:
    """Replace ``F.linear`` for CPU tensors of these dtypes: products in fp32, results stored and rounded in 16 bits.

    Returns a function that undoes the replacement.
    """
    stock = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype in dtypes and x.device.type == "cpu":
            return _LinearInFp32.apply(x, weight, bias)
        return stock(x, weight, bias)

    linear.in_fp32 = (*dtypes, *getattr(stock, "in_fp32", ()))
    torch.nn.functional.linear = linear

    def undo() -> None:
        torch.nn.functional.linear = stock

    return undo


def products(dtype: torch.dtype, matmul: str, device: torch.device) -> str:
    """Return how `choose_products` has products computed: "fp32" or "native"."""
    if device.type != "cpu" or dtype == torch.float32:
        return "native"
    slow = dtype == torch.float16 or (matmul == "auto" and not bf16_is_native())
    return "fp32" if slow or matmul == "fp32" else "native"


def choose_products(dtype: torch.dtype, matmul: str, device: torch.device) -> Callable[[], None]:
    """Have the products of a training run computed as `matmul` says; return a function that undoes it.

    On a CPU the products of bf16 matrices are PyTorch's own (`native`) or computed in `fp32`; `auto` is fp32 if the CPU
    has no bf16 arithmetic. Products of fp16 are always computed in fp32 on a CPU. On a GPU all products are native.
    """
    return products_in_fp32(dtype) if products(dtype, matmul, device) == "fp32" else lambda: None


def fp16_products_in_fp32() -> Callable[[], None]:
    """Compute fp16 products in fp32, as training in fp16 on a CPU needs; return a function that undoes it."""
    return products_in_fp32(torch.float16)

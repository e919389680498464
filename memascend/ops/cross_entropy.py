"""Cross-entropy of a linear head that never holds the logits of more than a chunk of tokens.

The logits of 4 x 4,096 tokens over the 152,064 words of Qwen2.5 take 4.6 GiB in 16 bits, and twice as much again in the
fp32 in which the loss is computed. Here they exist for one chunk of tokens at a time. The backward pass computes them
again, because the loss scale is known only then: fp16 gradients computed earlier would underflow. The idea is that of
Liger-Kernel's fused linear cross-entropy; this implementation is plain torch, for any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from memascend.ops.half_linear import computed_in_fp32, product_in_fp32

IGNORE_INDEX = -100  # torch's and transformers' default
# Bytes of the logits of one chunk in the model's dtype, in fp32 and as gradients: some 145 tokens at Qwen2.5's
# vocabulary in bf16.
DEFAULT_CHUNK_BYTES = 256 << 20
_ROWS = 16384  # rows of the weight's gradient computed at a time: a ninth of Qwen2.5's vocabulary


@dataclass(frozen=True)
class LogitTransform:
    """A model's transform of its logits before the loss: x * scale, then softcap * tanh(x / softcap) (Gemma 2)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed logits; the given ones stay unchanged."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def backward(self, grad: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the raw logits, given that of the transformed ones; changes `grad` in place."""
        if self.softcap is not None:
            grad *= 1 - (transformed / self.softcap).square_()
        if self.scale != 1.0:
            grad *= self.scale
        return grad


def chunked_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    transform: LogitTransform | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> torch.Tensor:
    """Return `cross_entropy(transform(linear(hidden, weight, bias)).float(), labels)` as an fp32 scalar.

    Args:
        hidden: (..., H), floating point.
        weight, bias: (V, H) and (V,), of the same dtype as `hidden`, or cast by autocast.
        labels: (...) of int64, already shifted; each in [0, V) or `ignore_index`.
        reduction: "mean" over the labels that are not ignored (NaN if all are, as in torch) or "sum".
        chunk_bytes: bound on the memory of logits and their gradients (at least one token is processed at a time).

    The gradients are rounded once; that of the weight is summed in fp32 over chunks. Under ZeRO-3 the weight must be
    gathered, once in forward and once in backward: call this function inside the head module's forward. Raises
    ValueError for shapes and options that do not fit.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross-entropy: reduction {reduction!r} is unknown: use 'mean' or 'sum'")
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"cross-entropy: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
            f"{tuple(labels.shape)}: need (..., H), (V, H) and (...); a weight under ZeRO-3 must be gathered"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    row_bytes = weight.shape[0] * (2 * torch.float32.itemsize + 2 * hidden.dtype.itemsize)
    settings = _Settings(ignore_index, transform or LogitTransform(), max(1, chunk_bytes // row_bytes))
    flat = labels.reshape(-1).to(hidden.device)
    with torch.autocast(device, enabled=False):
        total = _ChunkedLinearCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat, settings)
    if reduction == "sum":
        return total
    return total / (flat != ignore_index).sum()


@dataclass(frozen=True)
class _Settings:
    """Options of one loss. `chunk`: the number of tokens whose logits are computed at a time."""

    ignore_index: int
    transform: LogitTransform
    chunk: int  # tokens


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses of hidden (T, H), weight (V, H), bias (V) or None, and labels (T)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, settings):
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(losses)
        for begin in range(0, len(hidden), settings.chunk):
            rows = slice(begin, begin + settings.chunk)
            logits = settings.transform(torch.nn.functional.linear(hidden[rows], weight, bias).float())
            counted = labels[rows] != settings.ignore_index
            target = torch.where(counted, labels[rows], 0).unsqueeze(1)
            log_sums[rows] = torch.logsumexp(logits, dim=1)
            losses[rows] = (log_sums[rows] - logits.gather(1, target).squeeze(1)).masked_fill_(~counted, 0.0)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.settings = settings
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        settings, (need_hidden, need_weight, need_bias, *_) = ctx.settings, ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = _zeros_fp32(weight) if need_weight else None
        grad_bias = _zeros_fp32(bias) if need_bias else None
        for begin in range(0, len(hidden), settings.chunk):
            rows = slice(begin, begin + settings.chunk)
            counted = labels[rows] != settings.ignore_index
            target = target_columns(labels[rows], counted, 0, len(weight))
            scale = torch.where(counted, grad_loss.float(), 0.0)
            grad = grad_of_logits(hidden[rows], weight, bias, target, log_sums[rows], settings.transform, scale)
            if need_bias:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if need_hidden:
                grad_hidden[rows] = product(grad, weight)
            if need_weight:
                add_product(grad_weight, grad, hidden[rows])
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None


def target_columns(
    labels: torch.Tensor, counted: torch.Tensor, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each label (T) is in [begin, end), and its column (T, 1) in that range (0 for other labels)."""
    here = counted & (labels >= begin) & (labels < end)
    return here, torch.where(here, labels - begin, 0).unsqueeze(1)


def grad_of_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: tuple[torch.Tensor, torch.Tensor],
    log_sums: torch.Tensor,
    transform: LogitTransform,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return (softmax - one-hot) * scale through `transform`, in fp32, for the words of `weight`.

    `target` comes from `target_columns`; `log_sums` and `scale` have shape (T).
    """
    here, columns = target
    logits = transform(torch.nn.functional.linear(hidden, weight, bias).float())
    grad = logits - log_sums.unsqueeze(1) if transform.softcap is not None else logits.sub_(log_sums.unsqueeze(1))
    grad.exp_()
    grad.scatter_add_(1, columns, torch.where(here, -1.0, 0.0).unsqueeze(1))
    grad *= scale.unsqueeze(1)
    return transform.backward(grad, logits)


def _zeros_fp32(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _cast(total: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if total is None else total.to(like.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b`, with products in fp32 where `computed_in_fp32` says so."""
    return product_in_fp32(a, b) if computed_in_fp32(a) else a @ b


def add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad (c, V)^T @ hidden (c, H) to total (V, H, fp32), in blocks of rows so that no second (V, H) exists."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), hidden)
        return
    for begin in range(0, total.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        total[rows] += product(grad[:, rows].t(), hidden)

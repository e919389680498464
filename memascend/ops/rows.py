"""Embedding, head and its cross-entropy over a matrix of which only some rows are in memory at a time.

The matrix of an embedding or a head has one row per word: at Qwen2.5-7B's vocabulary it is larger than two blocks. Here
its *slices*, runs of consecutive rows, come one after the other, in forward and again in backward, and each slice's
gradient is passed on by itself. The embedding's gradient is bit-identical to torch's. A sum over the vocabulary
(the head's gradient of its input, the loss) is computed slice by slice, so that its last bits are those of training in
memory with the same slices (`WholeRows`), not those of training without slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from memascend.ops.cross_entropy import (
    DEFAULT_CHUNK_BYTES,
    IGNORE_INDEX,
    LogitTransform,
    add_product,
    grad_of_logits,
    product,
    target_columns,
)

_ROWS = "_memascend_rows"  # attribute of a module: its sliced matrix


class Gradients(Protocol):
    """Receiver of a matrix's gradients from one backward pass."""

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Receive the gradient of slice `number`; slices come in ascending order."""

    def end(self) -> torch.Tensor | None:
        """Return the gradient of the anchor, or None; called after all slices have been added."""


class Rows(Protocol):
    """A matrix by slices. `bounds`: (begin, end) rows of each; `anchor`: requires a gradient if the matrix does."""

    bounds: Sequence[tuple[int, int]]
    width: int
    dtype: torch.dtype
    anchor: torch.Tensor

    def open(self, number: int, ahead: Sequence[int] = ()) -> AbstractContextManager[torch.Tensor]:
        """Return a context with the rows of slice `number`, valid inside it; `ahead`: the slices requested next."""

    def gradients(self) -> Gradients:
        """Return the receiver of gradients for a forward pass that a backward pass will follow."""


def rows_of(module: nn.Module) -> Rows | None:
    """Return the sliced matrix of an embedding or a head, or None if its weight is whole."""
    return getattr(module, _ROWS, None)


def slice_module(module: nn.Module, rows: Rows) -> Callable[[], None]:
    """Let an nn.Embedding or nn.Linear compute over `rows` instead of its weight; return a function that undoes it.

    A `forward` set on the instance is kept: `can_be_sliced` requires that it has `takes_rows` set, so that it calls
    `rows_of` itself.
    """
    own = vars(module).get("forward")
    setattr(module, _ROWS, rows)
    if own is None:
        function = _embed if isinstance(module, nn.Embedding) else sliced_head
        module.forward = lambda inputs: function(module, inputs)
        module.forward.takes_rows = True

    def undo() -> None:
        delattr(module, _ROWS)
        if own is None and "forward" in vars(module):
            del module.forward

    return undo


def can_be_sliced(module: nn.Module) -> bool:
    """Return whether `slice_module` supports everything that the module does."""
    if not getattr(vars(module).get("forward"), "takes_rows", "forward" not in vars(module)):
        return False
    if type(module) is nn.Embedding:
        return not module.sparse and module.max_norm is None and not module.scale_grad_by_freq
    return type(module) is nn.Linear


class WholeRows:
    """Slices of a parameter in memory, summed in the same order as slices that are loaded on demand."""

    def __init__(self, weight: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        self.anchor, self.bounds = weight, list(bounds)
        self.width, self.dtype = weight.shape[1], weight.dtype

    def open(self, number: int, ahead: Sequence[int] = ()) -> AbstractContextManager[torch.Tensor]:
        begin, end = self.bounds[number]
        return contextlib.nullcontext(self.anchor.detach()[begin:end])

    def gradients(self) -> Gradients:
        return _WholeGradients()


class _WholeGradients:
    """Collects the gradients of all slices; their concatenation is the gradient of the anchor."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._found.append(gradient)

    def end(self) -> torch.Tensor:
        found, self._found = self._found, []
        return torch.cat(found)


# -- embedding ---------------------------------------------------------------------------------------------------------


def _embed(module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    """Look up `ids` (...) in a sliced embedding: (..., H). Raises IndexError for an index out of range."""
    rows = rows_of(module)
    padding = -1 if module.padding_idx is None else module.padding_idx
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows.bounds[-1][1]:
        raise IndexError(f"embedding: an index is out of range: the table has {rows.bounds[-1][1]} rows")
    return _SlicedEmbedding.apply(rows.anchor, ids, rows, padding)


class _SlicedEmbedding(torch.autograd.Function):
    """(anchor, ids (...), rows, padding row or -1) -> (..., H)."""

    @staticmethod
    def forward(ctx, anchor, ids, rows, padding):
        flat = ids.reshape(-1)
        found = torch.empty((len(flat), rows.width), dtype=rows.dtype, device=ids.device)
        wanted = [n for n, bounds in enumerate(rows.bounds) if bool(_inside(flat, bounds).any())]
        for place, number in enumerate(wanted):
            begin = rows.bounds[number][0]
            here = _inside(flat, rows.bounds[number]).nonzero().squeeze(1)
            with rows.open(number, wanted[place + 1 :]) as part:
                found[here] = part[flat[here] - begin]
        ctx.rows, ctx.padding = rows, padding
        ctx.gradients = rows.gradients() if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(ids)
        return found.view(*ids.shape, rows.width)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        flat, grad = ctx.saved_tensors[0].reshape(-1), grad.reshape(-1, ctx.rows.width)
        for number, (begin, end) in enumerate(ctx.rows.bounds):
            here = _inside(flat, (begin, end))
            padding = ctx.padding - begin if begin <= ctx.padding < end else -1
            part = torch.ops.aten.embedding_dense_backward(grad[here], flat[here] - begin, end - begin, padding, False)
            ctx.gradients.add(number, part)
        return ctx.gradients.end(), None, None, None


def _inside(ids: torch.Tensor, bounds: tuple[int, int]) -> torch.Tensor:
    """Return which of the ids are in [begin, end)."""
    return (ids >= bounds[0]) & (ids < bounds[1])


# -- head --------------------------------------------------------------------------------------------------------------


def sliced_head(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return all logits of a head: (..., H) -> (..., V)."""
    rows, (hidden, bias) = rows_of(module), _as_autocast(hidden, module.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        flat = _SlicedLinear.apply(rows.anchor, hidden.reshape(-1, rows.width), bias, rows)
    return flat.view(*hidden.shape[:-1], -1)


def sliced_cross_entropy(
    module: nn.Linear,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    transform: LogitTransform | None = None,
) -> torch.Tensor:
    """Return the summed loss of `chunked_linear_cross_entropy` for a sliced head, with one slice's logits at a time.

    hidden: (..., H); labels: (...) of int64, in [0, V) or `ignore_index`. Returns an fp32 scalar. The weight's gradient
    is rounded once, that of `hidden` once per slice, and summed in fp32. Raises IndexError for any other label.
    """
    rows, (hidden, bias) = rows_of(module), _as_autocast(hidden, module.bias)
    flat, transform = labels.reshape(-1), transform or LogitTransform()
    words = rows.bounds[-1][1]
    if bool((outside := (flat != ignore_index) & ((flat < 0) | (flat >= words))).any()):
        raise IndexError(
            f"cross_entropy: label {int(flat[outside][0])} is out of bounds: use one in [0, {words}) or {ignore_index}"
        )
    with torch.autocast(hidden.device.type, enabled=False):
        return _SlicedCrossEntropy.apply(
            rows.anchor, hidden.reshape(-1, rows.width), bias, flat, rows, transform, flat != ignore_index
        )


def _as_autocast(hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return both tensors in the dtype of autocast, if it is on."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), bias if bias is None else bias.to(dtype)


class _OfHidden:
    """The gradient of `hidden`: the sum over slices of `grad @ rows` (T, H), in fp32 if there are several slices."""

    def __init__(self, hidden: torch.Tensor, wanted: bool, slices: int) -> None:
        self._dtype, self._total = hidden.dtype, None
        if wanted:
            self._total = torch.zeros_like(hidden, dtype=torch.float32 if slices > 1 else hidden.dtype)

    def add(self, tokens: slice, grad: torch.Tensor, part: torch.Tensor) -> None:
        """Add `grad @ part` to the rows of these tokens."""
        if self._total is not None:
            self._total[tokens] += product(grad, part)

    def total(self) -> torch.Tensor | None:
        """Return the sum in the dtype of `hidden`, or None if it is not wanted."""
        return None if self._total is None else self._total.to(self._dtype)


def _chunks(tokens: int, words: int, dtype: torch.dtype) -> list[slice]:
    """Return slices of the tokens such that the logits of one slice of `words` fit into `DEFAULT_CHUNK_BYTES`."""
    size = max(1, DEFAULT_CHUNK_BYTES // (words * 2 * (torch.float32.itemsize + dtype.itemsize)))
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]


class _SlicedLinear(torch.autograd.Function):
    """(anchor, hidden (T, H), bias (V) or None, rows) -> (T, V)."""

    @staticmethod
    def forward(ctx, anchor, hidden, bias, rows):
        logits = hidden.new_empty((len(hidden), rows.bounds[-1][1]))
        for number, (begin, end) in enumerate(rows.bounds):
            with rows.open(number, range(number + 1, len(rows.bounds))) as part:
                logits[:, begin:end] = linear(hidden, part.to(hidden.dtype), _of(bias, begin, end))
        ctx.rows, ctx.gradients = rows, rows.gradients() if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(hidden)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (hidden,), rows = ctx.saved_tensors, ctx.rows
        of_hidden = _OfHidden(hidden, ctx.needs_input_grad[1], len(rows.bounds))
        for number, (begin, end) in enumerate(rows.bounds):
            with rows.open(number, range(number + 1, len(rows.bounds))) as part:
                of_hidden.add(slice(None), grad[:, begin:end], part.to(hidden.dtype))
                if ctx.gradients is not None:
                    of_rows = hidden.new_zeros((end - begin, rows.width), dtype=torch.float32)
                    add_product(of_rows, grad[:, begin:end], hidden)
                    ctx.gradients.add(number, of_rows.to(rows.dtype))
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return ctx.gradients.end() if ctx.gradients is not None else None, of_hidden.total(), of_bias, None


class _SlicedCrossEntropy(torch.autograd.Function):
    """Sum of the losses of (anchor, hidden (T, H), bias (V) or None, labels (T), rows, transform, counted (T))."""

    @staticmethod
    def forward(ctx, anchor, hidden, bias, labels, rows, transform, counted):
        log_sums = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        of_label = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for number, (begin, end) in enumerate(rows.bounds):
            with rows.open(number, range(number + 1, len(rows.bounds))) as part:
                part = part.to(hidden.dtype)
                for some in _chunks(len(hidden), end - begin, hidden.dtype):
                    logits = transform(linear(hidden[some], part, _of(bias, begin, end)).float())
                    log_sums[some] = torch.logaddexp(log_sums[some], torch.logsumexp(logits, dim=1))
                    here, columns = target_columns(labels[some], counted[some], begin, end)
                    of_label[some] += torch.where(here, logits.gather(1, columns).squeeze(1), 0.0)
        ctx.rows, ctx.transform = rows, transform
        ctx.gradients = rows.gradients() if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(hidden, bias, labels, counted, log_sums)
        return (log_sums - of_label).masked_fill_(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        hidden, bias, labels, counted, log_sums = ctx.saved_tensors
        rows, (_, need_hidden, need_bias, *_) = ctx.rows, ctx.needs_input_grad
        of_hidden = _OfHidden(hidden, need_hidden, len(rows.bounds))
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        scale = torch.where(counted, grad_loss.float(), 0.0)
        for number, (begin, end) in enumerate(rows.bounds):
            with rows.open(number, range(number + 1, len(rows.bounds))) as part:
                part = part.to(hidden.dtype)
                of_rows = hidden.new_zeros((end - begin, rows.width), dtype=torch.float32)
                for some in _chunks(len(hidden), end - begin, hidden.dtype):
                    target = target_columns(labels[some], counted[some], begin, end)
                    more = ctx.transform, scale[some]
                    grad = grad_of_logits(hidden[some], part, _of(bias, begin, end), target, log_sums[some], *more)
                    if need_bias:
                        of_bias[begin:end] += grad.sum(0)
                    grad = grad.to(hidden.dtype)
                    of_hidden.add(some, grad, part)
                    if ctx.gradients is not None:
                        add_product(of_rows, grad, hidden[some])
                if ctx.gradients is not None:
                    ctx.gradients.add(number, of_rows.to(rows.dtype))
        of_anchor = ctx.gradients.end() if ctx.gradients is not None else None
        return of_anchor, of_hidden.total(), None if of_bias is None else of_bias.to(bias.dtype), None, None, None, None


def _of(bias: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
    return None if bias is None else bias[begin:end]

"""Samples of the tensors that autograd saves, to check whether a block's recomputation repeats its forward pass.

A forward pass may depend on anything in addition to arguments, parameters, buffers and known random number generators
(a counter of a class, a generator in a closure, a file), so the results are compared instead of the causes.
`torch.utils.checkpoint`'s `determinism_check` does the same with shapes, dtypes and devices only. A difference that
changes no tensor that autograd saves is not detected.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.utils._python_dispatch import _disable_current_modes

ELEMENTS = 256  # sampled elements per tensor
_COMPARED = (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Multiples of the golden ratio modulo 1, which are spread evenly over a tensor of any shape.
_PLACES = torch.arange(ELEMENTS, dtype=torch.float64).mul((math.sqrt(5) - 1) / 2).frac()


def is_compared(number: int) -> bool:
    """Return whether pass `number` (from 1) of a block is compared: passes 1, 4, 16, 64, ... are, so that the cost is
    negligible in the long run, and a block that never repeats itself is found in its first step."""
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


class Samples:
    """Some elements of each tensor that autograd saves in a forward pass on the CPU, in order.

    Other devices are left out, since kernels there save memory that they have not written. So are tensors of bytes,
    which CPU kernels use for scratch memory.
    """

    def __init__(self) -> None:
        self._of: list[torch.Tensor | None] = []
        self._exact = True

    def add(self, tensor: torch.Tensor) -> None:
        """Sample the next tensor that autograd saves."""
        self._of.append(_sample(tensor))

    def differ(self, number: int, tensor: torch.Tensor) -> bool:
        """Return whether the tensor that a recomputation saves as `number` has other values than the forward pass's.

        Differences that another order of sums can cause are ignored (up to 1e-4 of the sample's norm, or twice the
        dtype's precision); after the first inexact tensor, later ones are not compared.
        """
        was = self._of[number] if self._exact else None
        if was is None:
            return False
        now = _sample(tensor)
        if now is None or now.shape != was.shape:
            return True
        if torch.equal(was, now):
            return False
        if not was.is_floating_point():
            return True
        norm, error = was.double().norm(), (now.double() - was.double()).norm()
        if not math.isfinite(norm) or not math.isfinite(error):
            return not torch.equal(was.isfinite(), now.isfinite())
        self._exact = False
        return bool(error > max(1e-4, 2 * torch.finfo(was.dtype).eps) * norm)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return some elements of the tensor, or None if it cannot be compared."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _COMPARED:
        return None
    with _disable_current_modes():  # modes of the pass, such as the one that measures products, are not for these
        if tensor.numel() <= ELEMENTS:
            return tensor.clone()
        return tensor[_places_in(tensor.shape)]


@functools.lru_cache(maxsize=256)
def _places_in(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Return the sampled places of a tensor of this shape, as an index."""
    return torch.unravel_index((_PLACES * shape.numel()).long(), shape)

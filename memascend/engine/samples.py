"""Whether a block's recomputation repeats its forward pass: samples of what autograd saves in both are compared.

What a forward pass may depend on besides arguments, parameters, buffers and known generators of random numbers has no
limit (a counter of a class, a generator in a closure, a file), so the result is looked at in the place of the causes:
`torch.utils.checkpoint`'s `determinism_check` does the same with shapes, dtypes and devices alone. What changes no
tensor that autograd saves is not found.
"""

from __future__ import annotations

import math

import torch

ELEMENTS = 256  # of each tensor
_COMPARED = (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Multiples of the golden ratio modulo 1: spread evenly over a tensor, whatever its shape.
_PLACES = torch.arange(ELEMENTS, dtype=torch.float64).mul((math.sqrt(5) - 1) / 2).frac()


def is_compared(number: int) -> bool:
    """Whether pass `number` (from 1) of a block is one that is compared: 1, 4, 16, 64, ... so that it costs nothing in
    the long run, and a block that never repeats itself is found in its first step."""
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


class Samples:
    """Of tensors that a forward pass on a CPU saves, in their order: some elements each.

    Other devices are left out, since kernels there save memory that they have not written. So are bytes, as which
    kernels of a CPU keep scratch memory.
    """

    def __init__(self) -> None:
        self._of: list[torch.Tensor | None] = []
        self._exact = True

    def add(self, tensor: torch.Tensor) -> None:
        self._of.append(_sample(tensor))

    def differ(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor that a recomputation saves as `number` has other values than the forward pass's.

        Differences as another order of sums makes them are none (a relative 1e-4 of the sample's norm, or twice the
        dtype's precision); after one, what follows from it is not compared.
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
    """Some elements; None: of this tensor none can be compared."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _COMPARED:
        return None
    if tensor.numel() <= ELEMENTS:
        return tensor.clone()
    return tensor[torch.unravel_index((_PLACES * tensor.numel()).long(), tensor.shape)]

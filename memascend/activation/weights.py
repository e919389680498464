"""Recognition of weights among the tensors that autograd saves: weights are not offloaded."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import nn


class KnownWeights:
    """Storages of parameters and buffers, by the outermost module that ran. Weak references detect reused addresses."""

    def __init__(self) -> None:
        self._storages: weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[torch.Tensor]]]
        self._storages = weakref.WeakKeyDictionary()

    def note(self, module: nn.Module) -> None:
        """Record the parameters and buffers of `module` as weights. One thread at a time."""
        self._storages[module] = _weights_of(module)

    def include(self, tensor: torch.Tensor, running: Sequence[nn.Module], *, casts: bool) -> bool:
        """Return whether `tensor` shares storage with a parameter or buffer of any model that has run here.

        The `running` modules are checked anew, since ZeRO-3 gathers weights into fresh storages. If autocast is on
        (`casts`), a tensor with the shape of a weight (or its transpose) counts too: it may be a cast weight.
        """
        address = tensor.untyped_storage()._cdata
        for weights in self._storages.values():
            weight = found() if (found := weights.get(address)) is not None else None
            if weight is not None and weight.untyped_storage()._cdata == address:
                return True
        for module in reversed(running):
            for parameter in (*module._parameters.values(), *module._buffers.values()):
                if parameter is None:
                    continue
                if parameter.untyped_storage()._cdata == address:
                    return True
                same_shape = parameter.shape == tensor.shape or parameter.shape == tensor.shape[::-1]
                if casts and same_shape and parameter.dim() > 1 and parameter.dtype != tensor.dtype:
                    return True
        return False


def _weights_of(module: torch.nn.Module) -> dict[int, weakref.ref[torch.Tensor]]:
    """Return parameters and buffers by the address of their storage."""
    return {
        weight.untyped_storage()._cdata: weakref.ref(weight)
        for weight in itertools.chain(module.parameters(), module.buffers())
        if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout == torch.strided
    }

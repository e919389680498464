"""Finds parameters that a model uses outside of the forward pass of the module that owns them.

A streamed parameter has its values while its module runs. A model that takes another module's weight (a tied head as
`F.linear(x, self.embedding.weight)` in the model's own forward) would compute with the NaN that stands there. The first
forward pass with a graph and the first one without are watched, operator by operator; later ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.engine.arguments import tensors_in
from memascend.engine.blocks import NotStreamable


class _Watching(TorchDispatchMode):
    def __init__(self, names: Mapping[nn.Parameter, str], nothing: torch.Tensor) -> None:
        super().__init__()
        self._names, self._nothing = names, nothing.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _looks_at_no_value(func):
            for tensor in tensors_in((args, kwargs or {})):
                if (
                    tensor.numel()
                    and tensor.layout == torch.strided
                    and tensor.untyped_storage()._cdata == self._nothing
                ):
                    raise self._refusal(tensor)
        return func(*args, **(kwargs or {}))

    def _refusal(self, tensor: torch.Tensor) -> NotStreamable:
        alike = [name for parameter, name in self._names.items() if _is_empty_like(parameter, tensor, self._nothing)]
        which = " or ".join(alike[:3]) or "a parameter"
        return NotStreamable(
            f"{which} is used outside of the forward pass of its module, where a streamed model has no values of it: "
            "call the module there (a tied head as an nn.Linear with the same weight), or name a block that holds both "
            "(blocks=[...])"
        )


def _is_empty_like(parameter: nn.Parameter, tensor: torch.Tensor, nothing: int) -> bool:
    same = parameter.shape == tensor.shape or parameter.shape == tensor.shape[::-1]
    return same and parameter.untyped_storage()._cdata == nothing


def _looks_at_no_value(func: Any) -> bool:
    """`x.new_zeros(...)` and `torch.empty_like(x)` take a tensor for its type and shape, and so does an assignment to
    `x.data` in inference mode; views and `detach` only move the question to whoever uses the result."""
    name = func._overloadpacket.__name__
    of_type = name.startswith("new_") or name.endswith("_like") or name == "_has_compatible_shallow_copy_type"
    return of_type or name == "detach" or func.is_view


def watch_first_pass(model: nn.Module, names: Mapping[nn.Parameter, str], nothing: torch.Tensor) -> Callable[[], None]:
    """Raise NotStreamable where the first forward pass, with a graph or without, uses an empty parameter; returns the
    undo."""
    modes: list[_Watching] = []
    to_come = {True, False}

    def begin(*_: Any) -> None:
        if torch.is_grad_enabled() in to_come and not modes:
            to_come.discard(torch.is_grad_enabled())
            modes.append(_Watching(names, nothing))
            modes[0].__enter__()

    def end(*_: Any) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)
            if not to_come:
                undo()

    before = model.register_forward_pre_hook(begin)
    after = model.register_forward_hook(end, always_call=True)

    def undo() -> None:
        before.remove()
        after.remove()

    return undo

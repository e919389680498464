"""Tensors that autograd saves: handles that stand for them on the graph, and nodes that keep them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch


class Handle:
    """Stands on the graph for a saved tensor."""

    __slots__ = ("__weakref__", "meta", "number", "owner")

    def __init__(self, owner: Any, number: int, tensor: torch.Tensor) -> None:
        self.owner, self.number, self.meta = owner, number, meta(tensor)


def memory_of(tensor: torch.Tensor) -> Hashable:
    """What two tensors have in common that are views of one memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and tensor.numel() else id(tensor)


def meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class _Inputs(torch.autograd.Function):
    """Saves tensors under the hooks that are active outside of the block (an activation cache's, say)."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from this")


def save_on_a_node(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """They are the `saved_tensors` of its `grad_fn`, as long as it lives: up to torch 2.11 a node ends with its result,
    whoever else refers to it."""
    with torch.enable_grad():
        node: torch.Tensor = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    return node


def left_by_ctrl_c(tensor: torch.Tensor) -> torch.Tensor:
    """Pack a tensor as without hooks, by hooks whose pass is over: Ctrl-C came between torch's `__enter__` and the
    body, or before `__exit__` did anything. They are on top, since they were called, and are taken off here."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return tensor.detach()


def words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"

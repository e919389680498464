"""Tensors that autograd saves: handles that replace them on the graph, and nodes that keep them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch


class Handle:
    """A placeholder on the graph for saved tensor `number` of a block's pass (`owner`), with its shape, dtype and
    device."""

    __slots__ = ("__weakref__", "meta", "number", "owner")

    def __init__(self, owner: Any, number: int, tensor: torch.Tensor) -> None:
        self.owner, self.number, self.meta = owner, number, meta(tensor)


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors which are views of the same memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and tensor.numel() else id(tensor)


def meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape, dtype and device."""
    return tensor.shape, tensor.dtype, tensor.device


class _Inputs(torch.autograd.Function):
    """Saves tensors under the hooks that are active outside of the block, such as an activation cache's."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from this")


def save_on_a_node(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Save tensors on a node of autograd, and return its result: they are the `saved_tensors` of its `grad_fn`. Keep
    the result: up to torch 2.11 a node is destroyed with it, even if something else refers to the node."""
    with torch.enable_grad():
        node: torch.Tensor = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    return node


def left_by_ctrl_c(tensor: torch.Tensor) -> torch.Tensor:
    """Pack a tensor as if there were no hooks, and remove the hooks. Their pass is over, but Ctrl-C came between
    torch's `__enter__` and the body, or before `__exit__` did anything. They are on top of the stack, since they were
    called."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return tensor.detach()


def words(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape in words, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"

"""Attaching an activation cache to a model's forward passes, for frameworks that own the training loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from memascend.activation.cache import REFUSES_COMPILE, ActivationCache

_ATTACHED = "_memascend_activations"


def attach_cache(model: torch.nn.Module, cache: ActivationCache) -> Callable[[], None]:
    """Offload every forward pass of `model` with gradients through `cache`; return a function to undo that.

    A pass is offloaded from its call to its return. What is computed outside of the model, such as the caller's loss,
    stays in memory. Backward may come at any time. Passes without gradients, and passes inside a backward pass
    (activation checkpointing), are not affected. The undo function does not close the cache. Raises RuntimeError if the
    model already has a cache, or is under torch.compile.
    """
    if cache_of(model) is not None:
        raise RuntimeError(f"activations of this {type(model).__name__} are already offloaded: undo that first")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise RuntimeError(REFUSES_COMPILE)
    passes = _Passes(cache)
    before = model.register_forward_pre_hook(passes.begin, prepend=True)
    after = model.register_forward_hook(passes.end, always_call=True)
    setattr(model, _ATTACHED, passes)

    def undo() -> None:
        before.remove()
        after.remove()
        delattr(model, _ATTACHED)

    return undo


def cache_of(model: torch.nn.Module) -> ActivationCache | None:
    """Return the cache attached to `model`, which has the statistics, or None."""
    passes = getattr(model, _ATTACHED, None)
    return passes.cache if passes is not None else None


class _Passes:
    """Forward passes in progress, per thread; None stands for a pass that is not offloaded."""

    def __init__(self, cache: ActivationCache) -> None:
        self.cache = cache
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Passes:
        return self  # a copy of a model offloads to the same tier

    def begin(self, module: torch.nn.Module, inputs: Any) -> None:
        """Hook before the model's forward: start offloading, unless the pass has no gradients or belongs to a backward
        pass. Raises RuntimeError under torch.compile."""
        entered = self._open()
        if not torch.is_grad_enabled() or self.cache.in_backward():
            entered.append(None)
            return
        if torch.compiler.is_compiling() or module._compiled_call_impl is not None or _called_by_dynamo():
            raise RuntimeError(REFUSES_COMPILE)
        context = self.cache.active()
        context.__enter__()
        entered.append(context)
        self.cache.enter_module(module)

    def end(self, module: torch.nn.Module, *_: Any) -> None:
        """Hook after the model's forward: end what `begin` has started. No effect after a `begin` that failed."""
        entered = self._open()
        context = entered.pop() if entered else None
        if context is not None:
            self.cache.leave_module(module)
            context.__exit__(None, None, None)

    def _open(self) -> list[AbstractContextManager[Any] | None]:
        """Return the passes in progress in this thread, the innermost last."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[AbstractContextManager[Any] | None] = self._local.entered
        return entered


def _called_by_dynamo() -> bool:
    """Return whether a compiled model is being called: its saved tensors would bypass the hooks."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    code = dynamo.OptimizedModule.__call__.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None

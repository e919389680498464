"""Loaded by every process of DeepSpeed's own tests: applies MEMASCEND_SUITE once deepspeed is imported.

``stock``: fp16 is allowed on a CPU; otherwise most tests would be skipped. ``enabled``: memascend is enabled too, at
first with nothing but ZeRO-3, then with each configuration that a test brings. DeepSpeed's tests start their own
processes, which a pytest plugin would not reach.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds ``deepspeed`` as the other finders do, and runs ``action`` at the end of its import."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._action(module)

        spec.loader.exec_module = exec_module
        return spec


def _allow_fp16(deepspeed: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    from memascend.integrations.deepspeed.cpu_shims import allow_fp16_on_cpu

    allow_fp16_on_cpu(type(get_accelerator()))


def _enable(deepspeed: Any) -> None:
    import memascend

    _allow_fp16(deepspeed)  # whatever the last configuration asked for, the next test may train in fp16
    nothing: dict[str, Any] = {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
    }
    memascend.enable(nothing)
    current: list[Any] = [nothing]

    def follow(config: Any) -> None:
        if not isinstance(config, dict) or any(config is c for c in current):
            return
        zero = config.get("zero_optimization") or {}
        if zero.get("stage") != 3:
            return
        zero.setdefault("memory_efficient_linear", False)
        memascend.disable()
        memascend.enable(config)
        current[:] = [config]

    def following(function: Any, names: tuple[str, ...]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in names:
                follow(kwargs.get(name))
            return function(*args, **kwargs)

        return call

    deepspeed.initialize = following(deepspeed.initialize, ("config", "config_params"))
    deepspeed.zero.Init.__init__ = following(deepspeed.zero.Init.__init__, ("config_dict_or_path", "config"))


_ACTIONS = {"stock": _allow_fp16, "enabled": _enable}
if os.environ.get("MEMASCEND_SUITE") in _ACTIONS:
    sys.meta_path.insert(0, _AfterImport(_ACTIONS[os.environ["MEMASCEND_SUITE"]]))

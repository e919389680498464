"""A pytest plugin that runs tests of the streaming engine, written for the CPU, with models and batches on `late`.

`pytest -p tests.late_device.plugin tests/unit/test_streaming_engine.py`, in a separate process: torch knows the device
from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.ops.adamw import AdamW
from tests.late_device import late_device


def on_host(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer class for device parameters that updates copies in host memory, as the engine does."""

    class OnHost(kind):  # type: ignore[valid-type, misc]
        def __init__(self, parameters: Any, **settings: Any) -> None:
            self._parameters = list(parameters)
            self._copies = [torch.nn.Parameter(each.detach().cpu().clone()) for each in self._parameters]
            super().__init__(self._copies, **settings)

        def step(self, closure: None = None) -> None:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                copy.grad = parameter.grad.cpu() if parameter.grad is not None else None
            super().step(closure)
            with torch.no_grad():
                for parameter, copy in zip(self._parameters, self._copies, strict=True):
                    parameter.copy_(copy)

        def zero_grad(self, set_to_none: bool = True) -> None:
            for parameter in self._parameters:
                parameter.grad = None

    return OnHost


HostAdamW = on_host(AdamW)


def _on_late(made: Callable[..., Any]) -> Callable[..., Any]:
    def moved(*args: Any, **named: Any) -> Any:
        found = made(*args, **named)
        return [each.to(late_device()) for each in found] if isinstance(found, list) else _moved(found)

    return moved


def _moved(model: torch.nn.Module) -> torch.nn.Module:
    """Move the model, keeping tied parameters tied: torch would make separate ones for a device of this kind."""
    before = dict(model.named_parameters(remove_duplicate=False))
    model.to(late_device())
    first: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in before.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, own, first.setdefault(parameter, getattr(module, own)))
    return model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items}:
        for name in ("model", "batches"):
            if hasattr(module, name):
                setattr(module, name, _on_late(getattr(module, name)))
        if hasattr(module, "AdamW"):
            module.AdamW = HostAdamW

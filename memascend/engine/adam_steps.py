"""AdamW for the elements of one run, with the settings that its parameter has in this step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memascend.engine.adam_settings import AdamSettings
from memascend.engine.layout import Run
from memascend.ops.adamw import ROUNDING_SEED, adamw_
from memascend.ops.adamw8 import adamw8_, scales_shape


class AdamSteps:
    """AdamW for one model. `states`: their dtype in the layout; `settings(name)`: a parameter's current settings."""

    def __init__(self, states: torch.dtype, settings: Callable[[str], AdamSettings]) -> None:
        self._states, self._settings = states, settings
        self.fastest = 0.0  # highest rate so far, in elements per second
        self.begin()

    def begin(self, settings: Mapping[str, AdamSettings] | None = None) -> None:
        """Begin a new step. `settings`: the recorded settings of a step that is done again, by parameter name."""
        self._of_step = dict(settings or {})
        self._used: dict[str, AdamSettings] = {}  # by parameter, the settings of its first update
        self._changed: set[str] = set()  # parameters with a later update that used other settings than the first

    def step(
        self,
        run: Run,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        scale: float,
    ) -> None:
        """Update a run's weights and states in place. The gradient carries `scale` as a factor."""
        name = run.part.name
        settings = self._of_step.get(name) or self._settings(name)
        if settings != self._used.setdefault(name, settings):
            self._changed.add(name)
        options: dict[str, Any] = {
            "step": settings.step,
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "grad_scale": settings.grad_factor / scale,
            "seed": ROUNDING_SEED,
            "element_offset": run.part.trained_first + run.begin,
        }
        before = time.perf_counter()
        if self._states == torch.int8:
            scales = states["scales"].view(scales_shape(run.numel))
            adamw8_(weights, gradient, states["exp_avg"], states["exp_avg_sq"], scales, **options)
        else:
            adamw_(
                states.get("master", weights),
                gradient.to(self._states) if gradient.dtype == torch.float32 else gradient,
                states["exp_avg"],
                states["exp_avg_sq"],
                weights if "master" in states else None,
                **options,
            )
        self.fastest = max(self.fastest, run.numel / (time.perf_counter() - before))

    def require_same_settings(self) -> None:
        """Raise RuntimeError if a parameter was updated with other settings than it has now."""
        for name, used in self._used.items():
            if name in self._changed or used != self._settings(name):
                raise RuntimeError(
                    f"the settings of {name} (lr, betas, eps, weight_decay) were changed between backward() and "
                    "optimizer.step(), when part of the updates had already used the old ones: change them, or call "
                    "scheduler.step(), after optimizer.step() or before backward(), or delay updates (wait=True)"
                )

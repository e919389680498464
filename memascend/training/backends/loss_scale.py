"""The dynamic loss scale of fp16 training, by DeepSpeed's rule and defaults (runtime/fp16/loss_scaler.py, 0.19.8)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

_FACTOR, _WINDOW, _LEAST, _PATIENCE = 2.0, 1000, 1.0, 2


@dataclass
class LossScale:
    """A loss scale that is halved after overflows and doubled after every 1000 steps without one.

    The first overflow only uses up `patience`; every further one halves `value`.
    """

    value: float
    patience: int = _PATIENCE
    step: int = 0
    last_overflow: int = -1

    @classmethod
    def dynamic(cls) -> LossScale:
        """Return the scale that training starts with, 2^16."""
        return cls(2.0**16)

    def after_step(self, overflow: bool) -> None:
        """Update the scale after a step. Raises ValueError if it cannot be lowered any further."""
        if overflow:
            if self.patience > 1:
                self.patience -= 1
            elif self.value == _LEAST:
                raise ValueError(
                    "gradients are infinite or NaN at the minimum loss scale, 1: training has diverged; lower "
                    "--learning-rate, or train in bf16 (--dtype bf16)"
                )
            else:
                self.value = max(self.value / _FACTOR, _LEAST)
            self.last_overflow = self.step
        else:
            calm = self.step - self.last_overflow - 1
            if calm > 0 and calm % _WINDOW == 0:
                self.patience = _PATIENCE
                self.value *= _FACTOR
        self.step += 1

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

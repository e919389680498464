"""Settings of AdamW for one parameter in one step, checked before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")  # settings of torch's AdamW


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Settings for one parameter in one step. `step` counts from one."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_factor: float = 1.0  # what the loop has multiplied the gradient by, as clipping does

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, grad_factor: float = 1.0) -> AdamSettings:
        """Return the settings from an optimizer's parameter group. Raises ValueError for values that AdamW does not
        accept, before anything is updated or recorded for a redo."""
        if asked := [name for name in REFUSED if group.get(name)]:
            raise ValueError(f"a parameter group sets {asked[0]}, which is not supported here: remove it")
        numbers = {name: _number(group.get(name)) for name in ("lr", "eps", "weight_decay")}
        for name, value in numbers.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of a parameter group is {group.get(name)!r}: use a number of at least zero")
        given = group.get("betas")
        betas = tuple(map(_number, given)) if isinstance(given, Sequence) and not isinstance(given, str) else ()
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas of a parameter group are {given!r}: use two numbers of at least zero and below one"
            )
        return cls(step=step, betas=betas, grad_factor=grad_factor, **numbers)


def _number(value: Any) -> float:
    """Return `value` as a float, or NaN if it is not a number."""
    try:
        return float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError, RuntimeError):
        return math.nan

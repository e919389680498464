"""Norms of gradients that arrive piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memascend.engine.layout import SUM_ELEMENTS, Part
from memascend.ops.unscale import unscale_norm_overflow_


class SquareSums:
    """Sums of squares of gradients by parameter, added in the same order as in one pass over the whole gradient."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._reached: dict[str, int] = {}
        self.finite = True

    def add(self, part: Part, begin: int, gradient: torch.Tensor) -> None:
        """Add the squares of a part's gradient from element `begin` on, which must follow the elements added before.
        Raises AssertionError otherwise."""
        place = part.offset + begin
        if self._reached.get(part.name, 0) != place:
            raise AssertionError(f"{part.name}: gradients from element {place} on are summed out of order")
        if place == 0 and gradient.numel() == part.numel:
            self._count(part, unscale_norm_overflow_(gradient, 1.0))
        else:
            for first in range(0, gradient.numel(), SUM_ELEMENTS):
                self._count(part, unscale_norm_overflow_(gradient[first : first + SUM_ELEMENTS], 1.0))
        self._reached[part.name] = place + gradient.numel()

    def _count(self, part: Part, result: Any) -> None:
        """Add a native result to the parameter's sum."""
        self._sums[part.name] = self._sums.get(part.name, 0.0) + float(result.sum_squares)
        self.finite = self.finite and not bool(result.overflow)

    def of(self, name: str) -> float:
        """Return the sum of the squares of a parameter's gradient."""
        return self._sums.get(name, 0.0)

    def __contains__(self, part: Part) -> bool:
        return self._reached.get(part.name, 0) > part.offset

    def norm(self, order: Iterable[str]) -> torch.Tensor:
        """Return the 2-norm of all gradients as a 0-d fp32 tensor, computed as in ZeRO-3, adding parameters in `order`;
        infinite if any element is infinite or NaN."""
        total: Any = 0.0
        for name in order:
            if name in self._sums:
                total = total + torch.tensor(self._sums[name], dtype=torch.float64).sqrt() ** 2
        combined = torch.linalg.vector_norm(torch.stack([torch.tensor([float(total)])[0] ** 0.5]))
        return torch.where(torch.isfinite(combined), combined, torch.inf)

"""Benchmark of unscaling, norm and overflow check in one pass, against separate torch passes and the read-write limit.

Every gradient has to be read and written once; the limit is the faster of two in-place torch loops that do only that.
`chain` does what a step of DeepSpeed ZeRO-3 does today: the overflow check as a chain over infinities and NaNs, then
the norm, then the product. `torch` is the best that torch offers: one `aminmax`, one `vector_norm` and one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memascend.bench.overflow import DTYPES
from memascend.bench.rounds import alternate_groups, conditions, filled, ratios, spread
from memascend.ops.overflow import has_overflow_aminmax, has_overflow_chain
from memascend.ops.unscale import unscale_norm_overflow_

LIMITS = ("mul", "neg")
_SCALE = -1.0  # keeps the magnitudes unchanged, however often it is applied


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the norm of a gradient, summed in fp32."""
    return torch.linalg.vector_norm(grad, dtype=torch.float32)


_WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fused": lambda grad: unscale_norm_overflow_(grad, _SCALE),
    "torch": lambda grad: (has_overflow_aminmax(grad), _norm(grad), grad.mul_(_SCALE)),
    "chain": lambda grad: (has_overflow_chain(grad), _norm(grad), grad.mul_(_SCALE)),
    "mul": lambda grad: grad.mul_(_SCALE),
    "neg": lambda grad: grad.neg_(),
}


def measure(dtypes: list[str], numels: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of every round for each way, dtype and number of elements.

    The key `bytes` of a point counts one read and one write of every element.
    """
    points: list[dict[str, Any]] = []
    for dtype in dtypes:
        data = filled(max(numels), DTYPES[dtype])
        groups = {n: {name: lambda way=way, head=data[:n]: way(head) for name, way in _WAYS.items()} for n in numels}
        points += [
            {"method": name, "dtype": dtype, "numel": n, "seconds": taken, "bytes": 2 * n * data.element_size()}
            for n, seconds in alternate_groups(groups, repeats).items()
            for name, taken in seconds.items()
        ]
    return {"benchmark": "unscale", "conditions": conditions(), "points": points, "summary": summary(points)}


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by dtype and size, the limit, the fraction of it that the fused pass reaches, and its speed-ups."""
    out = []
    for dtype, numel in dict.fromkeys((p["dtype"], p["numel"]) for p in points):
        here = {p["method"]: p for p in points if (p["dtype"], p["numel"]) == (dtype, numel)}
        limit = min(LIMITS, key=lambda name: spread(here[name]["seconds"]).median)
        fused = here["fused"]["seconds"]
        out.append(
            {
                "dtype": dtype,
                "numel": numel,
                "limit": limit,
                "limit_gb_s": here[limit]["bytes"] / spread(here[limit]["seconds"]).median / 1e9,
                "share_of_limit": vars(ratios(here[limit]["seconds"], fused)),
                "times_faster_than": {name: vars(ratios(here[name]["seconds"], fused)) for name in ("torch", "chain")},
            }
        )
    return out

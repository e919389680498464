"""The overflow check against the read limit, the published chain and torch's own ways.

Limit: every byte has to be read once. Nobody states a machine's read bandwidth as a program gets it, so the fastest of
three loops that only read is the limit: `tensor.sum()`, `torch.aminmax` and a native loop that ORs all words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memascend import _C
from memascend.bench.rounds import alternate, conditions, filled, ratios, spread
from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
READERS = ("sum", "aminmax", "read_loop")

_WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fused": has_overflow,
    "sum": torch.sum,
    "read_loop": _C.read_all,
    "aminmax": has_overflow_aminmax,
    "isfinite": lambda tensor: not bool(torch.isfinite(tensor).all()),
    "chain": has_overflow_chain,
}


def measure(dtypes: list[str], numels: list[int], repeats: int) -> dict[str, Any]:
    """Points: seconds of every round for each way, dtype and number of elements."""
    points = []
    for dtype in dtypes:
        for numel in numels:
            data = filled(numel, DTYPES[dtype])
            seconds = alternate({name: lambda way=way, data=data: way(data) for name, way in _WAYS.items()}, repeats)
            nbytes = numel * data.element_size()
            points += [
                {"method": name, "dtype": dtype, "numel": numel, "seconds": taken, "bytes": nbytes}
                for name, taken in seconds.items()
            ]
    return {"benchmark": "overflow", "conditions": conditions(), "points": points, "summary": summary(points)}


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dtype and size: the limit, the share of it that the fused check reaches, and times faster than each."""
    out = []
    for dtype, numel in dict.fromkeys((p["dtype"], p["numel"]) for p in points):
        here = {p["method"]: p for p in points if (p["dtype"], p["numel"]) == (dtype, numel)}
        limit = min(READERS, key=lambda name: spread(here[name]["seconds"]).median)
        fused = here["fused"]["seconds"]
        out.append(
            {
                "dtype": dtype,
                "numel": numel,
                "limit": limit,
                "limit_gb_s": here[limit]["bytes"] / spread(here[limit]["seconds"]).median / 1e9,
                "share_of_limit": vars(ratios(here[limit]["seconds"], fused)),
                "times_faster_than": {
                    name: vars(ratios(point["seconds"], fused)) for name, point in here.items() if name != "fused"
                },
            }
        )
    return out

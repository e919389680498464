"""Benchmark of the overflow check against the read limit, the published chain, today's DeepSpeed and torch.

Every byte has to be read once. The read bandwidth that a program can reach is not specified for any machine, so the
limit is the fastest of three loops that only read: `tensor.sum()`, `torch.aminmax` and a native loop that ORs all
words. DeepSpeed's check is the method of its ZeRO-3 optimizer, including the final all-reduce over one process.
The memory that each way needs in addition to the tensor is the peak of its live temporaries, measured after the timing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memascend import _C
from memascend.bench.rounds import alternate_groups, conditions, filled, ratios, spread
from memascend.memory import tracking
from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
READERS = ("sum", "aminmax", "read_loop")
_STOCK_OPS = "memascend.integrations.deepspeed.stock_ops"

_WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fused": has_overflow,
    "sum": torch.sum,
    "read_loop": _C.read_all,
    "aminmax": has_overflow_aminmax,
    "isfinite": lambda tensor: not bool(torch.isfinite(tensor).all()),
    "chain": has_overflow_chain,
}


@contextlib.contextmanager
def _deepspeed(missing: dict[str, str]) -> Iterator[dict[str, Callable[[torch.Tensor], Any]]]:
    """Yield DeepSpeed's check, or nothing after noting in `missing` why it is not available."""
    with contextlib.ExitStack() as stack:
        way = {}
        try:
            with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints to stdout during set-up
                stock_ops = importlib.import_module(_STOCK_OPS)
                way["deepspeed"] = stack.enter_context(stock_ops.stage3_check())
        except ImportError as error:
            missing["deepspeed"] = f"not installed: {error}"
        yield way


def measure(dtypes: list[str], numels: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of every round for each way, dtype and size, and the reason for each missing peer."""
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with _deepspeed(missing) as deepspeed:
        for dtype in dtypes:
            points += _points(_WAYS | deepspeed, dtype, numels, repeats)
    result = {"benchmark": "overflow", "conditions": conditions(), "missing": missing}
    return {**result, "points": points, "summary": summary(points)}


def _points(
    ways: dict[str, Callable[[torch.Tensor], Any]], dtype: str, numels: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Time all ways for one dtype. The sizes are prefixes of one buffer, and every round covers all of them."""
    data = filled(max(numels), DTYPES[dtype])
    groups = {
        numel: {name: lambda way=way, head=data[:numel]: way(head) for name, way in ways.items()} for numel in numels
    }
    timed = alternate_groups(groups, repeats)
    with _tracked():
        extra = {(numel, name): _extra_bytes(way) for numel, found in groups.items() for name, way in found.items()}
    return [
        {"method": name, "dtype": dtype, "numel": numel, "seconds": taken, "bytes": numel * data.element_size()}
        | {"extra_bytes": extra[numel, name]}
        for numel, seconds in timed.items()
        for name, taken in seconds.items()
    ]


@contextlib.contextmanager
def _tracked() -> Iterator[None]:
    """Track PyTorch's allocations inside the context, unless they are tracked already."""
    before = tracking.installed()
    tracking.install()
    try:
        yield
    finally:
        if not before:
            tracking.uninstall()


def _extra_bytes(way: Callable[[], Any]) -> int:
    """Return the peak bytes of live temporaries; blocks below `tracking.TRACKED_FROM_BYTES` are not counted."""
    tracking.reset_peaks()
    before = tracking.live_bytes()["host"]
    way()
    return tracking.peak_bytes()["host"] - before


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by dtype and size, the limit, the fraction of it that the fused check reaches, and its speed-ups."""
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

"""Benchmark of AdamW against DeepSpeedCPUAdam and torch.optim.AdamW(fused=True), with the roofline.

For the roofline, a step reads parameter, gradient, momentum and variance and writes all but the gradient. With fp32
that is 4 * 4 + 3 * 4 = 28 bytes per element; with bf16 states it is 14; with fp16 gradients and an fp16 copy in
addition to fp32 states it is 28. With 8-bit moments and bf16 gradients a step reads 2 + 2 + 1 + 1 bytes, writes
2 + 1 + 1, and moves two bytes of scales per 32 elements in both directions: 10.125 in total.
The bandwidth is that of the fastest in-place read-write loop in the same run.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from memascend.bench.rounds import alternate, conditions, filled, ratios, spread
from memascend.ops.adamw import adamw_
from memascend.ops.adamw8 import adamw8_, scales_shape
from memascend.ops.unscale import unscale_norm_overflow_

BYTES_PER_ELEMENT = {
    "deepspeed": 28,
    "torch_fused": 28,
    "fp32": 28,
    "fp32_half_gradient_and_copy": 28,
    "bf16": 14,
    "int8": 10.125,
    "torch_mul": 8,
    "unscale": 8,
}
LIMITS = ("torch_mul", "unscale")
_OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_STOCK_OPS = "memascend.integrations.deepspeed.stock_ops"


class _Ours:
    """One of our AdamW updates as a callable that counts its steps."""

    def __init__(self, *tensors: torch.Tensor, update: Callable[..., None] = adamw_) -> None:
        self.tensors = tensors
        self.update = update
        self.step = 0

    def __call__(self) -> None:
        self.step += 1
        self.update(*self.tensors, step=self.step, seed=1, **_OPTIONS)


def _torch_fused(param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor) -> Callable[[], Any]:
    """Return the step of torch.optim's fused AdamW on these tensors, in place."""
    weight = torch.nn.Parameter(param)
    weight.grad = grad
    optimizer = torch.optim.AdamW([weight], fused=True, **_OPTIONS)
    optimizer.state[weight] = {"step": torch.tensor(0.0), "exp_avg": states[0], "exp_avg_sq": states[1]}
    return optimizer.step


def _deepspeed(tensors: list[torch.Tensor], missing: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Return the step of DeepSpeedCPUAdam, or nothing after noting in `missing` why it is not available."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger binds stdout at import
            stock_ops = importlib.import_module(_STOCK_OPS)
            return {"deepspeed": stock_ops.cpu_adam_step(*tensors, **_OPTIONS)}
    except ImportError as error:
        missing["deepspeed"] = f"not installed: {error}"
    except RuntimeError as error:
        missing["deepspeed"] = f"its op cannot be loaded: {error}"
    return {}


def _ways(numel: int, missing: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Return a step of every way on tensors of `numel` elements."""
    # The fp32 ways share their tensors; each step continues from the values that the previous one left.
    single = [filled(numel, torch.float32), filled(numel, torch.float32, 1e-2)]
    single += [torch.zeros(numel), torch.zeros(numel)]
    brain = [filled(numel, torch.bfloat16), filled(numel, torch.bfloat16, 1e-2)]
    brain += [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)]
    eight = [torch.zeros(shape, dtype=torch.uint8) for shape in (numel, numel, scales_shape(numel))]
    half = [single[0], filled(numel, torch.float16, 1e-2), *single[2:], torch.zeros(numel, dtype=torch.float16)]
    grad = single[1]
    return _deepspeed(single, missing) | {
        "fp32": _Ours(*single),
        "bf16": _Ours(*brain),
        "int8": _Ours(*(tensor.clone() for tensor in brain[:2]), *eight, update=adamw8_),
        "torch_fused": _torch_fused(*single),
        "fp32_half_gradient_and_copy": _Ours(*half),
        "torch_mul": lambda: grad.mul_(-1.0),
        "unscale": lambda: unscale_norm_overflow_(grad, -1.0),
    }


def measure(numels: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of every round for each way and number of elements, and the reason for each missing peer."""
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for numel in numels:
        seconds = alternate(_ways(numel, missing), repeats)
        points += [
            {"method": name, "numel": numel, "seconds": taken, "bytes": numel * BYTES_PER_ELEMENT[name]}
            for name, taken in seconds.items()
        ]
    return {
        "benchmark": "adamw",
        "conditions": conditions(),
        "missing": missing,
        "points": points,
        "summary": summary(points),
    }


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by size and way, the bandwidth, the roofline in seconds, and the speed-up over DeepSpeed and torch."""
    out = []
    for numel in dict.fromkeys(p["numel"] for p in points):
        here = {p["method"]: p for p in points if p["numel"] == numel}
        limit = min(LIMITS, key=lambda name: spread(here[name]["seconds"]).median)
        bandwidth = here[limit]["bytes"] / spread(here[limit]["seconds"]).median
        for name in ("fp32", "fp32_half_gradient_and_copy", "bf16", "int8"):
            taken = here[name]["seconds"]
            out.append(
                {
                    "numel": numel,
                    "method": name,
                    "limit": limit,
                    "limit_gb_s": bandwidth / 1e9,
                    "limit_seconds": here[name]["bytes"] / bandwidth,
                    "seconds": vars(spread(taken)),
                    "times_faster_than": {
                        peer: vars(ratios(here[peer]["seconds"], taken))
                        for peer in ("deepspeed", "torch_fused")
                        if peer in here
                    },
                }
            )
    return out

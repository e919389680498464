"""DeepSpeed's own parts, called as DeepSpeed calls them: what a benchmark sets beside ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def cpu_adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    **options: Any,
) -> Callable[[], Any]:
    """A function that does one step of DeepSpeedCPUAdam (AdamW mode) over these tensors, in place.

    `options`: lr, betas, eps, weight_decay. Raises ImportError without DeepSpeed, RuntimeError without its op.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what DeepSpeed would find out, with a warning
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.utils import logger

    weight = torch.nn.Parameter(param)
    weight.grad = grad
    level = logger.level
    logger.setLevel("WARNING")  # from INFO on the op prints to standard output, which is the benchmark's
    try:
        optimizer = DeepSpeedCPUAdam([weight], adamw_mode=True, **options)
    finally:
        logger.setLevel(level)
    optimizer.state[weight] = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step

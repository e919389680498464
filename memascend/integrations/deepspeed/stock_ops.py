"""DeepSpeed's own parts, called as DeepSpeed calls them, for benchmarks that compare them with ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _choose_accelerator() -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would detect the same, with a warning


@contextlib.contextmanager
def stage3_check() -> Iterator[Callable[[torch.Tensor], bool]]:
    """Yield a function that runs ZeRO-3's own `has_overflow` on a flat gradient buffer (1-D, floating point, CPU).

    The check ends with DeepSpeed's all-reduce of the result. For that a process group of this single process exists
    inside the context, unless one is initialised already. Raises ImportError without DeepSpeed.
    """
    _choose_accelerator()
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    group = torch.distributed
    backend = get_accelerator().communication_backend_name()
    mine = not group.is_initialized()
    if mine:
        group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)
    try:
        comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        # Not constructed as in a training run: it has no model, and only those fields that the check reads.
        optimizer = object.__new__(DeepSpeedZeroOptimizer_Stage3)
        optimizer.inf_or_nan_tracker = torch.zeros(1, dtype=torch.bool)
        optimizer.reduce_and_partition_stream = get_accelerator().default_stream()
        optimizer.dp_process_group = group.group.WORLD
        optimizer.model_parallel_group = None

        def check(buffer: torch.Tensor) -> bool:
            optimizer.grad_partitions_flat_buffer = buffer
            return optimizer.has_overflow(partition_gradients=True)

        yield check
    finally:
        if mine:
            group.destroy_process_group()


def cpu_adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    **options: Any,
) -> Callable[[], Any]:
    """Return a function that does one step of DeepSpeedCPUAdam (AdamW mode) on these tensors, in place.

    `options`: lr, betas, eps, weight_decay. Raises ImportError without DeepSpeed, and RuntimeError without its op.
    """
    _choose_accelerator()
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.utils import logger

    weight = torch.nn.Parameter(param)
    weight.grad = grad
    level = logger.level
    logger.setLevel("WARNING")  # at INFO the op prints to standard output, which is reserved for the benchmark
    try:
        optimizer = DeepSpeedCPUAdam([weight], adamw_mode=True, **options)
    finally:
        logger.setLevel(level)
    optimizer.state[weight] = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step

"""The DeepSpeed JSON of a plan: ready for `memascend.enable`, or for stock DeepSpeed with the other systems."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from memascend.arrangements import DEFAULTS
from memascend.planner.gpu_memory import PREFETCH_BUCKET, REDUCE_BUCKET
from memascend.planner.options import MODEL_OPTIONS
from memascend.planner.workload import Workload

# Both engines split a tensor into requests of 1 MiB; 32 of them in flight saturate a drive (MemAscend IV-E).
AIO = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
# With DeepSpeed's own AdamW, bf16 master weights lose small updates; ours rounds stochastically.
_BF16 = {"optimizer_states": "bf16", "numerics": "fast"}
PERSISTENCE_THRESHOLD = 100_000
MAX_LIVE_PARAMETERS = 1_000_000_000


def deepspeed_config(work: Workload, nvme_path: str, learning_rate: float = 1e-5) -> dict[str, Any]:
    """Return the DeepSpeed configuration that the plan describes, as a dict.

    Thresholds are DeepSpeed's, divided by k^2 for a twin. Raises ValueError for a system that is not ZeRO stage 3.
    """
    if not work.offloads:
        raise ValueError(
            f"{work.system} needs no DeepSpeed configuration: name another --system, or leave --write-config out"
        )
    area = work.spec.k * work.spec.k

    def scaled(threshold: float) -> int:
        return max(1, int(threshold) // area)

    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(scaled(REDUCE_BUCKET), work.spec.parameters),
        "sub_group_size": work.sub_group_size,
        "stage3_prefetch_bucket_size": scaled(PREFETCH_BUCKET),
        "stage3_max_live_parameters": scaled(MAX_LIVE_PARAMETERS),
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": scaled(PERSISTENCE_THRESHOLD),
        "memory_efficient_linear": False,
        **_offload(work, nvme_path),
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.accumulation,
        "train_batch_size": work.batch * work.accumulation * work.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        work.dtype: {"enabled": True},
        "data_types": {"grad_accum_dtype": work.gradients},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": True,
    }
    if work.swaps and not work.arrangement.derives_sizes:  # otherwise they are derived from the machine at run time
        config["aio"] = AIO | {"intra_op_parallelism": 1}
    if work.arrangement.derives_sizes:
        config["memascend"] = {name: getattr(work.stack, name) for name in MODEL_OPTIONS}
        if work.states == "bf16":
            config["memascend"] |= _BF16
        config["memascend"] |= {n: v for n, v in work.arrangement.parts.items() if v != DEFAULTS[n]}
    return config


def _offload(work: Workload, nvme_path: str) -> dict[str, Any]:
    """Return the sections offload_param and offload_optimizer."""
    if not work.swaps:
        in_memory = {"device": "cpu", "pin_memory": True}
        return {"offload_param": dict(in_memory), "offload_optimizer": dict(in_memory)}
    param = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True, "max_in_cpu": 0}
    if not work.arrangement.derives_sizes:  # ours derives both from the model
        parts = work.streamed()
        param |= {"buffer_count": parts.monolithic_count(), "buffer_size": parts.largest}
    optimizer = {
        "device": "nvme",
        "nvme_path": nvme_path,
        "pin_memory": True,
        "buffer_count": work.optimizer_buffers,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
    }
    return {"offload_param": param, "offload_optimizer": optimizer}


def write_config(config: dict[str, Any], path: Path, *, force: bool) -> None:
    """Write the configuration as JSON, atomically.

    Raises ValueError if the file cannot be written, or exists and `force` is off.
    """
    if path.exists() and not force:
        raise ValueError(f"{path} exists: --force replaces it, or name another file")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    try:
        handle, partial = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(
            f"cannot write the configuration {path}: {error.strerror}; name a file in another folder"
        ) from None

"""What a system must provide. Adding a system is adding a folder with ``system.yaml`` and ``system.py``.

``system.py`` defines ``SYSTEM``, an object of :class:`System`. A system imports ``memascend`` and this module, never
another system.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run of one twin. Sizes in tokens and sequences; ``k`` divides hidden, intermediate, vocabulary."""

    run_id: str
    system: str
    arm: str
    model: str
    k: int
    dtype: str  # "fp16" or "bf16"
    sequence: int
    batch: int  # sequences a rank
    steps: int
    seed: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a configuration needs to know of the model, in elements of one rank's partitions.

    ``pool_buffers``: buffers of the baseline's pool, 2 + the matrices of a block (9 if dense, 390 with 128 experts).
    """

    largest_tensor: int
    parameters: int
    pool_buffers: int


class System(Protocol):
    """A way of training. ``arms`` are its named variants."""

    @property
    def name(self) -> str: ...

    @property
    def arms(self) -> tuple[str, ...]: ...

    def describe(self) -> dict[str, Any]:
        """``system.yaml`` as a dict: label, paper, what is on, what is simulated."""
        ...

    def parts(self, arm: str) -> dict[str, str]:
        """Keyword arguments of ``memascend.enable`` for this arm: which parts stand in DeepSpeed's places."""
        ...

    def deepspeed_config(self, run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
        """The complete DeepSpeed configuration of a run."""
        ...


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSystem:
    """A system that is DeepSpeed with parts of ours or its own: a table of arms, and how to configure a run."""

    name: str
    parts_by_arm: dict[str, dict[str, str]]
    configure: Callable[[RunSpec, Sizes, str], dict[str, Any]]

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.parts_by_arm)

    def describe(self) -> dict[str, Any]:
        return yaml.safe_load((_FOLDER / self.name / "system.yaml").read_text())

    def parts(self, arm: str) -> dict[str, str]:
        return dict(self.parts_by_arm[arm])

    def deepspeed_config(self, run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
        return self.configure(run, sizes, nvme_path)


def system_names() -> list[str]:
    """Every folder that holds a system."""
    return sorted(p.parent.name for p in _FOLDER.glob("*/system.yaml"))


def load_system(name: str, arm: str | None = None) -> System:
    """The system called ``name``; ValueError in one line when it, or its arm, does not exist."""
    if name not in system_names():
        raise ValueError(f"unknown system {name!r}; known systems: {', '.join(system_names())}")
    system: System = importlib.import_module(f"baselines.{name}.system").SYSTEM
    if arm is not None and arm not in system.arms:
        raise ValueError(f"system {name!r} has no arm {arm!r}; its arms: {', '.join(system.arms)}")
    return system


def scaled(threshold: float, k: int) -> int:
    """A threshold in bytes or elements, divided by k squared as the twin's matrices are (at least 1)."""
    return max(1, int(threshold) // (k * k))


def zero3_config(run: RunSpec, offload_param: dict[str, Any], offload_optimizer: dict[str, Any]) -> dict[str, Any]:
    """The ZeRO-3 settings that every DeepSpeed system here shares; thresholds are DeepSpeed's defaults / k^2.

    ``initial_scale_power`` is 8 so that no step is skipped for overflow; the check runs all the same.
    ``stage3_max_reuse_distance`` is 0: with more, live parameters hold their swap buffers and the pool runs out.
    ``sub_group_size`` is small, so that the largest sub-group is the largest tensor, as the papers' totals imply
    (DeepSpeed counts a rank's partitions, hence the division by ranks).
    """
    return {
        "train_micro_batch_size_per_gpu": run.batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": run.batch * run.ranks,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "fp16": {"enabled": run.dtype == "fp16", "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 1000},
        "bf16": {"enabled": run.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": scaled(5e8, run.k),
            "sub_group_size": scaled(6.4e7 / run.ranks, run.k),
            "stage3_prefetch_bucket_size": scaled(5e7, run.k),
            "stage3_max_live_parameters": scaled(1e9, run.k),
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": scaled(1e5, run.k),
            "memory_efficient_linear": False,
            "offload_param": offload_param,
            "offload_optimizer": offload_optimizer,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 1,
        },
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }


def nvme_offload(run: RunSpec, sizes: Sizes, nvme_path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameter and optimizer offload to NVMe: buffers of the embedding's size, five optimizer buffers.

    ``max_in_cpu`` is 0: its default of 1e9 silently keeps every parameter of a small model in memory.
    """
    param = {
        "device": "nvme",
        "nvme_path": nvme_path,
        "pin_memory": True,
        "buffer_count": sizes.pool_buffers,
        "buffer_size": sizes.largest_tensor,
        "max_in_cpu": 0,
    }
    optimizer = {
        "device": "nvme",
        "nvme_path": nvme_path,
        "pin_memory": True,
        "buffer_count": 5,
        "fast_init": False,
        "pipeline_read": False,
        "pipeline_write": False,
    }
    return param, optimizer

"""Shared code of the systems on DeepSpeed's ZeRO stage 3: checking and configuring a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.arrangements import DEFAULTS, Arrangement, where_gradients_wait
from memascend.baselines.protocol.described import PlannedSystem
from memascend.baselines.protocol.runs import RunSpec, Sizes
from memascend.memory.placement_policy import PROCESS_INTERLEAVE
from memascend.planner.derived_sizes import cached_sub_group_buffers, cached_sub_groups_for, optimizer_buffers
from memascend.planner.options import MODEL_OPTIONS
from memascend.planner.pool import swap_buffers
from memascend.training.backends import DEEPSPEED, Setup

if TYPE_CHECKING:
    from memascend.planner.workload import Workload
    from memascend.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSystem(PlannedSystem):
    """A system on DeepSpeed, with parts of ours or DeepSpeed's own; `configure` makes the configuration of a run."""

    configure: Callable[[RunSpec, Sizes, str], dict[str, Any]]

    def parts(self, arm: str) -> dict[str, str]:
        """Return the keyword arguments of `memascend.enable` for this arm: the parts that replace DeepSpeed's."""
        return dict(self.arms[arm].parts)

    def deepspeed_config(self, run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
        """Return the complete DeepSpeed configuration of a run, with swap files below `nvme_path`."""
        return self.configure(run, sizes, nvme_path)

    def refuse(self, config: TrainConfig) -> None:
        """Raise a one-line ValueError for keys that DeepSpeed or this arm cannot honour, or if DeepSpeed is missing."""
        name = config.arm or next(iter(self.arms))
        arm = self.arms[name]
        if config.dtype == "fp32":
            raise ValueError(
                "dtype 'fp32' is for --system in_memory; DeepSpeed systems train in 16 bits: set --dtype bf16"
            )
        self._refuse_placement(config, arm)
        if config.devices and not arm.direct:
            raise ValueError(
                f"devices are for the direct NVMe engine, which {self.name} ({name}) does not use: set --system "
                "memascend, or leave --devices out"
            )
        if config.tiers and arm.parts.get("aio", "stock") == "stock":
            raise ValueError(
                f"tiers are for the engines of memascend, which {self.name} ({name}) does not use: set --system "
                "mlp_offload or memascend, or leave --tiers out"
            )
        if config.states == "bf16" and (not arm.derives_sizes or config.dtype != "bf16"):
            raise ValueError("states 'bf16' are a part of memascend and need dtype bf16: set --system and --dtype")
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(
                f"system '{self.name}' trains on DeepSpeed, which is not installed: pip install "
                "'memascend[deepspeed]', or use --system lohan"
            )

    def _refuse_placement(self, config: TrainConfig, arm: Arrangement) -> None:
        """Raise ValueError for a placement that this arm cannot follow.

        Placement by class needs our allocator, and `latency_first` needs states in host memory.
        """
        if config.placement is None or config.placement == PROCESS_INTERLEAVE:
            return
        if arm.placement is not None:
            raise ValueError(f"placement: the arm {config.arm or next(iter(self.arms))} has its own; leave it out")
        if arm.parts.get("pinned", "exact") != "exact":
            raise ValueError(
                f"placement needs our allocator, and this arm of {self.name} leaves memory to DeepSpeed: --system cxl, "
                "or leave it out"
            )
        if arm.states_on == "ssd":
            self.refuse_a_plan_of_states(config.placement)

    def trainer(self, config: TrainConfig, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
        """Return the DeepSpeed backend with this run's configuration and parts."""
        arm = config.arm or next(iter(self.arms))
        run = RunSpec(
            run_id=run_id,
            system=self.name,
            arm=arm,
            model=config.model,
            k=config.twin,
            dtype=config.dtype,
            sequence=prepared["context"],
            batch=config.batch,
            steps=1,
            seed=config.seed,
            ranks=config.ranks,
        )
        sizes = Sizes(**{name: prepared[name] for name in ("largest_tensor", "parameters", "pool_buffers")})
        parts = self.parts(arm)
        if config.states == "bf16":
            parts |= {"optimizer_states": "bf16", "numerics": "fast"}
        ds_config = self.deepspeed_config(run, sizes, swap)
        if config.devices:
            ds_config["memascend"] = {"devices": list(config.devices)}
        if config.tiers:
            used = config.tiers[:1] if self.arms[arm].first_path else config.tiers
            ds_config["memascend"] = {"tiers": list(used)}
            if config.write_budget is not None:
                ds_config["memascend"] |= {"write_budget": config.write_budget, "write_budget_stops": True}
        placement = config.placement or self.arms[arm].placement
        if placement is not None and placement != PROCESS_INTERLEAVE:  # the worker interleaves the process
            ds_config.setdefault("memascend", {})["placement"] = placement
        ds_config = self._fitted(ds_config, config, prepared, self.arms[arm])
        minimum = scaled(1 << 20, config.twin) if config.twin > 1 else None
        settings: dict[str, Any] = {"deepspeed_config": ds_config, "parts": parts, "minimum_swap_bytes": minimum}
        settings["placement"] = config.placement or self.arms[arm].placement
        on_ssd = config.checkpointing == "ssd"
        settings["activations_folder"] = swap if on_ssd else None
        return Setup(backend=DEEPSPEED, settings=settings, swaps=swaps(ds_config) or on_ssd)

    def planned_config(self, work: Workload, nvme_path: str) -> dict[str, Any]:
        """Return the DeepSpeed JSON of the run that a plan describes: the trainer's, with its parts as a section.

        Raises ValueError for an arm that interleaves the whole process, which is no part of a configuration.
        """
        from memascend.training.config import TrainConfig  # here, since most systems are loaded to be planned

        if work.arrangement.placement == PROCESS_INTERLEAVE:
            raise ValueError(
                f"arm {work.arm_name!r} of system {self.name!r} interleaves the whole process, which no DeepSpeed "
                "configuration does: use memascend train, or leave --write-config out"
            )
        options = {name: getattr(work.stack, name) for name in MODEL_OPTIONS}
        shared = {name: getattr(work, name) for name in ("dtype", "states", "gradients", "batch", "clip", "ranks")}
        config = TrainConfig(
            model=work.spec.name,
            system=self.name,
            arm=work.arm_name,
            twin=work.spec.k,
            accumulate=work.accumulation,
            **shared,
            **options,
        )
        prepared = {
            "context": work.context,
            "parameters": work.spec.parameters,
            "sub_group_size": work.sub_group_size,
            **swap_buffers(work.spec.tensors(), ranks=work.ranks, threshold_bytes=work.swap_threshold_bytes),
        }
        settings = self.trainer(config, prepared, "plan", nvme_path).settings
        ds_config: dict[str, Any] = settings["deepspeed_config"]
        parts = settings["parts"]
        section = ds_config.pop("memascend", {})
        if parts.get("pool", "adaptive") == "adaptive":  # its buffers are as large as the model's tensors
            for name in ("buffer_count", "buffer_size"):
                ds_config["zero_optimization"]["offload_param"].pop(name, None)
        if "tiers" not in section:  # with tiers, other values are the defaults
            parts = {name: value for name, value in parts.items() if value != DEFAULTS.get(name)}
        return ds_config | {"memascend": parts | section | options}

    def _fitted(
        self, ds_config: dict[str, Any], config: TrainConfig, prepared: dict[str, Any], arm: Arrangement
    ) -> dict[str, Any]:
        """Set this run's optimizer, accumulation and clipping in the system's configuration, and return it.

        Sub-groups are those that the drop-in derives, for all systems alike, so that all train to equal losses.
        MemAscend gets the optimizer buffers and the I/O settings that `"memascend": {}` would give it. The reduce
        bucket is at most as large as the model, since it is allocated in full. The fp16 loss scale starts at
        DeepSpeed's default, since skipped steps are part of a real run.
        """
        zero = ds_config["zero_optimization"]
        zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], prepared["parameters"]))
        zero["sub_group_size"] = prepared.get("sub_group_size", zero["sub_group_size"])  # not recorded by older runs
        if arm.derives_sizes and "sub_group_size" in prepared:
            tiers = ds_config.get("memascend", {}).get("tiers", ())
            swaps_gradients = where_gradients_wait(arm.parts, "host" if tiers else "nvme") == "nvme"
            if tiers:
                zero["offload_optimizer"]["buffer_count"] = cached_sub_group_buffers(
                    swaps_gradients, cached_sub_groups_for(len(tiers))
                )
            else:
                zero["offload_optimizer"]["buffer_count"] = optimizer_buffers(
                    zero["offload_optimizer"], swaps_gradients
                )
            del ds_config["aio"]
        ds_config["gradient_accumulation_steps"] = config.accumulate
        ds_config["train_batch_size"] = config.batch * config.accumulate * config.ranks
        ds_config["gradient_clipping"] = config.clip
        ds_config["optimizer"]["params"] |= {
            "lr": config.peak_learning_rate,
            "betas": [config.beta1, config.beta2],
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        ds_config["data_types"]["grad_accum_dtype"] = config.gradients
        ds_config["fp16"] |= {"initial_scale_power": 16}
        return ds_config


def swaps(ds_config: dict[str, Any]) -> bool:
    """Return whether a configuration offloads anything to NVMe."""
    zero = ds_config["zero_optimization"]
    return any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_param", "offload_optimizer"))


def scaled(threshold: float, k: int) -> int:
    """Return a threshold in bytes or elements divided by k squared, as a twin's matrices are, but at least 1."""
    return max(1, int(threshold) // (k * k))


def zero3_config(run: RunSpec, offload_param: dict[str, Any], offload_optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the ZeRO-3 settings shared by all DeepSpeed systems; thresholds are DeepSpeed's defaults / k^2.

    ``initial_scale_power`` is 8 so that no step is skipped for overflow; the check still runs.
    ``stage3_max_reuse_distance`` is 0, since otherwise live parameters keep their swap buffers and exhaust the pool.
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
    """Return the sections for parameter and optimizer offload to NVMe.

    Parameter buffers have the size of the largest tensor (the embedding); the optimizer has five buffers.
    ``max_in_cpu`` is 0, since its default of 1e9 silently keeps all parameters of a small model in memory.
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

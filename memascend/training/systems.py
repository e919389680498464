"""The systems that a run can use, found by entry point, since the library imports nothing of ours above it."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

GROUP = "memascend.systems"


def provider() -> Any:
    """The module that lists and loads systems (baselines.protocol); ValueError where none is installed."""
    found = list(importlib.metadata.entry_points(group=GROUP))
    if not found:
        raise ValueError(
            f"no systems are installed (entry point {GROUP}); install again: make setup, or pip install -e ."
        )
    try:
        return found[0].load()
    except ImportError as error:
        raise ValueError(
            f"the systems of {found[0].value} cannot be loaded ({error}); install again: make setup"
        ) from None


def check(config: Any) -> None:
    """Refuse, in one line, a system that is not there and keys that exclude one another."""
    system = provider().load_system(config.system, config.arm)
    if config.devices and system.parts(config.arm or system.arms[0]).get("aio") != "direct":
        raise ValueError(
            f"devices are for the direct NVMe engine, which {config.system} ({config.arm or system.arms[0]}) does not "
            "use: set --system memascend, or leave --devices out"
        )
    for device in config.devices:
        if not os.path.exists(device):
            raise ValueError(f"there is no device {device}; 'memascend storage format' makes one ready")
    if config.states == "bf16" and (config.system != "memascend" or config.dtype != "bf16"):
        raise ValueError("states 'bf16' are a part of memascend and need dtype bf16: set --system and --dtype")
    if config.gradients == "bf16" and config.dtype != "bf16":
        raise ValueError("gradients 'bf16' need dtype bf16: set --dtype bf16, or --gradients fp32")


def deepspeed_setup(
    config: Any, prepared: dict[str, Any], run_id: str, swap: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """(DeepSpeed configuration, keywords of memascend.enable) of a run on `config.system`."""
    systems = provider()
    system = systems.load_system(config.system, config.arm)
    arm = config.arm or system.arms[0]
    run = systems.RunSpec(
        run_id=run_id,
        system=config.system,
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
    sizes = systems.Sizes(**{name: prepared[name] for name in ("largest_tensor", "parameters", "pool_buffers")})
    parts = system.parts(arm)
    if config.states == "bf16":
        parts |= {"optimizer_states": "bf16", "numerics": "fast"}
    ds_config = system.deepspeed_config(run, sizes, swap)
    if config.devices:
        ds_config["memascend"] = {"devices": list(config.devices)}
    return _fitted(ds_config, config, prepared["parameters"]), parts


def _fitted(ds_config: dict[str, Any], config: Any, parameters: int) -> dict[str, Any]:
    """The system's configuration with this run's optimizer, accumulation and clipping.

    The reduce bucket is a buffer of its full size: no larger than the model. The fp16 loss scale starts where
    DeepSpeed's default does, since skipped steps are part of a real run.
    """
    zero = ds_config["zero_optimization"]
    zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], parameters))
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
    """Whether anything is offloaded to NVMe."""
    zero = ds_config["zero_optimization"]
    return any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_param", "offload_optimizer"))

"""bf16 master weights, gradients and Adam states on NVMe (MemAscend, half-precision optimizer): half the bytes.

DeepSpeed's own setting for this, ``bf16_optimizer_states``, crashes with an NVMe optimizer: when a swapped tensor is
released, ``SwapTensorContext`` sets its data to ``torch.Tensor()``, which is fp32, and the next swap-in requests fp32
buffers from a bf16 pool. The context here keeps the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memascend.integrations.configuration import read_configuration

from .compat import BF16_HOOKS, check_hooks

_BF16_KEYS = ("bf16_master_weights_and_grads", "bf16_optimizer_states")


def with_bf16_states(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``ds_config`` with the settings that bf16 states need; ``ds_config`` itself is not changed.

    Raises ValueError, in one line, for settings that contradict bf16 states.
    """
    section = "bfloat16" if "bfloat16" in ds_config else "bf16"
    stock = {key: value for key, value in (ds_config.get(section) or {}).items() if value != "auto"}
    if (ds_config.get("fp16") or {}).get("enabled") not in (None, False, "auto"):
        raise ValueError(
            "memascend.optimizer_states='bf16' trains in bf16, but fp16.enabled is true; "
            "set fp16.enabled to false, or optimizer_states to 'fp32'"
        )
    for key in ("enabled", *_BF16_KEYS):
        if stock.get(key, True) is not True:
            raise ValueError(
                f"memascend.optimizer_states='bf16' contradicts {section}.{key}={stock[key]!r}; remove that key, "
                "or set optimizer_states to 'fp32'"
            )
    if not _offloads_optimizer(ds_config):
        raise ValueError(
            "memascend.optimizer_states='bf16' needs an offloaded optimizer; set "
            "zero_optimization.offload_optimizer.device to 'nvme' or 'cpu'"
        )
    parameters = (ds_config.get("optimizer") or {}).get("params") or {}
    if parameters.get("fp32_optimizer_states"):
        raise ValueError(
            "memascend.optimizer_states='bf16' contradicts optimizer.params.fp32_optimizer_states=true; remove that key"
        )
    return ds_config | {section: {**stock, "enabled": True, **dict.fromkeys(_BF16_KEYS, True)}}


def _offloads_optimizer(ds_config: dict[str, Any]) -> bool:
    """Return whether the configuration keeps the optimizer's states in host memory or on NVMe."""
    zero = ds_config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")


def write_bf16_states() -> Callable[[], None]:
    """Add bf16 states to every configuration that DeepSpeed reads from now on; return a function that undoes it.

    DeepSpeed, the Trainer and Accelerate read files again and copy dicts, so a change to one of these would be lost.
    Configurations without an offloaded optimizer (a frozen second model, say) have no such states and are not changed.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    stock = DeepSpeedConfig.__init__

    @functools.wraps(stock)
    def read_with_bf16_states(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        found = read_configuration(config)
        if found is not None and _offloads_optimizer(found):
            config = with_bf16_states(found)
        stock(self, config, *args, **kwargs)

    DeepSpeedConfig.__init__ = read_with_bf16_states

    def undo() -> None:
        DeepSpeedConfig.__init__ = stock

    return undo


def refuse_contradictions(ds_config: dict[str, Any]) -> None:
    """Raise ValueError if DeepSpeed's own bf16 keys are set for an optimizer on NVMe.

    Called with fp32 states: on NVMe these keys only work with ``optimizer_states='bf16'``.
    """
    section = ds_config.get("bf16") or ds_config.get("bfloat16") or {}
    optimizer = (ds_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    asked = [key for key in _BF16_KEYS if section.get(key)]
    if asked and optimizer.get("device") == "nvme":
        raise ValueError(
            f"bf16.{asked[0]} is true and the optimizer is on NVMe, where DeepSpeed crashes with it; set "
            "memascend.optimizer_states to 'bf16' (and leave the key out)"
        )


def keep_dtype_of_swapped_tensors() -> Callable[[], None]:
    """Put a dtype-keeping ``SwapTensorContext`` into DeepSpeed's optimizer swappers; return a function that undoes it.

    Hook: module global ``swap_tensor.optimizer_utils.SwapTensorContext``. Raises RuntimeError if it has changed.
    """
    from deepspeed.runtime.swap_tensor import optimizer_utils

    check_hooks(BF16_HOOKS, tried=("0.19.8",), otherwise="set memascend.optimizer_states to 'fp32'")
    stock = optimizer_utils.SwapTensorContext

    class DtypeKeepingSwapContext(stock):  # type: ignore[misc, valid-type]
        def __init__(self, tensor: torch.Tensor, swap_folder: str) -> None:
            super().__init__(tensor, swap_folder)
            self.swap_tensor = torch.empty(0, dtype=tensor.dtype)

        def release_memory(self) -> None:
            for tensor in (self.compute_tensor, self.swap_tensor):
                tensor.data = torch.empty(0, dtype=tensor.dtype)

    optimizer_utils.SwapTensorContext = DtypeKeepingSwapContext

    def undo() -> None:
        optimizer_utils.SwapTensorContext = stock

    return undo

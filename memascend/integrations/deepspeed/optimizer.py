"""The ZeRO-3 optimizer with a selectable overflow check, and pool, settings and gradient buffer from the module.

Hook: ``stage3.DeepSpeedZeroOptimizer_Stage3``, replaced by a subclass (the engine imports it when it needs it). The
subclass is composed of mixins, which share one settings object, :class:`Stage3Settings`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.integrations.conventions import announce
from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

from .banner import enabled_line
from .compat import (
    DEFERRED_CONVERSION_HOOKS,
    FAST_HOOKS,
    FIRST_STEP_HOOKS,
    HOST_GRADIENT_HOOKS,
    ORDERED_HOOKS,
    PLACED_HOOKS,
    UNUSED_PARAMETER_HOOKS,
    check_hooks,
    has_hooks,
)
from .deferred_grad_conversion import DeferredGradConversion
from .first_step import SWAPS_CONTEXTS, FirstStepInPlace
from .host_gradients import HostGradients
from .lasting import changes
from .ordered_update import OrderedUpdate
from .placed_states import PlacedStates
from .stage3_settings import Stage3Settings
from .storage_user import StorageUser
from .swapped_states import ExactCheckpoints
from .unused_parameters import UnusedParameters

_CHECKS: dict[str, Callable[[torch.Tensor], bool]] = {
    "fused": has_overflow,
    "chain": has_overflow_chain,
    "aminmax": has_overflow_aminmax,
}


def checked_optimizer_class(stock_class: type, settings: Stage3Settings) -> type:
    """Return the subclass of DeepSpeed's stage-3 optimizer. Raises RuntimeError if a hook has changed."""
    bases: list[type] = [MemascendStage3, StorageUser]
    if settings.derived is not None:
        check_hooks(UNUSED_PARAMETER_HOOKS)
        bases += [ExactCheckpoints, UnusedParameters] if settings.exact_checkpoints else [UnusedParameters]
    if settings.allocator is not None:
        if SWAPS_CONTEXTS:
            check_hooks(FIRST_STEP_HOOKS)
        bases.insert(0, FirstStepInPlace)
    if settings.placement is not None:
        check_hooks(PLACED_HOOKS, otherwise="leave memascend.placement out")
        bases.insert(0, PlacedStates)
    if settings.parts.gradients == "host":
        check_hooks(HOST_GRADIENT_HOOKS, otherwise="set memascend.gradients to 'nvme'")
        bases.insert(0, HostGradients)
        if settings.tiers:
            check_hooks(DEFERRED_CONVERSION_HOOKS, otherwise="set memascend.gradients to 'nvme'")
        if has_hooks(DEFERRED_CONVERSION_HOOKS):  # DeepSpeed 0.16 has another way from the device to the swapper
            bases.insert(0, DeferredGradConversion)
    if settings.tiers:
        check_hooks(ORDERED_HOOKS, otherwise="leave memascend.tiers out")
    if settings.parts.numerics == "fast":
        check_hooks(FAST_HOOKS, otherwise="set memascend.numerics to 'exact'")
        from .numerics import FastNumerics

        bases.insert(0, FastNumerics)
    if settings.tiers:
        bases.insert(0, OrderedUpdate)
    return type(f"MemAscend{stock_class.__name__}", (*bases, stock_class), {"settings": settings})


def local_overflow(check: str, gradients: torch.Tensor) -> bool:
    """Return whether ``gradients`` have an infinite or NaN element, by the check named ``check``.

    Without an offloaded optimizer DeepSpeed keeps them on the accelerator, where ``fused``, a check for host memory, is
    replaced by one ``torch.aminmax``.
    """
    if check == "fused" and not gradients.is_cpu:
        check = "aminmax"
    return _CHECKS[check](gradients)


class MemascendStage3:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` with derived settings, swap limit and overflow check."""

    settings: Stage3Settings
    unconverted_gradient: torch.Tensor | None = None

    def __init__(self, module: torch.nn.Module, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.settings.derived is not None:
            self.settings.derived.fill_stage3(init_optimizer, kwargs)
        super().__init__(module, init_optimizer, *args, **kwargs)
        changes.add_user(self)

    def destroy(self) -> None:
        """Destroy the optimizer, and with it the need for what :func:`.hooks.disable` has left in DeepSpeed."""
        super().destroy()
        for user in (self, *self._swappers):
            changes.remove_user(user)

    def initialize_ds_offload(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Let the swappers size their pools after DeepSpeed's method.

        By then every parameter is partitioned, including those of a model built outside ``zero.Init``, and none has
        been gathered yet.
        """
        offload = super().initialize_ds_offload(module, *args, **kwargs)
        self._swappers = _swappers_of(module)
        if self.settings.derived is not None:
            pools = [s.pool.total_bytes for s in self._swappers if getattr(s, "pool", None) is not None]
            announce(enabled_line(self.settings.parts, self.settings.derived, sum(pools) if pools else None))
        return offload

    def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
        super()._configure_tensor_swapping(*args, **kwargs)
        if self.settings.minimum_swap_bytes is not None:
            self.optimizer_swapper.min_aio_bytes = self.settings.minimum_swap_bytes

    def _partition_all_parameters(self) -> None:
        """Also release partitions that were read ahead and not used.

        Otherwise the step would update only their copies in memory and leave the old weights on NVMe.
        """
        super()._partition_all_parameters()
        for swapper in self._swappers:
            if hasattr(swapper, "release_read_ahead"):
                swapper.release_read_ahead()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank's gradients have an infinite or NaN element, found by the chosen check.
        Collective."""
        if self.settings.parts.overflow == "stock" or not partition_gradients:
            return super().has_overflow(partition_gradients)
        found = self._local_overflow()
        flag = get_accelerator().ByteTensor([int(found)]).to(get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        return bool(flag[0].item())

    def _local_overflow(self) -> bool:
        return local_overflow(self.settings.parts.overflow, self.grad_partitions_flat_buffer)


def _swappers_of(module: torch.nn.Module) -> list[Any]:
    """Return the parameter swappers of ``module``, after each has adopted it."""
    swappers = {id(s): s for s in (getattr(p, "nvme_swapper", None) for p in module.parameters()) if s is not None}
    for swapper in swappers.values():
        if hasattr(swapper, "adopt_module"):
            swapper.adopt_module(module)
    return list(swappers.values())

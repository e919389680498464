"""The ZeRO-3 optimizer with the overflow check of our choice, and the pool told about the module.

Hook: ``stage3.DeepSpeedZeroOptimizer_Stage3``, replaced by a subclass (the engine imports it when it needs it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

CHECKS: dict[str, Callable[[torch.Tensor], bool]] = {
    "fused": has_overflow,
    "chain": has_overflow_chain,
    "aminmax": has_overflow_aminmax,
}


def checked_optimizer_class(
    stock_class: type, check_name: str, minimum_swap_bytes: int | None, numerics: str = "exact"
) -> type:
    """Subclass of DeepSpeed's stage-3 optimizer; ``check_name`` 'stock' leaves the overflow check alone."""

    class MemAscendStage3(stock_class):  # type: ignore[misc, valid-type]
        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            self._adopt(module)
            super().__init__(module, *args, **kwargs)

        def _adopt(self, module: torch.nn.Module) -> None:
            swappers = {
                id(s): s for s in (getattr(p, "nvme_swapper", None) for p in module.parameters()) if s is not None
            }
            for swapper in swappers.values():
                if hasattr(swapper, "adopt_module"):
                    swapper.adopt_module(module)

        def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
            super()._configure_tensor_swapping(*args, **kwargs)
            if minimum_swap_bytes is not None:
                self.optimizer_swapper.min_aio_bytes = minimum_swap_bytes

        def has_overflow(self, partition_gradients: bool = True) -> bool:
            if check_name == "stock" or not partition_gradients:
                return super().has_overflow(partition_gradients)
            found = self._local_overflow()
            flag = get_accelerator().ByteTensor([int(found)]).to(get_accelerator().current_device_name())
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
            self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
            return bool(flag[0].item())

        def _local_overflow(self) -> bool:
            return CHECKS[check_name](self.grad_partitions_flat_buffer)

    if numerics == "fast":
        from .numerics import fast_numerics_class

        MemAscendStage3 = fast_numerics_class(MemAscendStage3)
    MemAscendStage3.__name__ = f"MemAscend{stock_class.__name__}"
    MemAscendStage3.__qualname__ = MemAscendStage3.__name__
    return MemAscendStage3

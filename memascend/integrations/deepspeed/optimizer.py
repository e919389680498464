"""The ZeRO-3 optimizer with the overflow check of our choice; pool, settings and gradient buffer made from the module.

Hook: ``stage3.DeepSpeedZeroOptimizer_Stage3``, replaced by a subclass (the engine imports it when it needs it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

from .accelerator import PinnedAllocator
from .derived import DerivedSettings
from .parts import Parts
from .swapped_states import ExactCheckpoints

CHECKS: dict[str, Callable[[torch.Tensor], bool]] = {
    "fused": has_overflow,
    "chain": has_overflow_chain,
    "aminmax": has_overflow_aminmax,
}


def checked_optimizer_class(
    stock_class: type,
    parts: Parts,
    minimum_swap_bytes: int | None,
    derived: DerivedSettings | None,
    allocator: PinnedAllocator | None,
    exact_checkpoints: bool = False,
) -> type:
    """Subclass of DeepSpeed's stage-3 optimizer; overflow 'stock' leaves the check alone.

    ``derived``: fills in what the user left out; None for DeepSpeed as it is. ``allocator``: keeps start-up and first
    step in the memory of later ones (:mod:`.first_step`); None leaves them to DeepSpeed.
    """
    check_name = parts.overflow

    bases = (ExactCheckpoints, stock_class) if exact_checkpoints else (stock_class,)

    class MemAscendStage3(*bases):  # type: ignore[misc, valid-type]
        def __init__(self, module: torch.nn.Module, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._swappers = swappers = self._adopt(module)
            if derived is not None:
                derived.fill_stage3(init_optimizer, kwargs)
                pools = [s.pool.total_bytes for s in swappers if getattr(s, "pool", None) is not None]
                log_dist(derived.line(sum(pools) if pools else None), ranks=[0])
            super().__init__(module, init_optimizer, *args, **kwargs)

        def _adopt(self, module: torch.nn.Module) -> list[Any]:
            swappers = {
                id(s): s for s in (getattr(p, "nvme_swapper", None) for p in module.parameters()) if s is not None
            }
            for swapper in swappers.values():
                if hasattr(swapper, "adopt_module"):
                    swapper.adopt_module(module)
            return list(swappers.values())

        def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
            super()._configure_tensor_swapping(*args, **kwargs)
            if minimum_swap_bytes is not None:
                self.optimizer_swapper.min_aio_bytes = minimum_swap_bytes

        def _partition_all_parameters(self) -> None:
            """Before a step, partitions that were read ahead and not used go too: DeepSpeed would update the copies in
            memory alone and leave the old weights on NVMe.
            """
            super()._partition_all_parameters()
            for swapper in self._swappers:
                if hasattr(swapper, "release_read_ahead"):
                    swapper.release_read_ahead()

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

    if allocator is not None:
        from .first_step import first_step_class

        MemAscendStage3 = first_step_class(MemAscendStage3, allocator)
    if parts.gradients == "kept":
        from .kept_gradients import kept_gradients_class

        MemAscendStage3 = kept_gradients_class(MemAscendStage3)
    if parts.numerics == "fast":
        from .numerics import fast_numerics_class

        MemAscendStage3 = fast_numerics_class(MemAscendStage3)
    MemAscendStage3.__name__ = f"MemAscend{stock_class.__name__}"
    MemAscendStage3.__qualname__ = MemAscendStage3.__name__
    return MemAscendStage3

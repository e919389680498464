"""The ZeRO-3 optimizer says how urgent its swapper's reads are, and gives up its storage when it is destroyed."""

from __future__ import annotations

from typing import Any

from .aio import AioHandle
from .swap_store import OPTIMIZER_READ


class StorageUser:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3``, with ``_swappers`` of the parameters."""

    def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
        super()._configure_tensor_swapping(*args, **kwargs)
        for handle in _handles(self.optimizer_swapper):
            handle.read_priority = OPTIMIZER_READ

    def destroy(self) -> None:
        """Swapped states go at once. Parameters can still be gathered, until ``memascend.disable()``."""
        super().destroy()
        for handle in _handles(getattr(self, "optimizer_swapper", None)):
            handle.close()
        for swapper in getattr(self, "_swappers", ()):
            for handle in _handles(swapper):
                handle.end_training()


def _handles(swapper: Any) -> list[AioHandle]:
    return [] if swapper is None else [each for each in vars(swapper).values() if isinstance(each, AioHandle)]

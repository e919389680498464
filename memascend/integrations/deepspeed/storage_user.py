"""Mixin by which the ZeRO-3 optimizer sets the priority of its swapper's reads and releases its storage at the end."""

from __future__ import annotations

from typing import Any

from .aio import AioHandle
from .swap_store import OPTIMIZER_READ


class StorageUser:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` that uses ``_swappers``, the swappers of the parameters."""

    def _configure_tensor_swapping(self, *args: Any, **kwargs: Any) -> None:
        super()._configure_tensor_swapping(*args, **kwargs)
        for handle in _handles(self.optimizer_swapper):
            handle.read_priority = OPTIMIZER_READ

    def destroy(self) -> None:
        """Erase swapped states at once. Parameters can still be gathered until ``memascend.disable()``."""
        super().destroy()
        for handle in _handles(getattr(self, "optimizer_swapper", None)):
            handle.close()
        for swapper in getattr(self, "_swappers", ()):
            for handle in _handles(swapper):
                handle.end_training()


def _handles(swapper: Any) -> list[AioHandle]:
    """Return the I/O handles of a swapper, which are attributes of it."""
    return [] if swapper is None else [each for each in vars(swapper).values() if isinstance(each, AioHandle)]

"""DeepSpeed's AdamW for the CPU on flat tensors: bit-identical to ZeRO with an offloaded optimizer, without ZeRO."""

from __future__ import annotations

import torch


class DeepSpeedAdamW:
    """The native update of `DeepSpeedCPUAdam`, called in the same order. Not thread-safe.

    The native object keeps beta^t as a running float product, so a resumed run must repeat the calls before (`replay`).
    """

    def __init__(self, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._adam = DeepSpeedCPUAdam([torch.zeros(1)], betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, step: int, learning_rate: float, tensors: tuple[torch.Tensor, ...]) -> None:
        """Update `tensors` (parameter, gradient, moments; 1-D fp32 on the CPU) in place. `step` counts from one."""
        self._adam.ds_opt_adam.adam_update(
            self._adam.opt_id, step, learning_rate, *self._betas, self._eps, self._weight_decay, True, *tensors
        )

    def replay(self, steps: int) -> None:
        """Bring the native object to its state after `steps` updates, by repeating them on one element."""
        one = tuple(torch.zeros(1) for _ in range(4))
        for step in range(1, steps + 1):
            self.update(step, 0.0, one)

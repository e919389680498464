"""Three implementations of AdamW on flat groups. Their results differ in the last bits, as they round in other orders.

`torch`: that of torch.optim, on any device. `deepspeed`: the native update of DeepSpeedCPUAdam, bit-identical to every
system that leaves the step to DeepSpeed. `memascend`: `memascend.ops.adamw_`, bit-identical to `numerics: fast`; only
this one supports stochastic rounding of bf16 states, and 8-bit moments (`memascend.ops.adamw8`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw

from memascend.training.backends.groups import Group

_NORMED_AT_ONCE = 250_000_000  # elements, as in DeepSpeed's stage3._constant_buffered_norm2, for the same order of sums


class Update(Protocol):
    """An AdamW implementation that updates one group at a time."""

    on_cpu: bool  # whether the states must be in CPU memory

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the L2 norm of a flat gradient (fp64, 0-d)."""

    def apply(self, group: Group, step: int, learning_rate: float, *, scale: float, norm: torch.Tensor) -> None:
        """Unscale, clip and apply `group.gradient`. `norm` is the norm of all gradients, still scaled by `scale`."""

    def replay(self, steps: int) -> None:
        """Bring internal state to that after `steps` updates; called once, when a run is resumed."""


def make_update(name: str, config: Any) -> Update:
    """Return the update called `name`, with betas, eps, weight_decay and clip of `config`."""
    updates: dict[str, Callable[[Any], Update]] = {
        "torch": TorchUpdate,
        "deepspeed": DeepSpeedUpdate,
        "memascend": MemAscendUpdate,
    }
    return updates[name](config)


class _Unscaling:
    """Norm and unscaling with exactly the operations of DeepSpeed's ZeRO-3."""

    on_cpu = False

    def __init__(self, config: Any) -> None:
        self.betas, self.eps = (config.beta1, config.beta2), config.eps
        self.weight_decay, self.clip = config.weight_decay, config.clip

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        parts: tuple[torch.Tensor, ...] = gradient.split(_NORMED_AT_ONCE)  # type: ignore[no-untyped-call]
        total: Any = sum(part.double().norm(2) ** 2.0 for part in parts)
        norm: torch.Tensor = total**0.5
        return norm

    def unscaled(self, group: Group, scale: float, norm: torch.Tensor) -> torch.Tensor:
        """Return the unscaled and clipped gradient in the dtype of the states, in place if the dtypes agree."""
        combined: Any = scale
        if self.clip > 0:
            combined = torch.clamp(((norm / scale) + 1e-6) / self.clip, min=1.0) * scale
        return group.gradient.to(group.master.dtype).mul_(1.0 / combined)

    def replay(self, steps: int) -> None:
        pass


class TorchUpdate(_Unscaling):
    """The AdamW of torch.optim, on the device of the group."""

    def apply(self, group: Group, step: int, learning_rate: float, *, scale: float, norm: torch.Tensor) -> None:
        adamw(
            [group.master],
            [self.unscaled(group, scale, norm)],
            [group.exp_avg],
            [group.exp_avg_sq],
            [],
            [torch.tensor(float(step - 1))],
            foreach=False,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


class DeepSpeedUpdate(_Unscaling):
    """The native AdamW of DeepSpeedCPUAdam."""

    on_cpu = True

    def __init__(self, config: Any) -> None:
        from memascend.integrations.deepspeed.cpu_adamw import DeepSpeedAdamW

        super().__init__(config)
        self._adamw = DeepSpeedAdamW(self.betas, self.eps, self.weight_decay)

    def apply(self, group: Group, step: int, learning_rate: float, *, scale: float, norm: torch.Tensor) -> None:
        gradient = self.unscaled(group, scale, norm)
        self._adamw.update(step, learning_rate, (group.master, gradient, group.exp_avg, group.exp_avg_sq))

    def replay(self, steps: int) -> None:
        self._adamw.replay(steps)


class MemAscendUpdate(_Unscaling):
    """AdamW by `memascend.ops`, which unscales and clips as it reads the gradient."""

    on_cpu = True

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        from memascend.ops.unscale import unscale_norm_overflow_

        if gradient.device.type != "cpu":
            return super().norm(gradient)
        return unscale_norm_overflow_(gradient, 1.0).sum_squares.sqrt()

    def apply(self, group: Group, step: int, learning_rate: float, *, scale: float, norm: torch.Tensor) -> None:
        from memascend.ops.adamw import ROUNDING_SEED, adamw_
        from memascend.ops.adamw8 import adamw8_, scales_shape

        if self.clip > 0:
            scale *= max(1.0, (float(norm) / scale + 1e-6) / self.clip)
        gradient, states = group.gradient, group.master.dtype
        options: dict[str, Any] = {
            "step": step,
            "lr": learning_rate,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "grad_scale": 1.0 / scale,
            "seed": ROUNDING_SEED,
            "element_offset": group.first_element,
        }
        if group.scales is not None:
            scales = group.scales.view(scales_shape(gradient.numel()))
            adamw8_(group.master, gradient, group.exp_avg, group.exp_avg_sq, scales, **options)
            return
        if gradient.itemsize > states.itemsize:
            gradient = gradient.to(states)  # the kernel converts narrower ones while reading (MLP-Offload 3.2)
        adamw_(group.master, gradient, group.exp_avg, group.exp_avg_sq, **options)

"""``placement``: puts every host buffer of ZeRO-3 on the memory nodes that a policy names for its class.

DeepSpeed creates masters by ``clone`` and moments by ``zeros_like``, in the CPU's default memory and without a hook.
Here they are allocated before it needs them, by an allocator that places by class; the buffers that DeepSpeed pins
(16-bit weights, gradients, small parameters, swap buffers) come from that allocator already. DeepSpeed's own update
works on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.memory import classes
from memascend.memory.pinned import page_rounded_bytes
from memascend.memory.placement_policy import LATENCY_FIRST, PlacementPolicy
from memascend.memory.topology import Topology

from .stage3_settings import Stage3Settings


class PlacedStates:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` that allocates states from our allocator."""

    settings: Stage3Settings

    def __init__(self, module: torch.nn.Module, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        policy, allocator = PlacementPolicy.parse(self.settings.placement), self.settings.allocator
        sizes = _sizes(module, kwargs)
        if sizes is None and policy.kind == LATENCY_FIRST:
            raise ValueError(
                "memascend.placement: 'latency_first' plans states in host memory, but zero_optimization."
                "offload_optimizer.device is not 'cpu': set it, or name nodes, such as {master_weights: 0, weights: 1}"
            )
        placement = policy.resolve(sizes or {}, Topology.read())
        kept = sizes is None and self.settings.parts.gradients == "host"
        allocator.placement = placement and replace(placement, host_gradients=kept)
        super().__init__(module, init_optimizer, *args, **kwargs)

    def _create_fp32_partitions(self) -> None:
        """Create the masters as DeepSpeed does, then move those in host memory to the nodes of their class."""
        super()._create_fp32_partitions()
        for index, master in self._kept_in_memory():
            master.data = self._placed(index, master, classes.MASTERS).copy_(master.data)

    def initialize_optimizer_states(self) -> None:
        """Create moments that are missing, on the nodes of their class; only for DeepSpeedCPUAdam."""
        super().initialize_optimizer_states()
        if type(self.optimizer) is not DeepSpeedCPUAdam:
            return
        for index, master in self._kept_in_memory():
            if not self.optimizer.state.get(master):
                self.optimizer.state[master] = {
                    "step": 0,
                    "exp_avg": self._placed(index, master, classes.MOMENTUM),
                    "exp_avg_sq": self._placed(index, master, classes.VARIANCE),
                }

    def _kept_in_memory(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index, master) of the sub-groups whose states stay in host memory."""
        for index, master in enumerate(self.fp32_partitioned_groups_flat):
            if master.device.type == "cpu" and not self._swappable_optimizer_subgroup(index) and master.numel():
                yield index, master

    def _placed(self, index: int, master: torch.Tensor, owner: str) -> torch.Tensor:
        """Return zeros like a sub-group's master, on the nodes of the class ``owner``."""
        name = f"{owner} of sub-group {index}"
        return self.settings.allocator.allocate(master.numel(), master.dtype, name=name, owner=owner)


def _sizes(module: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, int] | None:
    """Return the bytes of one rank by class if the optimizer is offloaded to the CPU, else None."""
    offload = kwargs.get("offload_optimizer_config")
    if offload is None or str(getattr(offload.device, "value", offload.device)) != "cpu":
        return None
    ranks = dist.get_world_size()
    parameters = list(module.parameters())
    numel = sum(-(-getattr(p, "ds_numel", p.numel()) // ranks) for p in parameters)
    half = max((p.element_size() for p in parameters), default=2)
    arriving = kwargs.get("gradient_accumulation_dtype") or torch.float32
    sizes = dict.fromkeys((classes.MASTERS, classes.MOMENTUM, classes.VARIANCE, classes.GRADIENTS), 4 * numel)
    sizes |= {classes.WEIGHTS: half * numel, classes.ARRIVING: arriving.itemsize * numel}
    return {name: page_rounded_bytes(max(1, size)) for name, size in sizes.items()}

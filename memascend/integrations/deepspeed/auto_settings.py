"""Settings that the user left out, derived from the model and the machine; the user's own settings are kept.

DeepSpeed's defaults fit one model and one machine: a sub-group of 1e9 parameters alone needs 16 GB of optimizer
buffers. Only ``sub_group_size`` affects results, through rounding: DeepSpeed sums the gradient norm, by which it clips,
by sub-groups, and its AdamW processes the elements at the end of a sub-group that do not fill a vector one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.integrations.configuration import read_configuration
from memascend.integrations.conventions import announce
from memascend.planner.derived_sizes import (
    STATES,
    STATES_AND_GRADIENT,
    cached_sub_group_buffers,
    cached_sub_groups_for,
    cached_sub_groups_within,
    given,
    io_settings,
    largest_sub_group,
    optimizer_buffers,
    sub_group_size,
)


class Offloads:
    """What one DeepSpeed configuration says about offloading: its sections for ZeRO, parameters and optimizer."""

    def __init__(self, ds_config: dict[str, Any]) -> None:
        self.whole = ds_config
        self.zero = ds_config.get("zero_optimization") or {}
        self.param = self.zero.get("offload_param") or {}
        self.optimizer = self.zero.get("offload_optimizer") or {}

    @property
    def param_on_nvme(self) -> bool:
        return self.param.get("device") == "nvme"

    @property
    def optimizer_on_nvme(self) -> bool:
        return self.optimizer.get("device") == "nvme"

    @property
    def folders(self) -> list[str]:
        """The folders of parameters and optimizer states on NVMe, without duplicates."""
        found = [s.get("nvme_path") for s in (self.param, self.optimizer) if s.get("device") == "nvme"]
        return list(dict.fromkeys(map(str, found)))


class DerivedSettings:
    """The settings derived for the engines of one ``enable``.

    ``offloads`` is read from the configuration of ``enable`` and, once an engine is initialized, from that engine's
    own; ``chosen`` has the settings derived for it, by DeepSpeed's names. ``tiers``: the paths, if there are several.
    ``swaps_gradients``: whether updates need a swap buffer for gradients, which go over NVMe.
    """

    def __init__(self, ds_config: dict[str, Any], *, tiers: Sequence[str] = (), swaps_gradients: bool = True) -> None:
        self._tiers, self._swaps_gradients = tiers, swaps_gradients
        self.offloads = Offloads(ds_config)
        first = next((path for path in tiers if os.path.isdir(path)), None)
        nvme_path = self.offloads.param.get("nvme_path") or self.offloads.optimizer.get("nvme_path")
        self.io = io_settings(ds_config, first or nvme_path)
        self.chosen: dict[str, int] = {}
        self.host_left: Callable[[], int] | None = None  # returns the bytes left of the host budget, if there is one
        self.reserve: Callable[[str, int], None] | None = None  # called with a folder and the bytes to reserve in it

    @property
    def folders(self) -> list[str]:
        """The folders of parameters and optimizer states on NVMe: the tiers, if there are any."""
        found = self.offloads.folders
        return list(self._tiers) if self._tiers and found else found

    def warnings(self) -> list[str]:
        """Return warnings about harmful settings of the user, one line each."""
        found = []
        param, optimizer = self.offloads.param, self.offloads.optimizer
        if self.offloads.param_on_nvme and given(param, "max_in_cpu") and param["max_in_cpu"]:
            found.append(
                f"zero_optimization.offload_param.max_in_cpu={param['max_in_cpu']:g} keeps that many parameters "
                "in memory for good; set it to 0, or leave it out, to keep them on NVMe"
            )
        needed = cached_sub_group_buffers(self._swaps_gradients, 1) if self._tiers else self._optimizer_buffers
        if self.offloads.optimizer_on_nvme and given(optimizer, "buffer_count"):
            count = int(optimizer["buffer_count"])
            if count < needed:
                found.append(
                    f"zero_optimization.offload_optimizer.buffer_count={count} is too small: AdamW needs {needed} "
                    "buffers here; raise it, or leave it out"
                )
        return found

    def fill_stage3(self, optimizer: Any, arguments: dict[str, Any]) -> None:
        """Fill settings that the user left out into the keyword ``arguments`` of the ZeRO-3 optimizer, in place.

        ``optimizer`` is the torch optimizer. Also reserves space for the states on NVMe. What the user set is read from
        the configuration of this engine, which need not be that of ``enable``.
        """
        self.offloads = Offloads(read_configuration(arguments.get("ds_config")) or self.offloads.whole)
        self.chosen = {}
        groups = [_partition_sizes(group["params"]) for group in optimizer.param_groups]
        state_bytes = 2 if arguments.get("bf16_optimizer_states") else 4  # of one element
        if self.offloads.optimizer_on_nvme:
            if self.reserve is not None:
                states = STATES_AND_GRADIENT if self._swaps_gradients else STATES
                self.reserve(self.offloads.optimizer["nvme_path"], sum(map(sum, groups)) * states * state_bytes)
            if not given(self.offloads.zero, "sub_group_size"):
                size = sub_group_size([group for group in groups if group])
                arguments["sub_group_size"] = self.chosen["sub_group_size"] = size
        if self.offloads.param_on_nvme and not given(self.offloads.param, "max_in_cpu"):
            self._set(arguments["offload_param_config"], "max_in_cpu", 0)
        if self.offloads.optimizer_on_nvme and not given(self.offloads.optimizer, "buffer_count"):
            count = self._buffers_of(groups, arguments.get("sub_group_size"), optimizer, state_bytes)
            self._set(arguments["offload_optimizer_config"], "buffer_count", count)

    def _buffers_of(self, groups: list[list[int]], size: int | None, optimizer: Any, state_bytes: int) -> int:
        """Return the number of optimizer buffers.

        With several paths a host budget may limit the sub-groups in host memory; one line announces if they are too few
        to keep all paths busy.
        """
        if not self._tiers and type(optimizer) is not DeepSpeedCPUAdam:  # only that one reads gradients in place
            return optimizer_buffers(self.offloads.optimizer)
        if not self._tiers or self.host_left is None or not size:
            return self._optimizer_buffers
        types = self.offloads.whole.get("data_types") or {}
        numel = sum(map(sum, groups))
        sub_groups = sum(-(-sum(group) // size) for group in groups)
        cached = cached_sub_groups_within(
            self.host_left(),
            gradient_bytes=numel * (4 if types.get("grad_accum_dtype") == "fp32" else 2),
            buffer_bytes=largest_sub_group(groups, size) * state_bytes,
            sub_groups=sub_groups,
            swaps_gradients=self._swaps_gradients,
        )
        wanted = min(sub_groups, cached_sub_groups_for(len(self._tiers)))
        if cached < wanted:
            announce(
                f"memascend: host_memory has room for {cached} sub-groups where {len(self._tiers)} tiers are busy with "
                f"{wanted}: they wait for one another; raise it, or make sub_group_size smaller"
            )
        return cached_sub_group_buffers(self._swaps_gradients, cached)

    @property
    def _optimizer_buffers(self) -> int:
        """Swap buffers that the update of one sub-group or, with several paths, the cache of sub-groups needs."""
        if not self._tiers:
            return optimizer_buffers(self.offloads.optimizer, self._swaps_gradients)
        return cached_sub_group_buffers(self._swaps_gradients, cached_sub_groups_for(len(self._tiers)))

    def _set(self, config: Any, name: str, value: int) -> None:
        """Set a field of DeepSpeed's frozen ``config`` object and note it in ``chosen``."""
        object.__setattr__(config, name, value)
        self.chosen[name] = value


def _partition_sizes(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    """Return the partition sizes (elements) of trained parameters, also of those not yet partitioned, as in a model
    built outside of ``zero.Init``."""
    trained = [p for p in parameters if p.requires_grad]
    return [p.partition_numel() if hasattr(p, "partition_numel") else -(-p.numel() // _ranks()) for p in trained]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1

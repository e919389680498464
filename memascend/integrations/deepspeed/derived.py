"""Settings that the user left out, derived from the model and the machine; what the user set is kept.

DeepSpeed's own defaults are sizes for one model and one machine: a sub-group of 1e9 parameters alone asks for 16 GB of
optimizer buffers. Only ``sub_group_size`` touches results, in their last bits: DeepSpeed adds up the gradient norm by
sub-groups, and its AdamW takes the elements at a sub-group's end, which fill no vector, one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .swap_store import SwapStore

# Transfers of 1 MiB saturate NVMe drives (MemAscend, Fig. 14); DeepNVMe's own default too.
_BLOCK_BYTES = 1 << 20
_MOST_IN_FLIGHT = 32
# Sub-groups may exceed the largest tensor by this much before smaller ones are tried.
_SLACK = 1.02
_STATES_AND_GRADIENT = 4  # buffers of one sub-group: master weights, two Adam moments, gradient


@dataclass(frozen=True, kw_only=True)
class IoSettings:
    """How requests go to the device: in blocks of ``block_bytes``, ``queue_depth`` at once in each of ``workers``."""

    block_bytes: int
    queue_depth: int
    workers: int

    def __str__(self) -> str:
        return f"I/O in blocks of {self.block_bytes >> 10} KiB, {self.queue_depth} at once, {self.workers} threads"


def _given(section: Any, key: str) -> bool:
    return isinstance(section, dict) and section.get(key) not in (None, "auto")


def io_settings(ds_config: dict[str, Any], folder: str | os.PathLike[str] | None) -> IoSettings:
    """From the section ``aio`` where it says so, else from the cores and the queue of the device under ``folder``."""
    aio = ds_config.get("aio") or {}
    cores = len(os.sched_getaffinity(0))
    requests = _queue_limit(folder) if folder is not None else _MOST_IN_FLIGHT
    return IoSettings(
        block_bytes=int(aio["block_size"]) if _given(aio, "block_size") else _BLOCK_BYTES,
        queue_depth=int(aio["queue_depth"]) if _given(aio, "queue_depth") else min(_MOST_IN_FLIGHT, requests),
        workers=max(2, int(aio["intra_op_parallelism"])) if _given(aio, "intra_op_parallelism") else min(4, 2 * cores),
    )


def _queue_limit(folder: str | os.PathLike[str]) -> int:
    """Requests that the block device under ``folder`` queues; the usual 32 where there is none (tmpfs, network)."""
    try:
        number = os.stat(folder).st_dev
        node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        queue = next(path for path in (node / "queue", node.parent / "queue") if path.is_dir())
        return max(1, int((queue / "nr_requests").read_text()))
    except (OSError, StopIteration, ValueError):
        return _MOST_IN_FLIGHT


def largest_sub_group(groups: Iterable[Sequence[int]], sub_group_size: int) -> int:
    """Elements of the largest sub-group that DeepSpeed makes: one closes as soon as it holds ``sub_group_size``."""
    largest = 0
    for group in groups:
        held = 0
        for numel in group:
            held += numel
            largest = max(largest, held)
            if held >= sub_group_size:
                held = 0
    return largest


def sub_group_size(groups: Sequence[Sequence[int]]) -> int:
    """The size with which no sub-group is (much) larger than the largest tensor, so that the buffers are that large.

    ``groups``: for each parameter group the sizes of a rank's partitions, in DeepSpeed's order. Larger sizes are
    preferred: fewer, longer transfers.
    """
    most = max((numel for group in groups for numel in group), default=1)
    candidates = [max(1, most >> shift) for shift in range(most.bit_length())]
    best = min(largest_sub_group(groups, size) for size in candidates)
    limit = max(best, int(most * _SLACK))
    return next(size for size in candidates if largest_sub_group(groups, size) <= limit)


class DerivedSettings:
    """What one ``enable`` derives. ``chosen`` says what, by DeepSpeed's names, once the engine is being built."""

    def __init__(self, ds_config: dict[str, Any]) -> None:
        zero = ds_config.get("zero_optimization") or {}
        self._ds_config = ds_config
        self._zero = zero
        self._param = zero.get("offload_param") or {}
        self._optimizer = zero.get("offload_optimizer") or {}
        self.io = io_settings(ds_config, self._param.get("nvme_path") or self._optimizer.get("nvme_path"))
        self.chosen: dict[str, int] = {}
        self.store: SwapStore | None = None  # is told how much is to come

    @property
    def pool_is_sized_by_user(self) -> bool:
        """For the monolithic pools: the adaptive one takes its size from the model alone."""
        return _given(self._param, "buffer_size")

    @property
    def pool_count_of_user(self) -> int | None:
        return int(self._param["buffer_count"]) if _given(self._param, "buffer_count") else None

    def warnings(self) -> list[str]:
        """About what the user set and what will hurt, one line each."""
        found = []
        if self._param.get("device") == "nvme" and _given(self._param, "max_in_cpu") and self._param["max_in_cpu"]:
            found.append(
                f"zero_optimization.offload_param.max_in_cpu={self._param['max_in_cpu']:g} keeps that many parameters "
                "in memory for good; set it to 0, or leave it out, to keep them on NVMe"
            )
        needed = self._optimizer_buffers()
        if self._optimizer.get("device") == "nvme" and _given(self._optimizer, "buffer_count"):
            count = int(self._optimizer["buffer_count"])
            if count < needed:
                found.append(
                    f"zero_optimization.offload_optimizer.buffer_count={count} is too small: AdamW needs {needed} "
                    "buffers here; raise it, or leave it out"
                )
        return found

    def _optimizer_buffers(self) -> int:
        stages = 1 + bool(self._optimizer.get("pipeline_read")) + bool(self._optimizer.get("pipeline_write"))
        return _STATES_AND_GRADIENT * stages

    def fill_stage3(self, optimizer: Any, arguments: dict[str, Any]) -> None:
        """Put what the user left out into the keyword ``arguments`` of the ZeRO-3 optimizer (in place).

        ``optimizer``: the torch optimizer, whose parameters are partitioned already.
        """
        groups = [_partition_sizes(group["params"]) for group in optimizer.param_groups]
        on_nvme = self._optimizer.get("device") == "nvme"
        if on_nvme and self.store is not None:
            states_bytes = sum(map(sum, groups)) * _STATES_AND_GRADIENT * self._state_bytes
            self.store.reserve(self._optimizer["nvme_path"], states_bytes)
        if on_nvme and not _given(self._zero, "sub_group_size"):
            size = sub_group_size([group for group in groups if group])
            arguments["sub_group_size"] = self.chosen["sub_group_size"] = size
        param, states = arguments.get("offload_param_config"), arguments.get("offload_optimizer_config")
        if self._param.get("device") == "nvme" and not _given(self._param, "max_in_cpu"):
            self._set(param, "max_in_cpu", 0)
        if self._optimizer.get("device") == "nvme" and not _given(self._optimizer, "buffer_count"):
            self._set(states, "buffer_count", self._optimizer_buffers())

    @property
    def _state_bytes(self) -> int:
        section = self._ds_config.get("bf16") or self._ds_config.get("bfloat16") or {}
        return 2 if section.get("bf16_optimizer_states") else 4

    def _set(self, config: Any, name: str, value: int) -> None:
        object.__setattr__(config, name, value)
        self.chosen[name] = value

    def line(self, pool_bytes: int | None) -> str:
        """One line for the log: what was derived."""
        parts = [f"{name} {value:,}" for name, value in self.chosen.items()]
        if pool_bytes is not None:
            parts.append(f"a parameter pool of {pool_bytes / 2**20:,.1f} MiB")
        return f"memascend: derived from model and machine: {', '.join([*parts, str(self.io)])}"


def _partition_sizes(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    return [p.partition_numel() for p in parameters if p.requires_grad and hasattr(p, "partition_numel")]

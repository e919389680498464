"""Sizes that our runs derive from model and machine if the DeepSpeed configuration leaves them out.

This module is plain arithmetic without torch and DeepSpeed: the drop-in fills the sizes in, and the planner plans with
them. DeepSpeed's own defaults suit one model and one machine: a sub-group of 1e9 parameters alone requires 16 GB of
optimizer buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Transfers of 1 MiB saturate NVMe drives (MemAscend, Fig. 14); this is also DeepNVMe's default.
_BLOCK_BYTES = 1 << 20
_MOST_IN_FLIGHT = 32
# Sub-groups may exceed the largest tensor by this much before smaller ones are tried.
_SLACK = 1.02
STATES = 3  # buffers of one sub-group: master weights and two Adam moments
STATES_AND_GRADIENT = STATES + 1
_LEAST_CACHED = 3  # one sub-group being written, one being updated, one being read (MLP-Offload 4.1)


@dataclass(frozen=True, kw_only=True)
class IoSettings:
    """I/O settings: requests of ``block_bytes``, with ``queue_depth`` in flight in each of ``workers`` threads."""

    block_bytes: int
    queue_depth: int
    workers: int

    def __str__(self) -> str:
        return f"I/O in blocks of {self.block_bytes >> 10} KiB, {self.queue_depth} at once, {self.workers} threads"


def given(section: Any, key: str) -> bool:
    """Return whether the user set ``key`` in this section of the configuration; null and "auto" count as not set."""
    return isinstance(section, Mapping) and section.get(key) not in (None, "auto")


def io_settings(ds_config: Mapping[str, Any], folder: str | os.PathLike[str] | None) -> IoSettings:
    """Return the I/O settings: those set in the section ``aio``, otherwise derived from the machine.

    The derived ones depend on the CPU cores of this process and the request queue of the device under ``folder``.
    """
    aio = ds_config.get("aio") or {}
    cores = len(os.sched_getaffinity(0))
    requests = _queue_limit(folder) if folder is not None else _MOST_IN_FLIGHT
    return IoSettings(
        block_bytes=int(aio["block_size"]) if given(aio, "block_size") else _BLOCK_BYTES,
        queue_depth=int(aio["queue_depth"]) if given(aio, "queue_depth") else min(_MOST_IN_FLIGHT, requests),
        workers=max(2, int(aio["intra_op_parallelism"])) if given(aio, "intra_op_parallelism") else min(4, 2 * cores),
    )


def _queue_limit(folder: str | os.PathLike[str]) -> int:
    """Return the queue length of the block device under ``folder``; 32 if there is none (tmpfs, network)."""
    try:
        number = os.stat(folder).st_dev
        node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        queue = next(path for path in (node / "queue", node.parent / "queue") if path.is_dir())
        return max(1, int((queue / "nr_requests").read_text()))
    except (OSError, StopIteration, ValueError):
        return _MOST_IN_FLIGHT


def largest_sub_group(groups: Iterable[Sequence[int]], sub_group_size: int) -> int:
    """Return the elements of DeepSpeed's largest sub-group, which closes once it has ``sub_group_size`` elements."""
    largest = 0
    for group in groups:
        total = 0
        for numel in group:
            total += numel
            largest = max(largest, total)
            if total >= sub_group_size:
                total = 0
    return largest


def sub_group_size(groups: Sequence[Sequence[int]]) -> int:
    """Return a sub-group size with which no sub-group is (much) larger than the largest tensor.

    The optimizer buffers are then about as large as that tensor. ``groups``: for each parameter group the sizes of a
    rank's partitions in elements, in DeepSpeed's order. Larger sizes are preferred, since they lead to fewer, longer
    transfers.
    """
    most = max((numel for group in groups for numel in group), default=1)
    candidates = [max(1, most >> shift) for shift in range(most.bit_length())]
    best = min(largest_sub_group(groups, size) for size in candidates)
    limit = max(best, int(most * _SLACK))
    return next(size for size in candidates if largest_sub_group(groups, size) <= limit)


PIPELINED = {"pipeline_read": True, "pipeline_write": True}  # keys of DeepSpeed's offload_optimizer


def optimizer_buffers(offload_optimizer: Mapping[str, Any], swaps_gradients: bool = True) -> int:
    """Return the ``buffer_count`` that AdamW on NVMe needs: one sub-group's buffers, plus as many per pipelined
    direction.

    ``offload_optimizer``: that section of the configuration. Gradients that stay in host memory need no buffer, because
    they are read in place.
    """
    stages = 1 + bool(offload_optimizer.get("pipeline_read")) + bool(offload_optimizer.get("pipeline_write"))
    return (STATES_AND_GRADIENT if swaps_gradients else STATES) * stages


def cached_sub_groups_for(paths: int) -> int:
    """Return how many sub-groups in host memory keep ``paths`` paths busy.

    On each path one sub-group is being written and one is being read, and one more is being updated. With one path
    these are the three of MLP-Offload 4.1.
    """
    return 2 * paths + 1


def cached_sub_group_buffers(swaps_gradients: bool, sub_groups: int) -> int:
    """Return the ``buffer_count`` for `sub_groups` sub-groups in host memory over several paths.

    Swapped gradients are stored next to the states, and need one more buffer to be written in backward. Gradients that
    stay in host memory are read in place.
    """
    return sub_groups * STATES_AND_GRADIENT + 1 if swaps_gradients else sub_groups * STATES


def cached_sub_groups_in(buffers: int, swaps_gradients: bool) -> int:
    """Return how many sub-groups fit into `buffers` buffers: the inverse of ``cached_sub_group_buffers``."""
    return (buffers - 1) // STATES_AND_GRADIENT if swaps_gradients else buffers // STATES


def cached_sub_groups_within(
    left_bytes: int, *, gradient_bytes: int, buffer_bytes: int, sub_groups: int, swaps_gradients: bool
) -> int:
    """Return how many sub-groups over several paths fit into a host-memory budget: at least three, at most all.

    ``left_bytes``: what is left of the budget before the optimizer allocates; the flat gradient buffer takes
    ``gradient_bytes`` of it, and a fifth of the rest is reserved for later allocations. ``buffer_bytes``: one buffer of
    the largest sub-group. ``sub_groups``: their total number.
    """
    available_bytes = 0.8 * (left_bytes - gradient_bytes) - (buffer_bytes if swaps_gradients else 0)
    each = (STATES_AND_GRADIENT if swaps_gradients else STATES) * buffer_bytes
    return max(_LEAST_CACHED, min(sub_groups, int(available_bytes // each)))

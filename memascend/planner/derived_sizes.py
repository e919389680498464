"""Sizes that a run of ours derives from model and machine where the DeepSpeed configuration leaves them out.

Arithmetic alone, without torch and DeepSpeed: the drop-in fills them in, the planner plans with them. DeepSpeed's own
defaults are sizes for one model and one machine: a sub-group of 1e9 parameters alone asks for 16 GB of optimizer
buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Transfers of 1 MiB saturate NVMe drives (MemAscend, Fig. 14); DeepNVMe's own default too.
_BLOCK_BYTES = 1 << 20
_MOST_IN_FLIGHT = 32
# Sub-groups may exceed the largest tensor by this much before smaller ones are tried.
_SLACK = 1.02
STATES = 3  # buffers of one sub-group: master weights, two Adam moments
STATES_AND_GRADIENT = STATES + 1
_LEAST_CACHED = 3  # one sub-group that is written out, one that is updated, one that is read (MLP-Offload 4.1)


@dataclass(frozen=True, kw_only=True)
class IoSettings:
    """How requests go to the device: in blocks of ``block_bytes``, ``queue_depth`` at once in each of ``workers``."""

    block_bytes: int
    queue_depth: int
    workers: int

    def __str__(self) -> str:
        return f"I/O in blocks of {self.block_bytes >> 10} KiB, {self.queue_depth} at once, {self.workers} threads"


def given(section: Any, key: str) -> bool:
    """Whether the user set ``key`` in this section of the configuration; null and "auto" are left to us."""
    return isinstance(section, Mapping) and section.get(key) not in (None, "auto")


def io_settings(ds_config: Mapping[str, Any], folder: str | os.PathLike[str] | None) -> IoSettings:
    """From the section ``aio`` where it says so, else from the cores and the queue of the device under ``folder``."""
    aio = ds_config.get("aio") or {}
    cores = len(os.sched_getaffinity(0))
    requests = _queue_limit(folder) if folder is not None else _MOST_IN_FLIGHT
    return IoSettings(
        block_bytes=int(aio["block_size"]) if given(aio, "block_size") else _BLOCK_BYTES,
        queue_depth=int(aio["queue_depth"]) if given(aio, "queue_depth") else min(_MOST_IN_FLIGHT, requests),
        workers=max(2, int(aio["intra_op_parallelism"])) if given(aio, "intra_op_parallelism") else min(4, 2 * cores),
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


PIPELINED = {"pipeline_read": True, "pipeline_write": True}  # keys of DeepSpeed's offload_optimizer


def optimizer_buffers(offload_optimizer: Mapping[str, Any], swaps_gradients: bool = True) -> int:
    """``buffer_count`` that AdamW on NVMe needs: the buffers of one sub-group, again for each pipelined direction.

    ``offload_optimizer``: that section of the configuration. Gradients that are kept are read where they lie.
    """
    stages = 1 + bool(offload_optimizer.get("pipeline_read")) + bool(offload_optimizer.get("pipeline_write"))
    return (STATES_AND_GRADIENT if swaps_gradients else STATES) * stages


def cached_sub_groups_for(paths: int) -> int:
    """Sub-groups in host memory that keep so many paths busy: on each one that is written and one that is read, and one
    that is updated. On one path they are the three of MLP-Offload 4.1."""
    return 2 * paths + 1


def cached_sub_group_buffers(swaps_gradients: bool, held: int) -> int:
    """``buffer_count`` for `held` sub-groups in host memory over several paths.

    Gradients that are swapped lie beside the states, and go out in backward by one buffer more; gradients that are kept
    are read where they lie.
    """
    return held * STATES_AND_GRADIENT + 1 if swaps_gradients else held * STATES


def cached_sub_groups_in(buffers: int, swaps_gradients: bool) -> int:
    """Sub-groups that ``buffer_count`` = `buffers` holds: the other way round."""
    return (buffers - 1) // STATES_AND_GRADIENT if swaps_gradients else buffers // STATES


def cached_sub_groups_within(
    left_bytes: int, *, gradient_bytes: int, buffer_bytes: int, sub_groups: int, swaps_gradients: bool
) -> int:
    """Sub-groups over several paths that a host budget has room for: never fewer than three, nor more than there are.

    ``left_bytes`` of the budget before the optimizer has taken any, of which the flat gradient buffer takes
    ``gradient_bytes``; a fifth of the rest is left to what is made later. ``buffer_bytes``: of the largest sub-group.
    """
    room = 0.8 * (left_bytes - gradient_bytes) - (buffer_bytes if swaps_gradients else 0)
    each = (STATES_AND_GRADIENT if swaps_gradients else STATES) * buffer_bytes
    return max(_LEAST_CACHED, min(sub_groups, int(room // each)))

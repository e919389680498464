"""Prediction of a training run's host memory as a ledger.

A plan constructs the buffers of a run with the run's own classes (`memascend.memory`), on an allocator that only counts
bytes. Totals are sums of ledger entries, and no entry is called *other*. The plan describes the memory peak of a steady
training step: everything in it is alive during the overflow check.

Sources: MemAscend sections III, IV and V-A, Eq. 1, Fig. 8; DeepSpeed's buffers as its source allocates them
(runtime/zero/stage3.py, runtime/swap_tensor/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from memascend import systems
from memascend.activation.store import CheckpointStore
from memascend.memory.classes import GRADIENTS, MASTERS, MOMENTUM, VARIANCE
from memascend.memory.ledger import DEVICE, HOST, Ledger, LedgerEntry
from memascend.memory.pinned import CountingAllocator
from memascend.memory.policies import Placement
from memascend.memory.pools import AdaptiveBufferPool, MonolithicBufferPool, adaptive_pool_classes
from memascend.memory.run_buffers import (
    conversion_buffer,
    gradient_buffer,
    optimizer_buffers,
    owned,
    resident_parameter,
    swap_out_buffer,
)
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.machine import CPU_PROCESS_OVERHEAD, PROCESS_OVERHEAD
from memascend.planner.pool import partition_numel
from memascend.planner.tensors import TensorSpec
from memascend.planner.workload import Workload
from memascend.storage.direct_engine import swapping_config

GIB = 2**30
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
# Memory of the interpreter, libraries and Python objects: the 1.63 GiB that Fig. 8 attributes to MemAscend as "pinned
# memory overhead", although its allocator has none. It does not scale with a twin, and the rows that it was derived
# from are not judged with it.
PROCESS_OVERHEAD_BYTES = round(PROCESS_OVERHEAD.value * GIB)
CPU_PROCESS_OVERHEAD_BYTES = round(CPU_PROCESS_OVERHEAD.value * GIB)
OWNER_METRICS = {
    "parameter_pool": "parameter buffer pool",
    "optimizer_buffers": "optimizer-state and swap-out buffers",
    "swap_out_buffer": "optimizer-state and swap-out buffers",
    "gradient_flat_buffer": "gradient flat buffer",
    "overflow_check": "overflow check overhead",
    "activation_checkpoints": "activation checkpoints",
    "small_parameters": "resident parameters",
    "in_memory_optimizer": "in-memory optimizer states",
    **dict.fromkeys((MASTERS, MOMENTUM, VARIANCE, GRADIENTS), "in-memory optimizer states"),
    "adam_states": "in-memory optimizer states",
    "parameter_flat_buffer": "parameters in host memory",
    "model_load": "model while it loads",
    "streamed_weights": "weights on their way",
    "streamed_states": "optimizer states on their way",
    "streamed_gradients": "gradients on their way",
    "streamed_saves": "states on their way to a checkpoint",
    "nvme_engine_buffers": "NVMe engine buffers",
    "process": "process overhead",
    "cpu_computation": "computation on the CPU (estimate)",
}
PINNED_OVERHEAD = "pinned memory overhead"
PEAK = "peak system memory"
DEVICE_PEAK = "peak device memory"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ledger of one configuration, and its totals. Bytes are summed over all ranks of one machine."""

    work: Workload
    entries: tuple[LedgerEntry, ...]

    @property
    def label(self) -> str:
        return self.work.arrangement.label

    def requested_bytes(self, owner: str) -> int:
        """Return the bytes that an owner requested in host memory, before any rounding."""
        return sum(e.requested_bytes for e in self.entries if e.owner == owner and e.role == HOST)

    @property
    def host_bytes(self) -> int:
        """Host memory at its peak, including the process itself."""
        return sum(e.reserved_bytes for e in self.entries if e.role == HOST)

    @property
    def host_net_bytes(self) -> int:
        """Host memory at its peak without the process, for comparison with a measured peak net of its baseline."""
        return self.host_bytes - self.requested_bytes("process")

    @property
    def device_bytes(self) -> int:
        """The plan's entries in GPU memory: model states of systems that keep them there, without activations."""
        return sum(e.reserved_bytes for e in self.entries if e.role == DEVICE)

    def components(self) -> dict[str, int]:
        """Return the bytes by the names of Fig. 8; they sum to `host_bytes`. Rounding is a separate component."""
        out: dict[str, int] = {}
        rounding = 0
        for entry in self.entries:
            if entry.role == HOST:
                # An owner without an entry is a class of the system's own.
                metric = OWNER_METRICS.get(entry.owner, entry.owner.replace("_", " "))
                out[metric] = out.get(metric, 0) + entry.requested_bytes
                rounding += entry.reserved_bytes - entry.requested_bytes
        out[PINNED_OVERHEAD] = rounding
        return out


def plan(work: Workload, *, process_overhead: bool = True) -> Plan:
    """Build a run's buffers on a counting allocator and return their ledger.

    `process_overhead`: include the process itself and, on a CPU, the tensors of the computation. Raises a one-line
    ValueError if no tensor of the model is large enough to stream.
    """
    ledger, system = Ledger(), systems.load(work.system)
    for rank in range(work.ranks):
        build = RankFootprint(work, ledger, rank)
        if process_overhead and work.on_cpu:
            name = build.named("process without CUDA")
            ledger.record(name, "process", CPU_PROCESS_OVERHEAD_BYTES, allocator="measured")
            for entry in gpu_memory(work).entries:
                build.pageable(entry.name, "cpu_computation", entry.reserved_bytes)
        elif process_overhead:
            name = build.named("process, MemAscend Fig. 8")
            ledger.record(name, "process", PROCESS_OVERHEAD_BYTES, allocator="cited")
        system.footprint(build)
    return Plan(work=work, entries=tuple(ledger.entries()))


class _Counting(CountingAllocator):
    """A counting allocator of one rank, which adds the rank's number to the names of its entries."""

    def __init__(self, policy: str, ledger: Ledger, named: Callable[[str], str]) -> None:
        super().__init__(policy, ledger)
        self._named = named

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        name: str,
        owner: str,
        role: str = HOST,
        placement: Placement | None = None,
    ) -> torch.Tensor:
        return super().allocate(numel, dtype, name=self._named(name), owner=owner, role=role, placement=placement)


class RankFootprint:
    """One rank of a run. Its methods build the buffers as a run does, with `memascend.memory` and `.activation`.

    A system's `footprint` calls the methods that it needs, and `pageable` for memory from torch's default allocator.
    """

    def __init__(self, work: Workload, ledger: Ledger, rank: int) -> None:
        self.work, self.ledger, self._rank = work, ledger, rank
        self.dtype, self.states = TORCH_DTYPES[work.dtype], TORCH_DTYPES[work.kept_states]
        self.gradient_dtype = TORCH_DTYPES[work.gradients]
        self.pinned = _Counting(work.arrangement.pinned, ledger, self.named)
        self.swapped = _Counting(work.arrangement.swapped, ledger, self.named)

    def named(self, name: str) -> str:
        """Return the name of an entry, with the rank's number if there are several."""
        return name if self.work.ranks == 1 else f"{name}, rank {self._rank}"

    def pageable(self, name: str, owner: str, requested_bytes: int, role: str = HOST) -> None:
        """Record memory from torch's default allocator: exact sizes, not locked."""
        self.ledger.record(self.named(name), owner, requested_bytes, role=role, allocator="torch (pageable)")

    def parameter_pool(self) -> None:
        """Build the pool of Fig. 11: uniform buffers of the largest tensor, or MemAscend's exact classes (IV-B)."""
        work, parts = self.work, self.work.streamed()
        if work.arrangement.pool == "adaptive":
            classes = adaptive_pool_classes(parts.blocks, parts.outside, work.blocks_in_flight)
            AdaptiveBufferPool(classes, self.dtype, self.swapped)
            return
        MonolithicBufferPool(
            work.sizes.pool_numel or parts.largest,
            work.sizes.pool_buffers or parts.monolithic_count(work.blocks_in_flight),
            self.dtype,
            self.swapped,
            separate=work.arrangement.pool == "separate",
        )

    def optimizer_swap(self) -> None:
        """Build the optimizer's swap buffers, each of the size of the largest sub-group.

        The buffers have the dtype of the states, and the swap-out buffer has that of the parameters.
        """
        largest = max(self.work.sub_groups(), key=sum)
        optimizer_buffers(self.swapped, sum(largest), self.work.optimizer_buffers, self.states)
        arrangement = self.work.arrangement
        if not arrangement.swaps_gradients and arrangement.parts.get("numerics") != "fast":
            conversion_buffer(self.swapped, sum(largest), self.states)
        times = self.work.ranks if self.work.arrangement.whole_swap_out else 1
        swap_out_buffer(self.swapped, [times * numel for numel in largest], self.dtype)

    def gradients(self) -> None:
        """Build the flat gradient buffer (III-C: fp32), pinned as a whole, and the overflow check's temporaries."""
        partitions = self.work.partitions()
        gradient_buffer(self.pinned, partitions, self.gradient_dtype)
        if self.dtype == torch.float16 and self.work.arrangement.overflow == "chain":
            for what, element_bytes in chain_temporaries(self.gradient_dtype.itemsize):
                self.pageable(what, "overflow_check", sum(partitions) * element_bytes)

    def resident(self, tensors: Iterable[TensorSpec]) -> None:
        """Build the tensors below the swap threshold, each pinned separately in the parameters' dtype."""
        for tensor in tensors:
            resident_parameter(self.pinned, partition_numel(tensor.numel, self.work.ranks), self.dtype, tensor.name)

    def unswapped_groups(self) -> None:
        """Build the states of sub-groups below the swap threshold, which stay in memory.

        These are master weights, two moments, and a pinned gradient (stage3 `initialize_optimizer_states`).
        """
        for index, group in enumerate(self.work.sub_groups()):
            size = sum(group) * self.states.itemsize
            if size < self.work.swap_threshold_bytes:
                self.pageable(f"master and moments of sub-group {index}", "in_memory_optimizer", 3 * size)
                owned(self.pinned, sum(group), self.states, GRADIENTS, f"gradient of sub-group {index}")

    def checkpoints(self) -> None:
        """Build the activation checkpoints (Eq. 1) with the store that a run uses."""
        work = self.work
        if work.offloads_checkpoints and work.context:
            store = CheckpointStore(self.pinned)
            store.reserve(work.batch, work.context, work.spec.layers, work.spec.hidden, self.dtype)

    def bounce_buffers(self) -> None:
        """Record the direct engine's bounce buffers, for transfers with unaligned addresses or lengths."""
        work = self.work
        if not work.arrangement.direct or not work.sizes.bounce_buffers:
            return
        io = work.io
        config = swapping_config(io.workers, io.block_bytes, io.queue_depth)
        for _ in range(work.sizes.engines * config.workers):
            name = self.named("bounce buffers")
            self.ledger.record(name, "nvme_engine_buffers", config.bounce_bytes, allocator="direct engine")


def checkpoint_bytes(work: Workload) -> int:
    """Return the bytes that the offloaded activation checkpoints alone reserve on all ranks.

    The rest of a plan does not depend on batch and context.
    """
    ledger = Ledger()
    RankFootprint(work, ledger, 0).checkpoints()
    return work.ranks * sum(entry.reserved_bytes for entry in ledger.entries())


def chain_temporaries(gradient_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes per element) of the temporaries of `isinf().any()` on the gradients.

    isinf is `abs() == inf`: a copy of the buffer and one bool per element, together 1.25 x the buffer in fp32 (III-C,
    Fig. 3).
    """
    return (("abs() copy", gradient_bytes), ("isinf mask", 1))


def overflow_timeline(numel: int, *, chain: bool) -> Iterator[tuple[str, int]]:
    """Yield (operation, live bytes) during one check of `numel` fp32 gradients (Fig. 3): the buffer and temporaries.

    `isinf` is `abs() == inf`: the copy is alive while the mask is written, and freed afterwards. `isnan` is `x != x`,
    only a mask. The scalar results of `any` are neglected.
    """
    flat = 4 * numel
    yield "gradients", flat
    if not chain:
        yield "fused check", flat
        return
    copy, mask = (element_bytes * numel for _, element_bytes in chain_temporaries(4))
    yield "abs", flat + copy
    yield "isinf", flat + copy + mask
    yield "any (isinf)", flat + mask
    yield "isnan", flat + mask
    yield "any (isnan)", flat + mask
    yield "done", flat

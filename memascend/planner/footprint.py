"""Host memory of a training run before it runs, as a ledger.

A plan constructs the buffers of a run with the run's own classes (`memascend.memory`), over an allocator that only
counts; what they add up to is then arithmetic on entries, and there is no entry called *other*. It describes the worst
instant of a steady training step: everything here is alive during the overflow check.

Sources: MemAscend sections III, IV and V-A, Eq. 1, Fig. 8; DeepSpeed's buffers as its source allocates them
(runtime/zero/stage3.py, runtime/swap_tensor/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memascend.memory.ledger import DEVICE, HOST, Ledger, LedgerEntry
from memascend.memory.pinned import CountingAllocator
from memascend.memory.pools import AdaptiveBufferPool, MonolithicBufferPool, adaptive_pool_classes
from memascend.planner.layouts import TensorSpec
from memascend.planner.pool import SWAP_THRESHOLD_BYTES, Streamed, partition_numel, streamed, sub_groups
from memascend.planner.spec import ModelSpec

GIB = 2**30
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What master weights, moments and swapped gradients may be kept in, and the gradient flat buffer.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# What the interpreter, libraries and Python objects take: the 1.63 GiB that Fig. 8 leaves to MemAscend as "pinned
# memory overhead", whose allocator has none. Cited, never fitted; it does not scale with a twin.
PROCESS_OVERHEAD_BYTES = round(1.63 * GIB)
# DeepSpeed's offload_optimizer.buffer_count: parameter, gradient, two moments, and one to spare, each fp32.
OPTIMIZER_BUFFERS = 5
# The optimizer works through sub-groups of this many elements (divided by k^2 in a twin and by the ranks, since
# DeepSpeed counts partitions). Small enough that the largest sub-group is the largest tensor, as the totals imply.
SUB_GROUP_SIZE = 64_000_000
# ZeRO-Offload has no swapping to bound, and keeps DeepSpeed's default.
OFFLOAD_SUB_GROUP_SIZE = 1_000_000_000

OWNER_METRICS = {
    "parameter_pool": "parameter buffer pool",
    "optimizer_buffers": "optimizer-state and swap-out buffers",
    "swap_out_buffer": "optimizer-state and swap-out buffers",
    "gradient_flat_buffer": "gradient flat buffer",
    "overflow_check": "overflow check overhead",
    "activation_checkpoints": "activation checkpoints",
    "small_parameters": "resident parameters",
    "in_memory_optimizer": "in-memory optimizer states",
    "adam_states": "in-memory optimizer states",
    "parameter_flat_buffer": "parameters in host memory",
    "model_load": "model while it loads",
    "process": "process overhead",
}
PINNED_OVERHEAD = "pinned memory overhead"
PEAK = "peak system memory"
DEVICE_PEAK = "peak device memory"


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Which parts stand where: the planner's view of an arm.

    `pinned` rounds what torch pins (gradients, activations, small parameters), `swapped` what the swappers hold (the
    same through DeepSpeed 0.19.3; later ones allocate exactly there). `pool` is `separate` (each buffer pinned by
    itself), `one_tensor` (DeepSpeed's literal layout) or `adaptive`. `overflow`: the chain leaves temporaries, the
    others none. `states`: what the arm keeps its states in, whatever is asked for.
    """

    label: str
    pinned: str = "power_of_two"
    swapped: str = "power_of_two"
    pool: str = "separate"
    overflow: str = "chain"
    whole_swap_out: bool = False  # DeepSpeed 0.16 sizes the swap-out buffer by the whole tensor, not the partition
    states: str | None = None
    swaps_gradients: bool = True  # False: the optimizer takes them from the flat buffer


_EXACT = {"pinned": "page_aligned", "swapped": "page_aligned"}

ARRANGEMENTS: dict[tuple[str, str], Arrangement] = {
    ("zero_infinity", "as_published"): Arrangement(label="ZeRO-Infinity (as published)"),
    ("zero_infinity", "as_published_one_tensor"): Arrangement(
        label="ZeRO-Infinity (as published, one pool tensor)", pool="one_tensor", whole_swap_out=True
    ),
    ("zero_infinity", "aminmax"): Arrangement(label="ZeRO-Infinity (as published, aminmax check)", overflow="aminmax"),
    ("zero_infinity", "today"): Arrangement(
        label="ZeRO-Infinity (DeepSpeed 0.19.8)", swapped="page_aligned", pool="one_tensor"
    ),
    ("zero_infinity", "today_016"): Arrangement(
        label="ZeRO-Infinity (DeepSpeed 0.16)", pool="one_tensor", whole_swap_out=True
    ),
    ("memascend", "memascend"): Arrangement(label="MemAscend", **_EXACT, pool="adaptive", overflow="fused"),
    ("memascend", "memascend_fast"): Arrangement(
        label="MemAscend (own AdamW)", **_EXACT, pool="adaptive", overflow="fused"
    ),
    ("memascend", "memascend_bf16"): Arrangement(
        label="MemAscend (bf16 states)", **_EXACT, pool="adaptive", overflow="fused", states="bf16"
    ),
    ("memascend", "memascend_bf16_nearest"): Arrangement(
        label="MemAscend (bf16 states, nearest rounding)", **_EXACT, pool="adaptive", overflow="fused", states="bf16"
    ),
    ("memascend", "memascend_kept_gradients"): Arrangement(
        label="MemAscend (gradients kept)", **_EXACT, pool="adaptive", overflow="fused", swaps_gradients=False
    ),
    ("memascend", "pinned_only"): Arrangement(label="MemAscend (pinned memory only)", **_EXACT),
    ("memascend", "pool_only"): Arrangement(label="MemAscend (pool only)", pool="adaptive"),
    ("memascend", "memascend_on_files"): Arrangement(
        label="MemAscend (a file for each tensor)", **_EXACT, pool="adaptive", overflow="fused"
    ),
    ("memascend", "direct_only"): Arrangement(label="MemAscend (direct NVMe engine only)"),
    ("memascend", "overflow_only"): Arrangement(label="MemAscend (overflow check only)", overflow="fused"),
    ("zero_offload", "today"): Arrangement(label="ZeRO-Offload"),
    ("all_in_gpu", "today"): Arrangement(label="All in GPU"),
}


def systems() -> dict[str, list[str]]:
    """Every system with its arms; the first arm is the default."""
    out: dict[str, list[str]] = {}
    for system, arm in ARRANGEMENTS:
        out.setdefault(system, []).append(arm)
    return out


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ledger of one configuration, and what it adds up to. Bytes are summed over all ranks of one machine."""

    spec: ModelSpec
    system: str
    arm: str
    label: str
    dtype: str
    ranks: int
    batch: int
    context: int
    states: str
    entries: tuple[LedgerEntry, ...]

    def requested_bytes(self, owner: str) -> int:
        return sum(e.requested_bytes for e in self.entries if e.owner == owner and e.role == HOST)

    @property
    def host_bytes(self) -> int:
        """Host memory at the worst instant, the process itself included."""
        return sum(e.reserved_bytes for e in self.entries if e.role == HOST)

    @property
    def host_net_bytes(self) -> int:
        """The same without the process: what a measured host peak, net of its baseline, is compared with."""
        return self.host_bytes - self.requested_bytes("process")

    @property
    def device_bytes(self) -> int:
        """What the plan knows to lie in GPU memory (model states of systems that keep them there; no activations)."""
        return sum(e.reserved_bytes for e in self.entries if e.role == DEVICE)

    def components(self) -> dict[str, int]:
        """Bytes by the names of Fig. 8; their sum is `host_bytes`. Rounding is a component of its own."""
        out: dict[str, int] = {}
        rounding = 0
        for entry in self.entries:
            if entry.role == HOST:
                metric = OWNER_METRICS[entry.owner]
                out[metric] = out.get(metric, 0) + entry.requested_bytes
                rounding += entry.reserved_bytes - entry.requested_bytes
        out[PINNED_OVERHEAD] = rounding
        return out


def plan(
    spec: ModelSpec,
    system: str = "zero_infinity",
    arm: str | None = None,
    *,
    dtype: str = "fp16",
    ranks: int = 1,
    batch: int = 1,
    context: int = 0,
    states: str = "fp32",
    gradients: str = "fp32",
    blocks_in_flight: int = 1,
    sub_group_size: int | None = None,
    swap_threshold_bytes: float | None = None,
    process_overhead: bool = True,
) -> Plan:
    """Build a run's buffers over a counting allocator and return their ledger.

    `batch` is sequences a rank, `context` tokens a sequence; 0 leaves out the offloaded activation checkpoints.
    `states` is what master weights, moments and swapped gradients are kept in (MemAscend's bf16 optimizer), `gradients`
    the dtype of the flat buffer (DeepSpeed's grad_accum_dtype). Thresholds default to DeepSpeed's, divided by k^2 for a
    twin. Raises ValueError, in one line, for an unknown system, arm or dtype and for counts below one.
    """
    arm, arrangement = _arrangement(system, arm)
    states = kept_states(system, arm, states)
    _check_workload(dtype, ranks, batch, context, blocks_in_flight)
    _check_states(system, dtype, states, gradients)
    area = spec.k * spec.k
    default_group = OFFLOAD_SUB_GROUP_SIZE if system == "zero_offload" else SUB_GROUP_SIZE // ranks
    builder = _Builder(
        spec=spec,
        arrangement=arrangement,
        dtype=DTYPES[dtype],
        ranks=ranks,
        batch=batch,
        context=context,
        states=STATE_DTYPES[states],
        gradient_dtype=STATE_DTYPES[gradients],
        blocks_in_flight=blocks_in_flight,
        sub_group_size=sub_group_size or max(1, default_group // area),
        swap_threshold_bytes=SWAP_THRESHOLD_BYTES / area if swap_threshold_bytes is None else swap_threshold_bytes,
    )
    ledger = Ledger()
    for rank in range(ranks):
        if process_overhead:
            name = builder.named("process, MemAscend Fig. 8", rank)
            ledger.record(name, "process", PROCESS_OVERHEAD_BYTES, allocator="cited")
        _BUILDERS[system](builder, ledger, rank)
    return Plan(
        spec=spec,
        system=system,
        arm=arm,
        label=arrangement.label,
        dtype=dtype,
        ranks=ranks,
        batch=batch,
        context=context,
        states=states,
        entries=tuple(ledger.entries()),
    )


def swaps_gradients(system: str, arm: str | None) -> bool:
    """Whether the arm sends gradients over the SSD to the optimizer."""
    return _arrangement(system, arm)[1].swaps_gradients


def kept_states(system: str, arm: str | None, asked: str) -> str:
    """What the states of an arm are kept in: as asked for, unless the arm is one of bf16 states."""
    return _arrangement(system, arm)[1].states or asked


def _arrangement(system: str, arm: str | None) -> tuple[str, Arrangement]:
    known = systems()
    if system not in known:
        raise ValueError(f"unknown system '{system}': use one of {', '.join(known)}")
    arm = arm or known[system][0]
    if arm not in known[system]:
        raise ValueError(f"system '{system}' has no arm '{arm}': use one of {', '.join(known[system])}")
    return arm, ARRANGEMENTS[system, arm]


def _check_workload(dtype: str, ranks: int, batch: int, context: int, blocks_in_flight: int) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype '{dtype}': use one of {', '.join(DTYPES)}")
    for name, value, least in (
        ("number of GPUs", ranks, 1),
        ("batch", batch, 1),
        ("context", context, 0),
        ("number of blocks in flight", blocks_in_flight, 1),
    ):
        if value < least:
            raise ValueError(f"the {name} must be at least {least}, got {value}")


def _check_states(system: str, dtype: str, states: str, gradients: str) -> None:
    for name, value in (("optimizer states", states), ("gradients", gradients)):
        if value not in STATE_DTYPES:
            raise ValueError(f"unknown dtype '{value}' of the {name}: use one of {', '.join(STATE_DTYPES)}")
        if value == "bf16" and dtype != "bf16":
            raise ValueError(f"{name} in bf16 need a model in bf16, not {dtype}: set dtype to bf16, or {name} to fp32")
    if system == "zero_infinity" and states == "bf16":
        raise ValueError("stock DeepSpeed fails with bf16 optimizer states on NVMe: name memascend, or states fp32")


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """One configuration; its methods build the buffers of one rank."""

    spec: ModelSpec
    arrangement: Arrangement
    dtype: torch.dtype
    ranks: int
    batch: int
    context: int
    states: torch.dtype
    gradient_dtype: torch.dtype
    blocks_in_flight: int
    sub_group_size: int
    swap_threshold_bytes: float

    def streamed(self) -> Streamed:
        return streamed(
            self.spec.tensors(),
            element_bytes=self.dtype.itemsize,
            ranks=self.ranks,
            threshold_bytes=self.swap_threshold_bytes,
        )

    def sub_groups(self) -> list[int]:
        return sub_groups(self.spec.tensors(), self.sub_group_size, self.ranks)

    def named(self, name: str, rank: int) -> str:
        return name if self.ranks == 1 else f"{name}, rank {rank}"

    def partition(self) -> int:
        """Elements of one rank's share of all parameters."""
        return sum(partition_numel(tensor.numel, self.ranks) for tensor in self.spec.tensors())

    def parameter_pool(self, ledger: Ledger) -> None:
        """The pool of Fig. 11: uniform buffers of the largest tensor, or MemAscend's exact classes (IV-B)."""
        parts, allocator = self.streamed(), CountingAllocator(self.arrangement.swapped, ledger)
        if self.arrangement.pool == "adaptive":
            classes = adaptive_pool_classes(parts.blocks, parts.outside, self.blocks_in_flight)
            AdaptiveBufferPool(classes, self.dtype, allocator)
            return
        MonolithicBufferPool(
            parts.largest,
            parts.monolithic_count(self.blocks_in_flight),
            self.dtype,
            allocator,
            separate=self.arrangement.pool == "separate",
        )

    def optimizer_swap(self, ledger: Ledger, rank: int) -> None:
        """Five buffers in the states' dtype and a swap-out buffer in the parameters', each of the largest sub-group."""
        allocator = CountingAllocator(self.arrangement.swapped, ledger)
        largest = max(self.sub_groups())
        for index in range(OPTIMIZER_BUFFERS):
            name = self.named(f"optimizer buffer {index}", rank)
            allocator.allocate(largest, self.states, name=name, owner="optimizer_buffers")
        swap_out = largest * (self.ranks if self.arrangement.whole_swap_out else 1)
        name = self.named("swap-out buffer", rank)
        allocator.allocate(swap_out, self.dtype, name=name, owner="swap_out_buffer")

    def gradients(self, ledger: Ledger, rank: int) -> None:
        """The flat buffer (III-C: fp32), pinned as a whole, and what the overflow check needs beside it."""
        numel = self.partition()
        allocator = CountingAllocator(self.arrangement.pinned, ledger)
        name = self.named("gradient flat buffer", rank)
        allocator.allocate(numel, self.gradient_dtype, name=name, owner="gradient_flat_buffer")
        if self.dtype == torch.float16 and self.arrangement.overflow == "chain":
            for what, element_bytes in CHAIN_TEMPORARIES:
                pageable(ledger, self.named(what, rank), "overflow_check", numel * element_bytes)

    def resident(self, tensors: tuple[TensorSpec, ...], ledger: Ledger, rank: int) -> None:
        """Tensors under the swap threshold: each pinned by itself in the parameters' dtype."""
        allocator = CountingAllocator(self.arrangement.pinned, ledger)
        for tensor in tensors:
            numel = partition_numel(tensor.numel, self.ranks)
            name = self.named(tensor.name, rank)
            allocator.allocate(numel, self.dtype, name=name, owner="small_parameters")

    def unswapped_groups(self, ledger: Ledger, rank: int) -> None:
        """Sub-groups under the swap threshold keep their master and two moments in memory."""
        for index, numel in enumerate(self.sub_groups()):
            if numel * self.states.itemsize < self.swap_threshold_bytes:
                name = self.named(f"master and moments of sub-group {index}", rank)
                pageable(ledger, name, "in_memory_optimizer", 3 * numel * self.states.itemsize)

    def checkpoints(self, ledger: Ledger, rank: int) -> None:
        allocator = CountingAllocator(self.arrangement.pinned, ledger)
        name = self.named("activation checkpoints", rank)
        _book_checkpoints(allocator, self.spec, self.dtype, self.batch * self.context, name)


def checkpoint_bytes(
    spec: ModelSpec, system: str, arm: str | None = None, *, dtype: str, ranks: int, batch: int, context: int
) -> int:
    """What the offloaded activation checkpoints alone reserve on all ranks: the rest of a plan does not depend on them.

    Arguments and errors as those of :func:`plan`.
    """
    _, arrangement = _arrangement(system, arm)
    _check_workload(dtype, ranks, batch, context, blocks_in_flight=1)
    ledger = Ledger()
    _book_checkpoints(
        CountingAllocator(arrangement.pinned, ledger), spec, DTYPES[dtype], batch * context, "checkpoints"
    )
    return ranks * sum(entry.reserved_bytes for entry in ledger.entries())


def _book_checkpoints(
    allocator: CountingAllocator, spec: ModelSpec, dtype: torch.dtype, tokens: int, name: str
) -> None:
    """Eq. 1: B x C x L x H elements a rank, one store, pinned."""
    numel = tokens * spec.layers * spec.hidden
    if numel:
        allocator.allocate(numel, dtype, name=name, owner="activation_checkpoints")


# isinf is abs() == inf: a copy of the buffer and one bool an element, together 1.25 x (III-C, Fig. 3).
CHAIN_TEMPORARIES = (("abs() copy", 4), ("isinf mask", 1))


def pageable(ledger: Ledger, name: str, owner: str, requested_bytes: int, role: str = HOST) -> None:
    """Book memory that torch's default allocator gives: exact, not locked."""
    ledger.record(name, owner, requested_bytes, role=role, allocator="torch (pageable)")


def _ssd_offload(build: _Builder, ledger: Ledger, rank: int) -> None:
    """ZeRO-Infinity and MemAscend: parameters and optimizer states on the SSD, gradients in host memory."""
    build.parameter_pool(ledger)
    build.optimizer_swap(ledger, rank)
    build.gradients(ledger, rank)
    build.resident(build.streamed().resident, ledger, rank)
    build.unswapped_groups(ledger, rank)
    build.checkpoints(ledger, rank)


def _zero_offload(build: _Builder, ledger: Ledger, rank: int) -> None:
    """DeepSpeed ZeRO-3 with parameters and optimizer in host memory: 24 bytes a parameter (fp32), 29 in the chain.

    2 (parameters, one pinned flat buffer, stage3 _create_param_groups_fp16_flat_cpu_memory) + 4 (fp32 master, pageable)
    + 8 (two moments, pageable) + 4 (gradient of each sub-group, pinned one by one, initialize_optimizer_states)
    + 4 (gradient flat buffer, pinned as a whole) + 5 (overflow chain over it), and 2 for the partitions that zero.Init
    pins one by one before they move to the flat buffer: torch's caching allocator never gives those back.
    """
    allocator = CountingAllocator(build.arrangement.pinned, ledger)
    name = build.named("parameters", rank)
    allocator.allocate(build.partition(), build.dtype, name=name, owner="parameter_flat_buffer")
    build.resident(tuple(build.spec.tensors()), ledger, rank)
    for index, numel in enumerate(build.sub_groups()):
        group = f"of sub-group {index}"
        size = numel * build.states.itemsize
        pageable(ledger, build.named(f"master {group}", rank), "in_memory_optimizer", size)
        pageable(ledger, build.named(f"moments {group}", rank), "adam_states", 2 * size)
        name = build.named(f"gradient {group}", rank)
        allocator.allocate(numel, build.states, name=name, owner="in_memory_optimizer")
    build.gradients(ledger, rank)
    build.checkpoints(ledger, rank)


def _all_in_gpu(build: _Builder, ledger: Ledger, rank: int) -> None:
    """Nothing offloaded: the device holds 16 bytes a parameter, the host only the weights while they load."""
    numel = build.partition()
    for name, element_bytes in (
        ("parameters", build.dtype.itemsize),
        ("gradients", build.dtype.itemsize),
        ("master", build.states.itemsize),
        ("moments", 2 * build.states.itemsize),
    ):
        pageable(ledger, build.named(name, rank), "in_memory_optimizer", element_bytes * numel, role=DEVICE)
    name = build.named("weights on their way to the GPU", rank)
    pageable(ledger, name, "model_load", numel * build.dtype.itemsize)


_BUILDERS = {
    "zero_infinity": _ssd_offload,
    "memascend": _ssd_offload,
    "zero_offload": _zero_offload,
    "all_in_gpu": _all_in_gpu,
}


def overflow_timeline(numel: int, *, chain: bool) -> Iterator[tuple[str, int]]:
    """(operation, live bytes) through one check of `numel` fp32 gradients (Fig. 3): the buffer and its temporaries.

    `isinf` is `abs() == inf`: the copy is alive while the mask is written, and dies after it; `isnan` is `x != x`, a
    mask alone. The scalar results of `any` are not worth a byte here.
    """
    flat = 4 * numel
    yield "gradients", flat
    if not chain:
        yield "fused check", flat
        return
    copy, mask = (element_bytes * numel for _, element_bytes in CHAIN_TEMPORARIES)
    yield "abs", flat + copy
    yield "isinf", flat + copy + mask
    yield "any (isinf)", flat + mask
    yield "isnan", flat + mask
    yield "any (isnan)", flat + mask
    yield "done", flat

"""The workload of a plan, the common argument of all parts of the planner: model, system and sizes.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from memascend.activation_policy import POLICIES
from memascend.arrangements import Arrangement
from memascend.deprecation import warn_renamed
from memascend.memory.budget import parse_bytes
from memascend.planner.derived_sizes import (
    PIPELINED,
    IoSettings,
    cached_sub_group_buffers,
    cached_sub_groups_for,
    io_settings,
    optimizer_buffers,
    sub_group_size,
)
from memascend.planner.options import DEFAULT_STACK, MODEL_OPTIONS, Stack
from memascend.planner.pool import SWAP_THRESHOLD_BYTES, Streamed, partition_numel, streamed, sub_groups
from memascend.planner.spec import ModelSpec
from memascend.suggestions import did_you_mean
from memascend.systems import arm_of, arrangement, require_states

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
DTYPES = ("fp16", "bf16")
STATE_DTYPES = ("fp32", "bf16", "int8")  # int8: 8-bit codes, with scales
INT8_MOMENTS_BYTES = 2 + 2 / 32  # per parameter: two codes, and 2 bytes of scales per block of 32
GRADIENT_DTYPES = ("fp32", "bf16")
CUDA, CPU = DEVICES = ("cuda", "cpu")

# DeepSpeed's offload_optimizer.buffer_count that the papers' totals imply: parameter, gradient, two moments, one spare.
PAPER_OPTIMIZER_BUFFERS = 5
# Elements of a sub-group that the papers' totals imply (divided by k^2 in a twin, and by the ranks, since DeepSpeed
# counts partitions): small enough that the largest sub-group is the largest tensor.
PAPER_SUB_GROUP_SIZE = 64_000_000
# ZeRO-Offload does not swap, so its buffers need no bound and it keeps DeepSpeed's default.
OFFLOAD_SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class SwapSizes:
    """Sizes that a DeepSpeed configuration sets; those that are None are derived as in a run.

    `sub_group_size` and `pool_numel` (buffer_size): elements of one rank's partitions. `optimizer_buffers` and
    `pool_buffers` (buffer_count): numbers of buffers. `swap_threshold_bytes`: smaller partitions stay in memory
    (DeepSpeed's 1 MiB, divided by k^2 in a twin). `io`: I/O settings of the direct engine. `engines`: engines per rank
    (one for each distinct nvme_path). `bounce_buffers`: whether to count their bounce buffers.
    """

    sub_group_size: int | None = None
    optimizer_buffers: int | None = None
    pool_numel: int | None = None
    pool_buffers: int | None = None
    swap_threshold_bytes: float | None = None
    io: IoSettings | None = None
    engines: int = 1
    bounce_buffers: bool = True


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training configuration. Raises a one-line ValueError for unknown or impossible values.

    `batch`: sequences per GPU in one forward pass. `accumulation`: batches per step;
    `accumulation_order`: as `accumulation` in `train`, for systems that know several. `context`: tokens per sequence; 0
    leaves activation checkpoints out of host memory. `states`: dtype of master weights, moments and swapped gradients
    (an arm may fix it). `gradients`: dtype of the flat buffer. `parts`: replaces the arm's own arrangement.
    `host_memory`: limit of the run's host memory in bytes, None for no limit. `activation_policies`: policy of each
    block, for systems where it can be chosen; None: the arm's. `state_versions`: as in `train`, for systems that keep
    versions of their states on the SSD. `clip`: maximum gradient norm (0: no clipping), for systems in which clipping
    decides whether all gradients must exist before the first one is used. `device`: what computes. With `cpu`, the
    tensors of the computation are in host memory too, and the process has no CUDA; None: as the papers count, a process
    with CUDA and no buffers for transfers to a GPU. `saves_meanwhile`: whether checkpoints are written while training
    continues, for systems that support it.
    """

    spec: ModelSpec
    system: str = "memascend"
    arm: str | None = None
    dtype: str = "fp16"
    states: str = "fp32"
    gradients: str = "fp32"
    stack: Stack = DEFAULT_STACK
    ranks: int = 1
    batch: int = 1
    context: int = 4096
    accumulation: int = 1
    accumulation_order: str = "horizontal"
    blocks_in_flight: int = 1
    sizes: SwapSizes = field(default_factory=SwapSizes)
    parts: Arrangement | None = None
    host_memory: int | None = None
    activation_policies: tuple[str, ...] | None = None
    state_versions: str = "auto"
    clip: float = 0.0
    device: str | None = None
    saves_meanwhile: bool = False

    def __post_init__(self) -> None:
        arm_of(self.system, self.arm)
        unknown = [policy for policy in self.activation_policies or () if policy not in POLICIES]
        if unknown:
            raise ValueError(f"invalid activation policy {unknown[0]!r}: expected {', '.join(POLICIES)}")
        if self.device not in (None, *DEVICES):
            raise ValueError(f"unknown device '{self.device}': use one of {', '.join(DEVICES)}")
        _check_sizes(self)
        _check_dtypes(self)

    @property
    def fates(self) -> tuple[str, ...] | None:
        """Deprecated name of `activation_policies`."""
        warn_renamed("Workload.fates", "Workload.activation_policies")
        return self.activation_policies

    @property
    def arm_name(self) -> str:
        """Name of the arm: the given one or the system's first."""
        return arm_of(self.system, self.arm)

    @cached_property
    def arrangement(self) -> Arrangement:
        """Parts of the system: those given, or the arm's own."""
        return self.parts or arrangement(self.system, self.arm)

    @property
    def kept_states(self) -> str:
        """Dtype of the states: fp32, bf16 or int8; an arm may fix it."""
        return self.arrangement.states or self.states

    @property
    def swaps(self) -> bool:
        """Whether parameters and states are stored on the SSD."""
        return self.arrangement.states_on == "ssd"

    @property
    def offloads(self) -> bool:
        """Whether parameters and states are stored outside the GPU."""
        return self.arrangement.states_on != "gpu"

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU computes, so that the tensors of the computation are in host memory too."""
        return self.device == CPU

    @property
    def offloads_checkpoints(self) -> bool:
        """Whether activation checkpoints are stored in host memory, which only systems that offload do."""
        return self.stack.offloads and self.offloads

    @cached_property
    def sub_group_size(self) -> int:
        """Sub-group size in elements per rank, derived equally for every system so that all reach equal losses."""
        if self.sizes.sub_group_size is not None:
            return self.sizes.sub_group_size
        return sub_group_size([[partition_numel(tensor.numel, self.ranks) for tensor in self.spec.tensors()]])

    @property
    def paths(self) -> int:
        """Number of paths with optimizer states: as many as the configuration names, else the paper's two."""
        return 1 if self.arrangement.first_path else len(self.arrangement.parts.get("tiers") or ("nvme", "pfs"))

    @property
    def optimizer_buffers(self) -> int:
        """Number of one rank's optimizer swap buffers: as the drop-in derives it; the papers' five for the baseline."""
        if self.sizes.optimizer_buffers is not None:
            return self.sizes.optimizer_buffers
        if self.arrangement.optimizer_buffers is not None:
            return self.arrangement.optimizer_buffers
        if self.arrangement.over_paths:
            return cached_sub_group_buffers(self.arrangement.swaps_gradients, cached_sub_groups_for(self.paths))
        if self.arrangement.derives_sizes or self.arrangement.pipelined:
            return optimizer_buffers(PIPELINED if self.arrangement.pipelined else {}, self.arrangement.swaps_gradients)
        return PAPER_OPTIMIZER_BUFFERS

    @property
    def swap_threshold_bytes(self) -> float:
        """Bytes below which a partition stays in memory."""
        set_to = self.sizes.swap_threshold_bytes
        return SWAP_THRESHOLD_BYTES / self.spec.k**2 if set_to is None else set_to

    @property
    def io(self) -> IoSettings:
        """I/O settings; by default as the drop-in derives them on this machine for an unknown device."""
        return self.sizes.io or io_settings({}, None)

    def streamed(self) -> Streamed:
        """Return what streams and what stays in memory. Raises ValueError if nothing is large enough to stream."""
        return streamed(
            self.spec.tensors(),
            element_bytes=ELEMENT_BYTES[self.dtype],
            ranks=self.ranks,
            threshold_bytes=self.swap_threshold_bytes,
        )

    def sub_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the elements of each partition in each of one rank's optimizer sub-groups, in order."""
        return self._sub_groups

    @cached_property
    def _sub_groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, sub_groups(self.spec.tensors(), self.sub_group_size, self.ranks)))

    def partitions(self) -> list[int]:
        """Return the elements of one rank's share of each parameter, in order."""
        return [partition_numel(tensor.numel, self.ranks) for tensor in self.spec.tensors()]


def workload_asked_for(options: Any, spec: ModelSpec, context: int, ranks: int, **others: Any) -> Workload:
    """Return the workload for the options of `train` or `plan`, which have the same names; `others` override them."""
    names = ("system", "arm", "dtype", "states", "gradients", "batch", "state_versions", "clip")
    said = {name: getattr(options, name) for name in names}
    said["stack"] = Stack(**{name: getattr(options, name) for name in MODEL_OPTIONS})
    said["host_memory"] = parse_bytes(options.host_memory, "--host-memory") if options.host_memory else None
    said |= {"spec": spec, "context": context, "ranks": ranks, "accumulation": options.accumulate}
    said["accumulation_order"] = options.accumulation
    return Workload(**said | others)


def papers(work: Workload) -> Workload:
    """Return the same workload with the sizes that the papers' totals imply instead of derived ones, for every system.

    These are five optimizer buffers, small sub-groups (DeepSpeed's default for systems that do not swap), and no bounce
    buffers, which no paper mentions.
    """
    group = PAPER_SUB_GROUP_SIZE // work.ranks if work.swaps else OFFLOAD_SUB_GROUP_SIZE
    sizes = replace(
        work.sizes,
        sub_group_size=max(1, group // work.spec.k**2),
        optimizer_buffers=PAPER_OPTIMIZER_BUFFERS,
        bounce_buffers=False,
    )
    return replace(work, sizes=sizes)


def _check_sizes(work: Workload) -> None:
    for name, value, least in (
        ("number of GPUs", work.ranks, 1),
        ("batch", work.batch, 1),
        ("context", work.context, 0),
        ("number of batches per step", work.accumulation, 1),
        ("number of blocks in flight", work.blocks_in_flight, 1),
    ):
        if value < least:
            raise ValueError(f"the {name} must be at least {least}, got {value}")
    if not work.clip >= 0:
        raise ValueError(f"the largest norm of the gradients (clip) must be at least 0, got {work.clip}")


def _check_dtypes(work: Workload) -> None:
    if work.dtype not in DTYPES:
        hint = did_you_mean(work.dtype, DTYPES)
        raise ValueError(f"unknown dtype '{work.dtype}'{hint}: use one of {', '.join(DTYPES)}")
    kept = work.kept_states
    for name, value, known in (
        ("optimizer states", kept, STATE_DTYPES),
        ("gradients", work.gradients, GRADIENT_DTYPES),
    ):
        if value not in (*known, work.dtype if name == "gradients" else None):
            hint = did_you_mean(value, known)
            raise ValueError(f"unknown dtype '{value}' of the {name}{hint}: use one of {', '.join(known)}")
        if value == "bf16" and work.dtype != "bf16":
            raise ValueError(
                f"{name} in bf16 need a model in bf16, not {work.dtype}: set dtype to bf16, or {name} to fp32"
            )
    require_states(work.system, work.arm, kept, work.dtype)
    if work.arrangement.refuses_bf16_states and kept == "bf16":
        raise ValueError(f"{work.arrangement.refuses_bf16_states}: name memascend, or states fp32")

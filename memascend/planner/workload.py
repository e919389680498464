"""What is trained, by which system and in which sizes: the one argument of every part of the planner. No torch here."""

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
STATE_DTYPES = ("fp32", "bf16", "int8")  # int8: codes, and scales of 2 bytes per block of 32
INT8_MOMENTS_BYTES = 2 + 2 / 32  # a parameter
GRADIENT_DTYPES = ("fp32", "bf16")
CUDA, CPU = DEVICES = ("cuda", "cpu")

# What the papers' totals describe. DeepSpeed's offload_optimizer.buffer_count: parameter, gradient, two moments, and
# one to spare.
PAPER_OPTIMIZER_BUFFERS = 5
# The optimizer works through sub-groups of this many elements (divided by k^2 in a twin and by the ranks, since
# DeepSpeed counts partitions). Small enough that the largest sub-group is the largest tensor, as the totals imply.
PAPER_SUB_GROUP_SIZE = 64_000_000
# ZeRO-Offload has no swapping to bound, and keeps DeepSpeed's default.
OFFLOAD_SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class SwapSizes:
    """Sizes that a DeepSpeed configuration sets; what is None is left out of it, and derived as a run derives it.

    `sub_group_size`, `pool_numel` (buffer_size) and `pool_buffers` (buffer_count) in elements of one rank's partitions
    and in buffers. `swap_threshold_bytes`: smaller partitions stay in memory (DeepSpeed's 1 MiB, over k^2 in a twin).
    `io`: how the direct engine reads and writes; `bounce_buffers` False leaves its buffers out, `engines` counts them
    a rank (one for each distinct nvme_path).
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
    """One configuration. `batch` is sequences per GPU at a time, `accumulation` batches per step, `context` tokens per
    sequence; context 0 leaves activation checkpoints out of the host's memory.

    `states`: master weights, moments and swapped gradients (an arm may fix it); `gradients`: the flat buffer. `parts`
    stands in for the arm's own arrangement. `host_memory`: bytes that the run may take of the machine, None: any.
    `activation_policies`: of each block, where a system lets that be chosen; None: as the arm says.
    `state_versions`: of a system that keeps versions of its states on the SSD, as `train` has it. `clip`: the largest
    norm of the gradients (0: any), where it matters whether all of them must have come before one is used. `device`:
    what computes. On `cpu`, the tensors of the computation are in host memory too, and the process has no CUDA; None:
    as the papers count, a process with CUDA and no buffers for transfers to a GPU. `saves_meanwhile`: checkpoints are
    written while training goes on, by a system that can.
    Raises ValueError, in one line, for what cannot be.
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
        """Deprecated: `activation_policies`."""
        warn_renamed("Workload.fates", "Workload.activation_policies")
        return self.activation_policies

    @property
    def arm_name(self) -> str:
        return arm_of(self.system, self.arm)

    @cached_property
    def arrangement(self) -> Arrangement:
        return self.parts or arrangement(self.system, self.arm)

    @property
    def kept_states(self) -> str:
        """fp32, bf16 or int8; an arm may fix it."""
        return self.arrangement.states or self.states

    @property
    def swaps(self) -> bool:
        """Whether parameters and states wait on the SSD."""
        return self.arrangement.states_on == "ssd"

    @property
    def offloads(self) -> bool:
        """Whether parameters and states wait outside the GPU."""
        return self.arrangement.states_on != "gpu"

    @property
    def on_cpu(self) -> bool:
        return self.device == CPU

    @property
    def offloads_checkpoints(self) -> bool:
        return self.stack.offloads and self.offloads

    @cached_property
    def sub_group_size(self) -> int:
        """Elements per rank. Derived for every system alike, so that all train to equal losses."""
        if self.sizes.sub_group_size is not None:
            return self.sizes.sub_group_size
        return sub_group_size([[partition_numel(tensor.numel, self.ranks) for tensor in self.spec.tensors()]])

    @property
    def paths(self) -> int:
        """Over which the optimizer states lie: as many as the configuration names, else the two of the paper."""
        return 1 if self.arrangement.first_path else len(self.arrangement.parts.get("tiers") or ("nvme", "pfs"))

    @property
    def optimizer_buffers(self) -> int:
        """Swap buffers of one rank's optimizer: as many as the drop-in derives, for the baseline the papers' five."""
        if self.sizes.optimizer_buffers is not None:
            return self.sizes.optimizer_buffers
        if self.arrangement.over_paths:
            return cached_sub_group_buffers(self.arrangement.swaps_gradients, cached_sub_groups_for(self.paths))
        if self.arrangement.derives_sizes or self.arrangement.pipelined:
            return optimizer_buffers(PIPELINED if self.arrangement.pipelined else {}, self.arrangement.swaps_gradients)
        return PAPER_OPTIMIZER_BUFFERS

    @property
    def swap_threshold_bytes(self) -> float:
        set_to = self.sizes.swap_threshold_bytes
        return SWAP_THRESHOLD_BYTES / self.spec.k**2 if set_to is None else set_to

    @property
    def io(self) -> IoSettings:
        """As the drop-in derives it on this machine, for a folder of which nothing is known."""
        return self.sizes.io or io_settings({}, None)

    def streamed(self) -> Streamed:
        """What streams and what stays in memory. Raises ValueError where nothing is large enough to stream."""
        return streamed(
            self.spec.tensors(),
            element_bytes=ELEMENT_BYTES[self.dtype],
            ranks=self.ranks,
            threshold_bytes=self.swap_threshold_bytes,
        )

    def sub_groups(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each partition in each of one rank's optimizer sub-groups, in order."""
        return self._sub_groups

    @cached_property
    def _sub_groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, sub_groups(self.spec.tensors(), self.sub_group_size, self.ranks)))

    def partitions(self) -> list[int]:
        """Elements of one rank's share of each parameter, in order."""
        return [partition_numel(tensor.numel, self.ranks) for tensor in self.spec.tensors()]


def workload_asked_for(options: Any, spec: ModelSpec, context: int, ranks: int, **others: Any) -> Workload:
    """What the options of `train` or `plan` ask for, which have the same names in both; `others` stand over them."""
    names = ("system", "arm", "dtype", "states", "gradients", "batch", "state_versions", "clip")
    said = {name: getattr(options, name) for name in names}
    said["stack"] = Stack(**{name: getattr(options, name) for name in MODEL_OPTIONS})
    said["host_memory"] = parse_bytes(options.host_memory, "--host-memory") if options.host_memory else None
    said |= {"spec": spec, "context": context, "ranks": ranks, "accumulation": options.accumulate}
    return Workload(**said | others)


def papers(work: Workload) -> Workload:
    """The same work with the sizes that the papers' totals describe in place of derived ones, for every system alike:
    five optimizer buffers, small sub-groups, and no bounce buffers, which no paper mentions.
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

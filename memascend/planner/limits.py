"""Does a configuration fit, and what is the largest context, batch and model that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memascend.planner.footprint import SUB_GROUP_SIZE, Plan, checkpoint_bytes, kept_states, plan, swaps_gradients
from memascend.planner.gpu_memory import DevicePlan, gpu_memory
from memascend.planner.io_volume import IoVolume, io_volume
from memascend.planner.machine import Machine
from memascend.planner.options import DEFAULT_STACK, Stack
from memascend.planner.spec import ModelSpec, known_models, model_spec

# Answers are rounded down to so many tokens.
CONTEXT_STEP = 256
_LARGEST = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes of one GPU, of host memory and of the SSD; None where nobody says, and then nothing is checked."""

    gpu_bytes: float | None = None
    ram_bytes: float | None = None
    ssd_bytes: float | None = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.gpu_bytes, self.ram_bytes, self.ssd_bytes))

    def with_machine(self, machine: Machine | None) -> Limits:
        """The same, with what is not given taken from the machine (its SSD's free space is nobody's to know)."""
        if machine is None:
            return self
        return replace(
            self,
            gpu_bytes=machine.gpu_memory_bytes if self.gpu_bytes is None else self.gpu_bytes,
            ram_bytes=machine.ram_bytes if self.ram_bytes is None else self.ram_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One configuration: what is trained, by which system, in which sizes. Batch is sequences a GPU at a time."""

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
    micro_batches: int = 1

    @property
    def kept_states(self) -> str:
        """fp32 or bf16; an arm may fix it."""
        return kept_states(self.system, self.arm, self.states)

    @property
    def offloads_checkpoints(self) -> bool:
        return self.stack.offloads and self.system != "all_in_gpu"

    def host(self) -> Plan:
        context = self.context if self.offloads_checkpoints else 0
        return plan(
            self.spec,
            self.system,
            self.arm,
            dtype=self.dtype,
            states=self.states,
            gradients=self.gradients,
            ranks=self.ranks,
            batch=self.batch,
            context=context,
            # as train and --write-config set it for every system, so that losses are equal
            sub_group_size=max(1, SUB_GROUP_SIZE // self.ranks // self.spec.k**2),
        )

    def device(self) -> DevicePlan:
        return gpu_memory(
            self.spec, self.stack, system=self.system, ranks=self.ranks, batch=self.batch, context=self.context
        )

    def volume(self) -> IoVolume:
        return io_volume(
            self.spec,
            self.system,
            dtype=self.dtype,
            states=self.kept_states,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            swap_gradients=swaps_gradients(self.system, self.arm),
        )


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest that fit: context at the batch asked for, batch at the context, committed model at both. None: none.

    `unbounded` where no limit that grows with it was given.
    """

    context: int | None
    batch: int | None
    model: str | None
    unbounded: bool = False


class Fitter:
    """Decides for one model and system; what does not depend on batch and context is planned once."""

    def __init__(self, workload: Workload, limits: Limits) -> None:
        self.workload, self.limits = workload, limits
        self._base = replace(workload, context=0).host().host_bytes if limits.ram_bytes is not None else 0
        self._stored = workload.volume().stored_bytes

    def host_bytes(self, batch: int, context: int) -> int:
        work = self.workload
        if not work.offloads_checkpoints:
            return self._base
        return self._base + checkpoint_bytes(
            work.spec, work.system, work.arm, dtype=work.dtype, ranks=work.ranks, batch=batch, context=context
        )

    def fits(self, batch: int, context: int) -> bool:
        limits = self.limits
        if limits.ssd_bytes is not None and self._stored > limits.ssd_bytes:
            return False
        if limits.ram_bytes is not None and self.host_bytes(batch, context) > limits.ram_bytes:
            return False
        if limits.gpu_bytes is None:
            return True
        return replace(self.workload, batch=batch, context=context).device().device_bytes <= limits.gpu_bytes


def largest(workload: Workload, limits: Limits) -> Largest:
    """Search by doubling, then by halving: needs grow with context and with batch."""
    fitter = Fitter(workload, limits)
    grows = limits.gpu_bytes is not None or (limits.ram_bytes is not None and workload.offloads_checkpoints)
    if not grows:
        return Largest(context=None, batch=None, model=_largest_model(workload, limits), unbounded=True)
    tokens = _search(lambda steps: fitter.fits(workload.batch, steps * CONTEXT_STEP))
    batch = _search(lambda size: fitter.fits(size, workload.context))
    return Largest(
        context=tokens * CONTEXT_STEP if tokens else None, batch=batch or None, model=_largest_model(workload, limits)
    )


def _search(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, 0 if not even one does."""
    if not fits(1):
        return 0
    high = 2
    while high < _LARGEST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest_model(workload: Workload, limits: Limits) -> str | None:
    """The committed model with most parameters that fits at the batch and context asked for."""
    for spec in sorted(map(model_spec, known_models()), key=lambda spec: -spec.parameters):
        spec = spec.fused(workload.spec.fused_experts)
        if Fitter(replace(workload, spec=spec), limits).fits(workload.batch, workload.context):
            return spec.display
    return None

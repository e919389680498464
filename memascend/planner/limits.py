"""Whether a configuration fits given limits, and the largest context, batch and model that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memascend import systems
from memascend.planner.footprint import checkpoint_bytes, plan
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.machine import MachineSpec
from memascend.planner.spec import fused_experts, known_models, model_spec
from memascend.planner.step import io_volume
from memascend.planner.workload import Workload

# Largest contexts are rounded down to multiples of this many tokens.
CONTEXT_STEP = 256
_LARGEST = 1 << 24

SSD_SPACE = "SSD space"  # name of the corresponding Need


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits in bytes on one GPU's memory, host memory and SSD space; a limit of None is not checked."""

    gpu_bytes: float | None = None
    ram_bytes: float | None = None
    ssd_bytes: float | None = None

    @property
    def given(self) -> bool:
        """Whether at least one limit is set."""
        return any(limit is not None for limit in (self.gpu_bytes, self.ram_bytes, self.ssd_bytes))

    def with_machine(self, machine: MachineSpec | None) -> Limits:
        """Return these limits completed from the machine, except for SSD space, which its description lacks."""
        if machine is None:
            return self
        return replace(
            self,
            gpu_bytes=machine.gpu_memory_bytes if self.gpu_bytes is None else self.gpu_bytes,
            ram_bytes=machine.ram_bytes if self.ram_bytes is None else self.ram_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest values that fit, each None if nothing fits.

    `context` is at the requested batch, `batch` at the requested context, and `model` (a committed one) at both.
    `unbounded`: whether no given limit depends on context and batch, so that these two are None.
    """

    context: int | None
    batch: int | None
    model: str | None
    unbounded: bool = False


def within_space(work: Workload, space_bytes: float | None) -> Workload:
    """Return `work` with the number of versions of its states that a run keeps with `space_bytes` of SSD space.

    None stands for enough space. An explicit choice is kept; `auto` becomes two versions if they fit, else one. The
    work is returned unchanged if the system does not keep versions of its states.
    """
    stored_in = getattr(systems.load(work.system), "stored_in", None)
    if stored_in is None or work.state_versions != "auto":
        return work
    two = space_bytes is None or stored_in("two", work) <= space_bytes
    return replace(work, state_versions="two" if two else "one")


def stored_within(work: Workload, space_bytes: float | None) -> int:
    """Return the bytes on the SSD of `work` after `within_space`."""
    stored_in = getattr(systems.load(work.system), "stored_in", None)
    if stored_in is None:
        return io_volume(work).stored_bytes
    return int(stored_in(within_space(work, space_bytes).state_versions, work))


class Fitter:
    """Checks whether a batch and a context fit, for one model and system.

    The part of the plan that does not depend on batch and context is computed once. For a system that counts its stored
    bytes itself (`stored_in`) this is not possible, because its activation checkpoints pass through a few slots to the
    SSD: both host memory and SSD space are then computed for every check.
    """

    def __init__(self, work: Workload, limits: Limits) -> None:
        self.work, self.limits = work, limits
        self._counts = hasattr(systems.load(work.system), "stored_in")
        self._base = self._stored = 0
        if limits.ram_bytes is not None and not self._counts and not work.on_cpu:
            self._base = plan(replace(work, context=0)).host_bytes
        if limits.ssd_bytes is not None and not self._counts:
            self._stored = io_volume(work).stored_bytes

    def fits(self, batch: int, context: int) -> bool:
        """Return whether the run fits all given limits with this batch and context."""
        limits, work = self.limits, replace(self.work, batch=batch, context=context)
        if limits.ssd_bytes is not None and self._stored_bytes(work) > limits.ssd_bytes:
            return False
        if limits.ram_bytes is not None and self._host_bytes(work) > limits.ram_bytes:
            return False
        return limits.gpu_bytes is None or gpu_memory(work).device_bytes <= limits.gpu_bytes

    def _stored_bytes(self, work: Workload) -> int:
        return stored_within(work, self.limits.ssd_bytes) if self._counts else self._stored

    def _host_bytes(self, work: Workload) -> int:
        if self._counts or work.on_cpu:
            return plan(work).host_bytes
        return self._base + checkpoint_bytes(work)


def largest(work: Workload, limits: Limits) -> Largest:
    """Return the largest context, batch and committed model that fit."""
    model = largest_model(work, limits)
    in_ram = work.offloads_checkpoints or work.on_cpu
    grows = limits.gpu_bytes is not None or (limits.ram_bytes is not None and in_ram)
    if not grows:
        return Largest(context=None, batch=None, model=model, unbounded=True)
    context, batch = largest_sizes(work, limits)
    return Largest(context=context, batch=batch, model=model)


def largest_sizes(work: Workload, limits: Limits) -> tuple[int | None, int | None]:
    """Return the largest context at the requested batch and the largest batch at the requested context.

    Each is None if nothing fits. Memory grows monotonically with both, so the search doubles and then bisects.
    """
    fitter = Fitter(work, limits)
    tokens = _search(lambda steps: fitter.fits(work.batch, steps * CONTEXT_STEP))
    batch = _search(lambda size: fitter.fits(size, work.context))
    return tokens * CONTEXT_STEP or None, batch or None


def _search(fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, 0 if not even one does."""
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


def largest_model(work: Workload, limits: Limits) -> str | None:
    """Return the committed model with the most parameters that fits at the requested batch and context, or None."""
    for spec in sorted(map(model_spec, known_models()), key=lambda spec: -spec.parameters):
        spec = spec.fused(work.spec.fused_experts if work.spec.experts else fused_experts("auto"))
        if Fitter(replace(work, spec=spec), limits).fits(work.batch, work.context):
            return spec.display
    return None

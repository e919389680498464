"""All results of `memascend plan` for one configuration, computed once; the reports only print them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any

from memascend import systems
from memascend.deprecation import warn_renamed
from memascend.planner.activations import Choice, bytes_for_activations, choose
from memascend.planner.footprint import Plan, plan
from memascend.planner.gpu_memory import DevicePlan, activation_writes, gpu_memory
from memascend.planner.limits import SSD_SPACE, Largest, Limits, largest, stored_within, within_space
from memascend.planner.machine import MachineSpec
from memascend.planner.node_memory import NodePlan, place, topology_of
from memascend.planner.paths import PathPlan, plan_paths
from memascend.planner.step import IoVolume, io_volume
from memascend.planner.step_time import GPU, StepTime, step_time
from memascend.planner.workload import SwapSizes, Workload

DAY_S = 86_400
TB = 10**12


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes needed of one kind of memory, and the available bytes (None: unspecified)."""

    name: str
    needed_bytes: int
    limit_bytes: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the need is within the limit; None without a limit."""
        return None if self.limit_bytes is None else self.needed_bytes <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Wear:
    """Writes of training to the SSD. Rates per day and lifetimes in days need the duration of a step."""

    bytes_per_step: int
    seconds_per_step: float | None
    endurance_tb: float | None
    activation_bytes: int = 0  # the part of bytes_per_step that is activations; all GPUs
    untimed_bytes: int = 0  # the part of activation_bytes whose transfers are not in seconds_per_step
    computing_s: float | None = (
        None  # time of the products alone, if seconds_per_step includes the transfers of activations
    )
    endurance_gain: float = 1.0  # lifetime writes divided by the rating

    @property
    def activation_bytes_per_s(self) -> float | None:
        """Write bandwidth of all SSDs together with which activations take half of the step (SSDTrain, III-D)."""
        seconds = self.computing_s or self.seconds_per_step
        return self.activation_bytes / (seconds / 2) if self.activation_bytes and seconds else None

    @property
    def tb_per_day(self) -> float | None:
        """Terabytes written per day of training without a pause; None if the step's duration is unknown."""
        return None if self.seconds_per_step is None else self.bytes_per_step * DAY_S / self.seconds_per_step / TB

    @property
    def steps_of_life(self) -> float | None:
        """Steps until the drives reach their endurance; None if it is unknown or nothing is written."""
        if self.endurance_tb is None or not self.bytes_per_step:
            return None
        return self.endurance_tb * self.endurance_gain * TB / self.bytes_per_step

    @property
    def days_of_life(self) -> float | None:
        """Days of training without a pause until the drives reach their endurance; None if unknown."""
        steps = self.steps_of_life
        return None if steps is None or self.seconds_per_step is None else steps * self.seconds_per_step / DAY_S


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The same run with another system. `seconds`: duration of a step; None without a machine or a rate of it."""

    plan: Plan
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """One plan and everything derived from it. If `time` is None, `no_time` says why."""

    work: Workload
    host: Plan
    device: DevicePlan
    volume: IoVolume
    needs: tuple[Need, ...]
    largest: Largest | None
    machine: MachineSpec | None
    time: StepTime | None
    no_time: str
    wear: Wear
    others: tuple[Peer, ...]
    choice: Choice | None = None  # if the system's activation policies can be chosen and GPU memory is limited
    paths: tuple[PathPlan, ...] = ()  # if the system uses several
    nodes: NodePlan | None = None  # if the machine has several memory nodes

    @property
    def rated(self) -> MachineSpec:
        """The machine, which must have been given."""
        assert self.machine is not None, "computed for no machine"
        return self.machine

    @property
    def swap_bytes(self) -> int:
        """Bytes on the SSD between steps if there is enough space."""
        return stored_within(self.work, None)

    @property
    def fits(self) -> bool | None:
        """False if something does not fit, True if everything that was checked fits, None if nothing was checked."""
        verdicts = [need.fits for need in self.needs if need.fits is not None]
        verdicts += [self.nodes.fits] if self.nodes else []
        return all(verdicts) if verdicts else None


def full_plan(
    work: Workload,
    limits: Limits,
    machine: MachineSpec | None = None,
    endurance_tb: float | None = None,
    placement: str | None = None,
    endurance_gain: float = 1.0,
) -> PlanResult:
    """Plan `work` against `limits`, on `machine` if one is given.

    `endurance_tb`: rated lifetime writes of the drives in TB. `endurance_gain`: expected lifetime writes divided by the
    rating. `placement`: policy for a machine with several memory nodes.
    """
    kept = within_space(work, limits.ssd_bytes)  # with as many versions of the states as fit
    host, volume = plan(kept), io_volume(kept)
    device = DevicePlan(entries=()) if work.on_cpu else gpu_memory(kept)  # on a CPU these tensors are in host memory
    unscheduled = 0 if volume.activation_bytes else activation_writes(work)
    ssd_limit = None if volume.uncounted else limits.ssd_bytes  # a need that is not known is not compared
    needs = (
        Need(name="GPU memory", needed_bytes=device.device_bytes, limit_bytes=limits.gpu_bytes),
        Need(name="host memory", needed_bytes=host.host_bytes, limit_bytes=limits.ram_bytes),
        Need(name=SSD_SPACE, needed_bytes=volume.stored_bytes, limit_bytes=ssd_limit),
    )
    time, no_time = _time(kept, machine)
    rated = None if endurance_tb is None else endurance_tb * endurance_gain
    paths = plan_paths(work, machine, time.seconds if time else None, rated)
    return PlanResult(
        work=work,
        host=host,
        device=device,
        volume=volume,
        needs=needs,
        largest=largest(work, limits) if limits.given else None,
        machine=machine,
        time=time,
        no_time=no_time,
        wear=Wear(
            bytes_per_step=volume.total_write_bytes + unscheduled,
            activation_bytes=volume.activation_bytes + unscheduled,
            untimed_bytes=unscheduled,
            computing_s=None if unscheduled or time is None else time.of_resource(GPU),
            endurance_gain=endurance_gain,
            seconds_per_step=time.seconds if time else None,
            endurance_tb=endurance_tb,
        ),
        others=tuple(Peer(plan=peer, seconds=_seconds(peer.work, machine)) for peer in _others(work)),
        choice=_choice(work, machine, limits.gpu_bytes) if time and machine else None,
        paths=tuple(paths),
        nodes=_nodes(host, machine, placement or work.arrangement.placement, not work.arrangement.swaps_gradients),
    )


def _choice(work: Workload, machine: MachineSpec, gpu_bytes: float | None) -> Choice | None:
    """Return the choice of activation policies, or None if the system has none or GPU memory has no limit."""
    if gpu_bytes is None or not _chooses_policies(systems.load(work.system)):
        return None
    return choose(work, machine, bytes_for_activations(work, gpu_bytes))


def _chooses_policies(system: Any) -> bool:
    if getattr_static(system, "chooses_fates", False) is True:  # a user's system with the attribute of version 1.0
        warn_renamed("chooses_fates of a system", "chooses_policies")
        return True
    return getattr(system, "chooses_policies", False)


def _nodes(host: Plan, machine: MachineSpec | None, policy: str | None, host_gradients: bool) -> NodePlan | None:
    """Return the plan over memory nodes, or None for a machine with a single one."""
    described = machine.described.get("memory_nodes") if machine else None
    if machine is None or not described or len(described) < 2:
        return None
    topology = topology_of(machine.described, machine.name)
    names = {number: str(entry.get("name", number)) for number, entry in zip(topology.nodes, described, strict=True)}
    return place(host.entries, topology, policy, names, host_gradients=host_gradients)


def _others(work: Workload) -> Iterator[Plan]:
    """Yield plans of the other offloading systems that can train: their default arms, and arms with `shown_beside`.

    Stock DeepSpeed fails with bf16 states on NVMe, and other systems have no 8-bit moments: they are planned with fp32
    states then.
    """
    for name in systems.names():
        arms = systems.load(name).arms
        first = next(iter(arms))
        if name == work.system or arms[first].states_on == "gpu" or not arms[first].runs:
            continue
        for arm, parts in arms.items():
            if arm == first or parts.shown_beside:
                eight = work.kept_states == "int8" and not parts.int8_states
                states = "fp32" if parts.refuses_bf16_states or eight else work.kept_states
                own: dict[str, Any] = {"states": states, "parts": None, "sizes": SwapSizes(), "state_versions": "auto"}
                yield plan(replace(work, system=name, arm=arm, **own))


def _seconds(work: Workload, machine: MachineSpec | None) -> float | None:
    time, _ = _time(work, machine)
    return time.seconds if time else None


def _time(work: Workload, machine: MachineSpec | None) -> tuple[StepTime | None, str]:
    """Return the duration of a step, or None and the reason."""
    if machine is None:
        return None, "no machine was named: --testbed local, or a YAML file with its rates"
    if machine.gpu_flops_per_s is None and machine.name == "local":
        return None, "no GPU here whose rate is known; describe the machine that you mean in a YAML file (--testbed)"
    if work.ranks > machine.gpus:
        return None, f"{machine.name} has {machine.gpus} GPU{'s' if machine.gpus > 1 else ''}, not {work.ranks}"
    try:
        return step_time(work, machine), ""
    except ValueError as error:
        return None, str(error)

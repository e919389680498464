"""Duration of one training step on a described machine, from a simulation of the system's schedule.

It does not include the optimizer of a system that keeps states on the GPU (no testbed specifies the bandwidth of GPU
memory), page faults of new buffers, and the start of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend.planner.machine import RATES, Calibrations, MachineSpec
from memascend.planner.step import Step, step_of
from memascend.planner.workload import Workload
from memascend.simulator import Calibration, SimulationResult, simulate
from memascend.simulator.machine import ResourceModel
from memascend.simulator.testbed import resources_of_testbed

GPU, PCIE, SSD, CPU = "GPU products", "PCIe", "SSD", "CPU and host memory"
# Server of the simulator -> its readable name, and the key of its rate in a testbed.
_NAMES = {"gpu": GPU, "pcie": PCIE, "ssd": SSD, "cpu": CPU, "dram": "host memory", "link": "link between GPUs"}
_KEYS = {"gpu": "gpu_tflops_16bit", "pcie": "pcie_gb_per_s", "dram": "memory_gb_per_s"}
_KEYS |= {"ssd.read": "ssd_read_gb_per_s", "ssd.write": "ssd_write_gb_per_s"}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase: its duration in seconds, and the seconds that each resource needs for its work at its full rate."""

    name: str
    seconds: float
    by_resource: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The resource with the most work in the phase."""
        return max(self.by_resource, key=lambda resource: self.by_resource[resource])


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The simulated optimizer step. `tokens`: of all GPUs and micro-batches. Phases may overlap."""

    phases: tuple[Phase, ...]
    tokens: int
    simulated: SimulationResult

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.simulated.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs and micro-batches per second."""
        return self.tokens / self.seconds

    def of_resource(self, resource: str) -> float:
        """Return the seconds that a resource needs for all its work at its full rate."""
        return sum(phase.by_resource.get(resource, 0.0) for phase in self.phases)

    @property
    def bottleneck(self) -> str:
        """The resource with the most work in the whole step."""
        totals: dict[str, float] = {}
        for phase in self.phases:
            for resource, seconds in phase.by_resource.items():
                totals[resource] = totals.get(resource, 0.0) + seconds
        return max(totals, key=lambda resource: totals[resource])


def step_time(work: Workload, machine: MachineSpec, *, calibrations: Calibrations | None = None) -> StepTime:
    """Simulate one optimizer step of `work` on `machine`; with checkpointing each block is recomputed in backward.

    Raises a ValueError that names a rate which the system's tasks need and the machine lacks.
    """
    step = step_of(work, machine, calibrations)
    resources = resources_for(step)
    _require(step, resources, machine.memory_bytes_per_s is not None)
    simulated = simulate(step.tasks, resources)
    phases = tuple(
        Phase(name=name, seconds=end - begin, by_resource=_by_resource(simulated, name))
        for name, (begin, end) in simulated.phases().items()
    )
    tokens = work.ranks * work.batch * work.context * work.accumulation
    return StepTime(phases=phases, tokens=tokens, simulated=simulated)


def resources_for(step: Step) -> ResourceModel:
    """Return the simulator's machine for a step: the testbed's resources, their efficiencies, and the step's pools."""
    machine = step.machine
    assert machine is not None
    rates = {
        key: getattr(machine, field) / unit
        for key, (field, unit) in RATES.items()
        if getattr(machine, field) is not None
    }
    testbed = {**machine.described, "id": machine.name, "rates": rates}
    known = []
    if machine.gpu_flops_per_s is not None:
        known.append(_reached("gpu", step.costs.gpu_efficiency))
    if machine.ssd_read_bytes_per_s is not None and machine.ssd_write_bytes_per_s is not None:
        known.append(_reached("ssd", step.costs.ssd_efficiency))
    return resources_of_testbed(testbed, gpus=step.work.ranks, pools=step.pools, locks=step.locks, calibrations=known)


def _reached(resource: str, efficiency: float) -> Calibration:
    """Return the calibration by which the simulator multiplies a resource's rate."""
    return Calibration(
        name=f"efficiency of {resource}",
        value=efficiency,
        unit="of the peak rate",
        reason="memascend.planner.machine.CALIBRATIONS, or a paper's calibrations.yaml",
        reach="as stated there",
    )


def _kind(work: str) -> str:
    """Return a resource's name without its number: "pcie.down" for "pcie0.down"."""
    device, dot, way = work.partition(".")
    return device.rstrip("0123456789") + dot + way


def _require(step: Step, resources: ResourceModel, has_memory: bool) -> None:
    """Raise ValueError for a rate that the tasks need and the machine lacks."""
    served = set(resources.work_names())
    needed = {work for task in step.tasks for work in task.needs}
    lacking = sorted(needed - served)  # in alphabetical order: a GPU before its link, a link before storage
    if "cpu" in needed and not has_memory:
        lacking.append("dram")  # CPU work is counted in bytes of host memory
    for work in lacking:
        if any(_kind(each) == _kind(work) for each in served):  # the rate is given, so the name must be wrong
            known = ", ".join(sorted(served))
            raise ValueError(f"a task needs {work!r}, which {resources.name} does not have; it has {known}")
        key = _KEYS.get(work) or _KEYS.get(work.partition(".")[0].rstrip("0123456789"))
        said = f"rates.{key}" if key else f"what serves '{work}'"
        raise ValueError(f"the testbed {resources.name} does not say {said}, which step times need")


def _by_resource(simulated: SimulationResult, phase: str) -> dict[str, float]:
    """Return the seconds of work by resource. The two directions of a PCIe link work in parallel: the longer counts."""
    out: dict[str, float] = {}
    for server, seconds in simulated.served_s.get(phase, {}).items():
        kind = server.partition(".")[0].rstrip("0123456789")
        name = _NAMES.get(kind, server)
        out[name] = max(out.get(name, 0.0), seconds)
    return out

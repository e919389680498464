"""Seconds of one training step on a described machine: a roofline for each phase, which names its bottleneck.

Overlap rules, those of ZeRO-Infinity's schedule ("overlap-centric", its section 5):

* forward and backward: GPU products, PCIe and SSD work at the same time, so a phase takes as long as the slowest; reads
  and writes of one SSD add up, the two directions of PCIe do not.
* optimizer: overflow check, then sub-group by sub-group read, update, write, one after the other (DeepSpeed's defaults
  `pipeline_read` and `pipeline_write` false); with `pipelined` the three overlap.
* CPU work streams memory: bytes over bandwidth, plus a measured time a parameter that no byte count explains.

Left out: the optimizer of a system that keeps states on the GPU, page faults of new buffers, and the start of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend.planner.io_volume import IoVolume, io_volume
from memascend.planner.machine import Calibrations, Machine
from memascend.planner.spec import ModelSpec
from memascend.planner.workload import ELEMENT_BYTES, Workload

GPU, PCIE, SSD, CPU = "GPU products", "PCIe", "SSD", "CPU and host memory"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase: its seconds, and how long each resource works in it. In a serial phase they add up."""

    name: str
    seconds: float
    by_resource: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.by_resource, key=lambda resource: self.by_resource[resource])


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One optimizer step. `tokens` of all GPUs and micro batches."""

    phases: tuple[Phase, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """The resource that the step waits for longest."""
        waits: dict[str, float] = {}
        for phase in self.phases:
            if phase.name in ("overflow check", "optimizer"):
                for resource, seconds in phase.by_resource.items():
                    waits[resource] = waits.get(resource, 0.0) + min(seconds, phase.seconds)
            else:
                waits[phase.bottleneck] = waits.get(phase.bottleneck, 0.0) + phase.seconds
        return max(waits, key=lambda resource: waits[resource])


def forward_flops(spec: ModelSpec, batch: int, context: int) -> float:
    """Floating-point operations of one forward pass on one GPU: 2 a weight and token, and causal attention.

    Attention takes 4 C heads head_dim a token and block for scores and values, half of it under a causal mask. Of a
    mixture's experts only those that a token visits count; the embedding is a look-up, the output matrix a product.
    """
    chosen = spec.experts_per_token / spec.experts if spec.experts else 1.0
    weights = float(spec.vocab * spec.hidden)
    for tensor in spec.tensors():
        if tensor.is_matrix and tensor.block is not None:
            weights += tensor.numel * (chosen if ".experts." in tensor.name else 1.0)
    attention = 2.0 * context * spec.heads * spec.head_dim * spec.layers
    return batch * context * (2.0 * weights + attention)


def step_time(
    work: Workload, machine: Machine, *, pipelined: bool = False, calibrations: Calibrations | None = None
) -> StepTime:
    """Time of one optimizer step; with checkpointing each block is recomputed in backward.

    Raises ValueError where the machine lacks a rate that the system needs, naming it.
    """
    spec, stack = work.spec, work.stack
    overflow = work.arrangement.overflow if work.dtype == "fp16" else "none"
    known = calibrations or Calibrations()
    _require(machine, work)
    volume = io_volume(work)
    element = ELEMENT_BYTES[work.dtype]
    weights = spec.parameters * element
    stored = work.batch * work.context * spec.layers * spec.hidden * element
    kept = work.accumulation * stored if work.offloads_checkpoints else 0
    flops = work.accumulation * forward_flops(spec, work.batch, work.context)
    streamed = work.accumulation * weights if work.offloads else 0
    # Without a link of their own, what another GPU read for us comes over PCIe as well; with one, only our share does.
    gathered = streamed / work.ranks if machine.direct_gpu_link else streamed
    backward = flops * (3 if stack.checkpoints else 2)
    phases = [
        _overlapped(machine, known, volume, "forward", flops, inward=gathered, outward=kept),
        _overlapped(
            machine, known, volume, "backward", backward, inward=gathered + kept, outward=streamed / work.ranks
        ),
    ]
    if overflow != "none":
        phases.append(_overflow_check(spec, machine, known, overflow, work.ranks))
    phases.append(_optimizer(work, machine, known, volume, pipelined))
    return StepTime(phases=tuple(phases), tokens=work.ranks * work.batch * work.context * work.accumulation)


def _require(machine: Machine, work: Workload) -> None:
    needed = {"gpu_tflops_16bit": machine.gpu_flops_per_s, "pcie_gb_per_s": machine.pcie_bytes_per_s}
    if work.offloads:
        needed["memory_gb_per_s"] = machine.memory_bytes_per_s
    if work.swaps:
        needed |= {
            "ssd_read_gb_per_s": machine.ssd_read_bytes_per_s,
            "ssd_write_gb_per_s": machine.ssd_write_bytes_per_s,
        }
    lacking = [name for name, value in needed.items() if value is None]
    if lacking:
        raise ValueError(f"the testbed {machine.name} does not say rates.{lacking[0]}, which step times need")


def _ssd_seconds(machine: Machine, volume: IoVolume, phase: str) -> tuple[float, float]:
    read, written = volume.read_bytes[phase], volume.write_bytes[phase]
    return (
        read / machine.ssd_read_bytes_per_s if read else 0.0,
        written / machine.ssd_write_bytes_per_s if written else 0.0,
    )


def _overlapped(
    machine: Machine,
    known: Calibrations,
    volume: IoVolume,
    name: str,
    flops: float,
    *,
    inward: float,
    outward: float,
) -> Phase:
    resources = {
        GPU: flops / (machine.gpu_flops_per_s * known.gpu_efficiency),
        PCIE: max(inward, outward) / machine.pcie_bytes_per_s,
        SSD: sum(_ssd_seconds(machine, volume, name)),
    }
    return Phase(name=name, seconds=max(resources.values()), by_resource=resources)


def _overflow_check(spec: ModelSpec, machine: Machine, known: Calibrations, overflow: str, ranks: int) -> Phase:
    """Every rank checks its own gradients at the same time; no faster together than memory delivers."""
    one_pass = 4 * spec.parameters / (machine.memory_bytes_per_s * known.fused_memory_efficiency)
    seconds = one_pass
    if overflow == "chain":
        slower = known.chain_memory_bytes_per_s / machine.memory_bytes_per_s
        seconds = max(one_pass, known.chain_seconds_per_element * slower * spec.parameters / ranks)
    return Phase(name="overflow check", seconds=seconds, by_resource={CPU: seconds})


def _optimizer(work: Workload, machine: Machine, known: Calibrations, volume: IoVolume, pipelined: bool) -> Phase:
    if not work.offloads:
        return Phase(name="optimizer", seconds=0.0, by_resource={GPU: 0.0})
    size, parameters = ELEMENT_BYTES[work.kept_states], work.spec.parameters
    streamed = parameters * (4 * size + 3 * size + 2)  # read p, g, m, v; write p, m, v and the 16-bit weights
    host = streamed / (machine.memory_bytes_per_s * known.adam_memory_efficiency)
    host += known.host_seconds_per_parameter * parameters
    read, written = _ssd_seconds(machine, volume, "optimizer")
    resources = {SSD: read + written, CPU: host}
    seconds = max(read, host, written) if pipelined else sum(resources.values())
    return Phase(name="optimizer", seconds=seconds, by_resource=resources)

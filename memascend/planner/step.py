"""The tasks of one optimizer step, as a system's `schedule` adds them. This module does not import torch.

All schedules share these conventions: ranks are alike, so one of them represents all. Amounts on a rank's own resources
(`gpu0`, `pcie0.down`) are those of one rank; amounts on shared resources (`ssd.read`, `cpu`, a path) are those of all
ranks. The batches of an accumulated step are alike too, so their amounts are summed, which preserves their work and
what it overlaps with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from memascend import systems
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.pieces import OUTPUT, PIECES_PER_BLOCK, Piece, part_of, pieces
from memascend.planner.workload import ELEMENT_BYTES, INT8_MOMENTS_BYTES, Workload
from memascend.simulator import Task

PHASES = ("forward", "backward", "optimizer")
SAVED = "saved activations"  # the pool that tracks the bytes of saved activations on one GPU


@dataclass(frozen=True, kw_only=True)
class IoVolume:
    """Bytes read from and written to storage in one step, by phase, summed over all ranks and paths.

    `stored_bytes`: bytes on storage between steps. `activation_bytes`: the part of `write_bytes` that is saved
    activations, which backward reads again. `uncounted` says why nothing was counted; it is empty otherwise.
    """

    read_bytes: dict[str, int]
    write_bytes: dict[str, int]
    stored_bytes: int
    activation_bytes: int = 0
    uncounted: str = ""

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes read and written in one step."""
        return self.total_read_bytes + self.total_write_bytes


class Step:
    """One optimizer step of `work`. `machine` may be None if only byte counts are needed.

    A schedule adds tasks with `add`, pools with `pool`, and with `store` the bytes on storage between steps.
    """

    def __init__(self, work: Workload, machine: MachineSpec | None = None, costs: Calibrations | None = None) -> None:
        self.work, self.machine, self.costs = work, machine, costs or Calibrations()
        self.tasks: list[Task] = []
        self.pools: dict[str, float] = {}
        self.locks: list[str] = []
        self.stored_bytes: dict[str, int] = {}
        self.activation_bytes = 0.0  # saved activations that tasks write, summed over all ranks
        # Class of tensors -> its shares on memories that have a rate of their own. A class without an entry loads none.
        self.places: Mapping[str, Mapping[str, float]] = {}

    def add(
        self,
        name: str,
        phase: str,
        needs: Mapping[str, float] | None = None,
        *,
        after: Iterable[str] = (),
        takes: Mapping[str, float] | None = None,
        gives: Mapping[str, float] | None = None,
        holds: Iterable[str] = (),
    ) -> str:
        """Add a task and return its name, for the `after` of tasks that wait for it; `after` ignores empty names."""
        task = Task(
            name=name,
            phase=phase,
            needs=needs or {},
            after=tuple(filter(None, after)),
            takes=takes or {},
            gives=gives or {},
            holds=tuple(holds),
        )
        self.tasks.append(task)
        return name

    def pool(self, name: str, size: float) -> str:
        """Add a pool of `size` bytes and return its name. A task that takes bytes from it waits while it is full."""
        self.pools[name] = size
        return name

    def store(self, what: str, nbytes: int) -> None:
        """Add `nbytes`, summed over all ranks, to what is on storage between steps."""
        self.stored_bytes[what] = self.stored_bytes.get(what, 0) + nbytes

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> list[Piece]:
        return pieces(self.work)

    @property
    def state_bytes(self) -> int:
        """Bytes per element of master weights, gradients and moments; for 8-bit moments without their scales."""
        return ELEMENT_BYTES[self.work.kept_states]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the parameter pool, in units of the largest piece: as many blocks as are in flight."""
        return self.work.blocks_in_flight * PIECES_PER_BLOCK * max(piece.weight_bytes for piece in self.pieces)

    @cached_property
    def swapped_weight_bytes(self) -> int:
        """Bytes of the weights on the SSD, over all ranks. Raises ValueError if nothing is large enough to stream."""
        parts, element = self.work.streamed(), ELEMENT_BYTES[self.work.dtype]
        return self.work.ranks * element * (sum(map(sum, parts.blocks)) + sum(parts.outside))

    @cached_property
    def swapped_states_bytes(self) -> int:
        """Bytes on the SSD of each of master weights, gradients, first and second moments, all ranks together.

        Sub-groups below the swap threshold stay in memory and are not counted.
        """
        work, size = self.work, self.state_bytes
        swapped = [numel for numel in map(sum, work.sub_groups()) if numel * size >= work.swap_threshold_bytes]
        return work.ranks * size * sum(swapped)

    def divide(self, nbytes: int, among: list[Piece]) -> list[int]:
        """Divide `nbytes` in proportion to the pieces' parameters; the shares sum to `nbytes` exactly."""
        whole, so_far, given, out = sum(piece.parameters for piece in among), 0, 0, []
        for piece in among:
            so_far += piece.parameters
            out.append(nbytes * so_far // whole - given)
            given += out[-1]
        return out

    @property
    def gathered_share(self) -> float:
        """Share of the weights that passes through one GPU's PCIe link: all of them without a link between GPUs."""
        return 1 / self.work.ranks if self.machine is not None and self.machine.direct_gpu_link else 1.0

    # -- work of the device --------------------------------------------------------------------------------------------

    def products(self, phase: str, piece: Piece, *, recomputed: bool | None = None) -> float:
        """Return the floating-point operations of a piece in phase `forward` or `backward`, over all batches of a step.

        In backward, a checkpointed block is recomputed if `recomputed` (None: as the work's stack says). The runtime's
        own time is added as equivalent operations, because the same thread spends it.
        """
        passes = 1.0
        if phase == "backward":
            again = self.work.stack.checkpoints if recomputed is None else recomputed
            passes = self.costs.backward_products + (1 if again else 0)
        rate = (self.machine.gpu_flops_per_s or 0.0) if self.machine is not None else 0.0
        reached = rate * self.costs.gpu_efficiency
        own = self.costs.own_s.get(phase, 0.0) / len(self.pieces)
        flops = passes * piece.flops
        if part_of(piece) == OUTPUT and phase in self.costs.output_s:
            whole = sum(each.flops for each in self.pieces if part_of(each) == OUTPUT)
            flops = self.costs.output_s[phase] * reached * (piece.flops / whole if whole else 1.0)
        return self.work.accumulation * (flops + own * reached)

    # -- host memory ---------------------------------------------------------------------------------------------------

    def memory(self, **nbytes: float) -> dict[str, float]:
        """Return the load on host memories of reading or writing bytes by class (`weights`, `activations` ...).

        The byte counts and the result are summed over all ranks.
        """
        needs: dict[str, float] = {}
        for name, size in nbytes.items():
            for place, share in self.places.get(name, {}).items():
                if size * share:
                    needs[place] = needs.get(place, 0.0) + size * share
        return needs

    # -- work of the CPU -----------------------------------------------------------------------------------------------

    def streaming_s(self, nbytes: float, efficiency: float) -> float:
        """Return the seconds for the CPU to stream `nbytes` at a share of the memory bandwidth; 0 without a machine."""
        bandwidth = self.machine.memory_bytes_per_s if self.machine is not None else None
        return nbytes / (bandwidth * efficiency) if bandwidth else 0.0

    def adamw_s(self, parameters: float) -> float:
        """Return the seconds of a CPU AdamW update of `parameters` elements, including DeepSpeed's own overhead.

        AdamW reads four tensors of states, and writes three of them and the 16-bit weights. With 8-bit moments it reads
        the gradients, and reads and writes weights, codes and scales.
        """
        each: float = 7 * self.state_bytes + ELEMENT_BYTES[self.work.dtype]
        if self.work.kept_states == "int8":
            each = 2 * (ELEMENT_BYTES[self.work.dtype] + INT8_MOMENTS_BYTES) + ELEMENT_BYTES[self.work.gradients]
        nbytes = parameters * each
        update = self.streaming_s(nbytes, self.costs.adam_memory_efficiency)
        own = self.costs.own_s.get("optimizer", 0.0) * parameters / self.work.spec.parameters
        return update + own + self.costs.host_seconds_per_parameter * parameters

    def check_s(self, *, chain: bool) -> float:
        """Return the seconds of the overflow check; all ranks check their own gradients at the same time.

        `chain`: DeepSpeed's sequence of operations instead of one fused pass. Neither is faster than memory bandwidth
        allows.
        """
        numel, known = self.work.spec.parameters, self.costs
        one_pass = self.streaming_s(4 * numel, known.fused_memory_efficiency)
        if not chain:
            return one_pass
        bandwidth = self.machine.memory_bytes_per_s if self.machine is not None else None
        slower = known.chain_memory_bytes_per_s / bandwidth if bandwidth else 1.0
        return max(one_pass, known.chain_seconds_per_element * slower * numel / self.work.ranks)

    # -- what a step moves ---------------------------------------------------------------------------------------------

    def volume(self) -> IoVolume:
        """Return the I/O volume: the sum of what the tasks read from and write to paths."""
        read = dict.fromkeys(PHASES, 0)
        written = dict.fromkeys(PHASES, 0)
        for task in self.tasks:
            for work, amount in task.needs.items():
                for ending, sums in ((".read", read), (".write", written)):
                    if work.endswith(ending):
                        sums[task.phase] = sums.get(task.phase, 0) + round(amount)
        return IoVolume(
            read_bytes=read,
            write_bytes=written,
            stored_bytes=sum(self.stored_bytes.values()),
            activation_bytes=round(self.activation_bytes),
        )


def step_of(work: Workload, machine: MachineSpec | None = None, costs: Calibrations | None = None) -> Step:
    """Return the step of `work` as its system schedules it. Raises NoSchedule for a system without a schedule."""
    step = Step(work, machine, costs)
    systems.load(work.system).schedule(step)
    return step


def io_volume(work: Workload) -> IoVolume:
    """Return the bytes that one optimizer step of `work` reads and writes, with all its accumulated batches.

    They are counted by the system itself if it has `volume`, otherwise from the tasks of its schedule; without either,
    the result says that they are not counted.
    """
    counted = getattr(systems.load(work.system), "volume", None)
    if counted is not None:
        volume: IoVolume = counted(work)
        return volume
    try:
        return step_of(work).volume()
    except systems.NoSchedule as error:
        nothing = dict.fromkeys(PHASES, 0)
        return IoVolume(read_bytes=nothing, write_bytes=dict(nothing), stored_bytes=0, uncounted=str(error))

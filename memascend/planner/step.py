"""The tasks of one optimizer step, as a system's `schedule` adds them. No torch here.

What holds for every schedule: ranks are alike, so one of them stands for all. Amounts on resources of its own (`gpu0`,
`pcie0.down`) are those of one rank, amounts on what ranks share (`ssd.read`, `cpu`, a path) those of all. Batches of an
accumulated step are alike too: their amounts are added up, which keeps their work and what it overlaps with.
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
SAVED = "saved activations"  # the pool that says how many bytes of them one GPU holds


@dataclass(frozen=True, kw_only=True)
class IoVolume:
    """Bytes that storage serves in one step, by phase, of all ranks and paths. `stored_bytes`: what lies there between
    steps; `activation_bytes`: those of `write_bytes` that are saved activations, which backward reads again."""

    read_bytes: dict[str, int]
    write_bytes: dict[str, int]
    stored_bytes: int
    activation_bytes: int = 0

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    @property
    def total_bytes(self) -> int:
        return self.total_read_bytes + self.total_write_bytes


class Step:
    """One optimizer step of `work`; `machine` None where only its bytes are asked for.

    A schedule adds tasks with `add`, pools with `pool`, and says with `store` what lies on storage between steps.
    """

    def __init__(self, work: Workload, machine: MachineSpec | None = None, costs: Calibrations | None = None) -> None:
        self.work, self.machine, self.costs = work, machine, costs or Calibrations()
        self.tasks: list[Task] = []
        self.pools: dict[str, float] = {}
        self.locks: list[str] = []
        self.stored_bytes: dict[str, int] = {}
        self.activation_bytes = 0.0  # saved activations that tasks write, of all ranks
        # Class of tensors -> shares of it on memory that has a rate of its own; a class that is not there loads none.
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
        """Add a task; returns its name, for the `after` of those that wait for it. Empty names are left out."""
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
        """A pool of `size` bytes; a task that takes of it waits while it is full."""
        self.pools[name] = size
        return name

    def store(self, what: str, nbytes: int) -> None:
        """Say that `nbytes`, of all ranks together, lie on storage between steps."""
        self.stored_bytes[what] = self.stored_bytes.get(what, 0) + nbytes

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> list[Piece]:
        return pieces(self.work)

    @property
    def state_bytes(self) -> int:
        """Of one element of master weights, gradients and moments; of 8-bit moments without their scales."""
        return ELEMENT_BYTES[self.work.kept_states]

    @property
    def pool_bytes(self) -> int:
        """Of the parameter pool in the amounts that pieces take: as many blocks as it has buffers for."""
        return self.work.blocks_in_flight * PIECES_PER_BLOCK * max(piece.weight_bytes for piece in self.pieces)

    @cached_property
    def swapped_weight_bytes(self) -> int:
        """Of the weights on the SSD, all ranks together. ValueError where nothing is large enough to stream."""
        parts, element = self.work.streamed(), ELEMENT_BYTES[self.work.dtype]
        return self.work.ranks * element * (sum(map(sum, parts.blocks)) + sum(parts.outside))

    @cached_property
    def swapped_states_bytes(self) -> int:
        """Of one of master, gradient, first and second moment on the SSD, all ranks together; smaller groups stay."""
        work, size = self.work, self.state_bytes
        swapped = [numel for numel in map(sum, work.sub_groups()) if numel * size >= work.swap_threshold_bytes]
        return work.ranks * size * sum(swapped)

    def divide(self, nbytes: int, among: list[Piece]) -> list[int]:
        """Shares of `nbytes` by the pieces' parameters; their sum is exact."""
        whole, so_far, given, out = sum(piece.parameters for piece in among), 0, 0, []
        for piece in among:
            so_far += piece.parameters
            out.append(nbytes * so_far // whole - given)
            given += out[-1]
        return out

    @property
    def gathered_share(self) -> float:
        """The share of the weights that comes over a GPU's PCIe: without a link between GPUs, all of them."""
        return 1 / self.work.ranks if self.machine is not None and self.machine.direct_gpu_link else 1.0

    # -- work of the device --------------------------------------------------------------------------------------------

    def products(self, phase: str, piece: Piece, *, recomputed: bool | None = None) -> float:
        """Floating-point operations of a piece in `forward` or `backward`, where a checkpointed block is `recomputed`
        (None: as the work's stack says), and the runtime's own time, which the same thread spends."""
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
        """What reading or writing bytes of a class (`weights`, `activations` ...) loads, of all ranks together."""
        needs: dict[str, float] = {}
        for name, size in nbytes.items():
            for place, share in self.places.get(name, {}).items():
                if size * share:
                    needs[place] = needs.get(place, 0.0) + size * share
        return needs

    # -- work of the CPU -----------------------------------------------------------------------------------------------

    def streaming_s(self, nbytes: float, efficiency: float) -> float:
        """Seconds in which the CPU streams `nbytes` at a share of the memory's bandwidth; 0 without a machine."""
        bandwidth = self.machine.memory_bytes_per_s if self.machine is not None else None
        return nbytes / (bandwidth * efficiency) if bandwidth else 0.0

    def adamw_s(self, parameters: float) -> float:
        """AdamW reads four tensors of states, writes three and the 16-bit weights; with 8-bit moments it reads
        gradients, and reads and writes weights, codes and scales. And what DeepSpeed does besides."""
        each: float = 7 * self.state_bytes + ELEMENT_BYTES[self.work.dtype]
        if self.work.kept_states == "int8":
            each = 2 * (ELEMENT_BYTES[self.work.dtype] + INT8_MOMENTS_BYTES) + ELEMENT_BYTES[self.work.gradients]
        nbytes = parameters * each
        update = self.streaming_s(nbytes, self.costs.adam_memory_efficiency)
        own = self.costs.own_s.get("optimizer", 0.0) * parameters / self.work.spec.parameters
        return update + own + self.costs.host_seconds_per_parameter * parameters

    def check_s(self, *, chain: bool) -> float:
        """The overflow check of all gradients, every rank its own at the same time; no faster than memory delivers."""
        numel, known = self.work.spec.parameters, self.costs
        one_pass = self.streaming_s(4 * numel, known.fused_memory_efficiency)
        if not chain:
            return one_pass
        bandwidth = self.machine.memory_bytes_per_s if self.machine is not None else None
        slower = known.chain_memory_bytes_per_s / bandwidth if bandwidth else 1.0
        return max(one_pass, known.chain_seconds_per_element * slower * numel / self.work.ranks)

    # -- what a step moves ---------------------------------------------------------------------------------------------

    def volume(self) -> IoVolume:
        """From the tasks: whatever they read from and write to a path."""
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
    """The step of `work` as its system schedules it. ValueError for a system that says nothing of its steps."""
    step = Step(work, machine, costs)
    systems.load(work.system).schedule(step)
    return step


def io_volume(work: Workload) -> IoVolume:
    """Bytes that one optimizer step of `work` reads and writes, with all batches that it accumulates: as the system
    counts them itself (`volume`), or else as its tasks say."""
    counted = getattr(systems.load(work.system), "volume", None)
    return step_of(work).volume() if counted is None else counted(work)

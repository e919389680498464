"""Forward and backward pass of DeepSpeed's ZeRO-3 with weights on the SSD, if the device is a CPU.

A GPU works on queued kernels while the host waits for a read. On a CPU the training thread itself computes, so nothing
is computed while it waits. The overlap is decided by DeepSpeed's hook before each module
(`PartitionedParameterCoordinator.fetch_sub_module`), which does three things, in this order:

    1. It releases the weights that the previous module has finished with, and waits for every read in flight. Weights
       that have been read are gathered at once, possibly several modules before their use.
    2. It starts to read the next weights in the order of use, as many as there are buffers for. Until then the hook
       itself computes (`Calibrations.hook_s`), and the drive is idle.
    3. It lets the module compute.

A read therefore overlaps with the one module between two hooks, and the pool decides which one. A uniform buffer is
returned when a module is done, so the next read overlaps with the following module, which often has no products. In the
adaptive pool a weight's buffer is free as soon as the weight has been gathered, at the hook of its own module, and the
corresponding matrix of the next block is read during that module. Backward keeps a block's weights from recomputation
on; those of the last block and of the output are kept from forward.

Gradients collect in a bucket. A full bucket goes through the optimizer's swap buffers; if those are full as well, the
thread waits until all of them are written (`AsyncTensorSwapper._make_swap_space`). The content of the last buffer is
written when the optimizer begins, and counted with the others.

Everything is decided by the configuration alone: buffers of the pool and of the optimizer, and sizes of the bucket and
of the sub-groups. The prefetch bucket is not a limit, since at least one weight is gathered at each hook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memascend.planner.pieces import EMBEDDING, OUTPUT
from memascend.planner.workload import ELEMENT_BYTES

if TYPE_CHECKING:
    from memascend.baselines.protocol.schedules import Arrived
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step
    from memascend.planner.tensors import TensorSpec
    from memascend.planner.workload import Workload

FORWARD, BACKWARD = "forward", "backward"
BLOCK, AGAIN = "block", "again"


def hooks_wait(step: Step) -> bool:
    """Return whether this module describes the step.

    A mixture of experts is excluded, since the tokens choose the experts and the order of visits is unknown.
    """
    return step.work.on_cpu and step.work.swaps and not step.work.spec.experts


@dataclass(frozen=True, kw_only=True)
class Module:
    """The computation between two hooks.

    The module does a `share` of the products of `part`: a block, a recomputed block (`again`), the output or the
    embedding. `weight` is the name of its matrix, which may be on the SSD; with `keeps`, the matrix stays in memory for
    a later pass. `trained` is the number of elements whose gradients are complete after it.
    """

    name: str
    phase: str
    part: str = ""
    share: float = 0.0
    weight: str = ""
    keeps: bool = False
    trained: int = 0


def passes(step: Step) -> str:
    """Add both passes of a step; return the task after which the optimizer begins."""
    thread = _Thread(step)
    for module in modules(step.work):
        thread.enter(module)
    return thread.end()


def gradients_by_buckets(step: Step) -> Arrived:
    """Return the callback that writes gradients as DeepSpeed does, for passes whose weights are not on a drive.

    It does not model that the thread waits when the gradients fill all swap buffers.
    """
    gradients, last = _Gradients(step), step.pieces[0]

    def arrived(piece: Piece, task: str) -> list[str]:
        gradients.add(piece.parameters, task)
        if piece is last:
            gradients.flush(task)
            return gradients.rest(task)
        return []

    return arrived


# -- the order of work -------------------------------------------------------------------------------------------------


def modules(work: Workload) -> Iterator[Module]:
    """Yield the modules of both passes in the order of their hooks."""
    spec, again = work.spec, work.stack.checkpoints
    blocks = [[tensor for tensor in spec.tensors() if tensor.block == block] for block in range(spec.layers)]
    outside = [tensor for tensor in spec.tensors() if tensor.block is None]
    first, output = outside[0], outside[0] if spec.tied else outside[-1]
    yield Module(name=EMBEDDING, phase=FORWARD, weight=first.name)
    for block in blocks:
        for module in _of_block(work, block):
            yield replace(module, phase=FORWARD, keeps=block is blocks[-1])
    yield Module(name="last norm", phase=FORWARD)
    yield Module(name=OUTPUT, phase=FORWARD, part=OUTPUT, weight=output.name, keeps=True)
    rest = sum(tensor.numel for tensor in outside if tensor not in (first, output))
    trained = rest + (0 if spec.tied else output.numel)
    yield Module(name=OUTPUT, phase=BACKWARD, part=OUTPUT, weight=output.name, trained=trained)
    for block in reversed(blocks):
        there = _of_block(work, block)
        if again:
            yield from (
                replace(module, name=f"{module.name}, again", phase=BACKWARD, part=AGAIN, keeps=True)
                for module in there
            )
        small = sum(tensor.numel for tensor in block if not tensor.is_matrix)
        numels = {tensor.name: tensor.numel for tensor in block}
        for module in reversed(there):
            trained = numels.get(module.weight, 0) + (small if module is there[0] else 0)
            yield replace(module, phase=BACKWARD, trained=trained)
    yield Module(name=EMBEDDING, phase=BACKWARD, part=EMBEDDING, weight=first.name, trained=first.numel)


def _of_block(work: Workload, tensors: list[TensorSpec]) -> list[Module]:
    """Return a block's modules in forward: norm, attention, norm, MLP.

    Attention itself is computed with the second-to-last matrix of its part, before the output projection; an activation
    follows the first matrix of the MLP.
    """
    spec, label = work.spec, f"block {tensors[0].block}"
    matrices = [tensor for tensor in tensors if tensor.is_matrix]
    attention = [tensor for tensor in matrices if ".mlp." not in tensor.name]
    mlp = [tensor for tensor in matrices if ".mlp." in tensor.name]
    scores = work.context * spec.heads * spec.head_dim  # multiplications per token in addition to the weights'
    whole = sum(tensor.numel for tensor in matrices) + scores

    def module(tensor: TensorSpec, more: int = 0) -> Module:
        name = f"{label}: {tensor.name.split('.')[-2]}"
        return Module(name=name, phase=FORWARD, part=BLOCK, share=(tensor.numel + more) / whole, weight=tensor.name)

    def other(name: str) -> Module:
        return Module(name=f"{label}: {name}", phase=FORWARD, part=BLOCK)

    found = [other("block"), other("first norm"), other("attention")]
    before_last = attention[-2:][:1]
    found += [module(tensor, scores if tensor in before_last else 0) for tensor in attention]
    found += [other("second norm"), other("MLP")]
    found += [module(tensor) for tensor in mlp[:1]] + [other("activation")] + [module(tensor) for tensor in mlp[1:]]
    return found


# -- the thread --------------------------------------------------------------------------------------------------------


class _Thread:
    """The training thread, which executes the hooks; none of their decisions depends on durations."""

    def __init__(self, step: Step) -> None:
        self.step, self.work = step, step.work
        least = self.work.swap_threshold_bytes / ELEMENT_BYTES[self.work.dtype]
        self.numels = {
            tensor.name: tensor.numel
            for tensor in self.work.spec.tensors()
            if -(-tensor.numel // self.work.ranks) >= least
        }
        self.buffers = _Buffers(self.work, list(self.numels.values()))
        self.queue = self._in_order_of_use()
        self.there: set[str] = set()  # weights that have been read and not yet released
        self.in_flight: list[str] = []  # reads for which the next hook waits
        self.done_with: list[str] = []  # weights that the next hook releases
        self.number = 0
        self.last_read = self.last = ""
        self.gradients = _Gradients(step)
        self.hooks_a_block = len(_of_block(self.work, [t for t in self.work.spec.tensors() if t.block == 0]))

    def _in_order_of_use(self) -> list[str]:
        """Return the weights in reverse order of their reads; weights that are kept are not read again."""
        order, there = [], set[str]()
        for module in modules(self.work):
            if module.weight in self.numels:
                if module.weight not in there:
                    order.append(module.weight)
                there.add(module.weight)
                if not module.keeps:
                    there.discard(module.weight)
        return order[::-1]

    def enter(self, module: Module) -> None:
        """Run the hook of a module and the module itself, and add their tasks."""
        phase, step = module.phase, self.step
        weight = module.weight if module.weight in self.numels else ""
        for name in self.done_with:
            self.buffers.give(name)
            self.there.discard(name)
        waits = [*self.in_flight, *self.gradients.awaited()]
        self.in_flight, self.done_with = [], []
        self.number += 1
        begin = step.add(f"{phase}, hook {self.number}", phase, after=(self.last, *waits))
        if weight and weight not in self.there:  # not read ahead
            assert self.queue[-1] == weight, f"{weight} is used, {self.queue[-1]} is next"
            self._read(phase, begin, by_force=True)
            begin = step.add(f"{phase}, hook {self.number}: goes on", phase, after=self.in_flight)
            self.in_flight = []
        self.buffers.gathered(weight)
        if own := self._own_flops(phase):
            begin = step.add(f"{phase}, hook {self.number}: gathers", phase, {"gpu0": own}, after=(begin,))
        for _ in range(self.buffers.free):
            if not self._read(phase, begin):
                break
        self.last = begin
        if flops := self._flops(module):
            self.last = step.add(f"{phase}: {module.name}", phase, {"gpu0": flops}, after=(begin,))
        if weight and not module.keeps:
            self.done_with.append(weight)
        if phase == BACKWARD:
            self.gradients.add(module.trained, self.last)

    def _read(self, phase: str, begin: str, *, by_force: bool = False) -> bool:
        """Start to read the next weight; return False if there is none, or no buffer for it.

        With `by_force`, it is read even without a buffer.
        """
        if not self.queue or not (self.buffers.take(self.queue[-1], self.numels[self.queue[-1]]) or by_force):
            return False
        name, work = self.queue.pop(), self.work
        self.there.add(name)
        nbytes = work.accumulation * work.ranks * -(-self.numels[name] // work.ranks) * ELEMENT_BYTES[work.dtype]
        self.last_read = self.step.add(
            f"{phase}, hook {self.number}: read {name}",
            phase,
            {"ssd.read": nbytes},
            after=(begin, self.last_read),
        )
        self.in_flight.append(self.last_read)
        return True

    def _flops(self, module: Module) -> float:
        """Return the products of a module in FLOP, without the hooks' own work, which `_own_flops` counts."""
        step, pieces = self.step, self.step.pieces
        if module.part == OUTPUT:
            return step.products(module.phase, pieces[-1])
        if module.part == EMBEDDING:  # summation of gradients
            return float(self.work.accumulation * self.work.batch * self.work.context * self.work.spec.hidden)
        if not module.part:
            return 0.0
        one = sum(step.products(FORWARD, piece) for piece in pieces[1:-1])
        both = sum(step.products(module.phase, piece) for piece in pieces[1:-1])
        whole = one if module.phase == FORWARD or module.part == AGAIN else both
        if module.phase == BACKWARD and module.part == BLOCK and self.work.stack.checkpoints:
            whole = both - one
        each = whole / self.work.spec.layers
        return module.share * max(0.0, each - self.hooks_a_block * self._own_flops(module.phase))

    def _own_flops(self, phase: str) -> float:
        """Return the thread's work in a hook before it starts to read, expressed as FLOP of products."""
        machine, costs = self.step.machine, self.step.costs
        rate = (machine.gpu_flops_per_s or 0.0) * costs.gpu_efficiency if machine is not None else 0.0
        return self.work.accumulation * costs.hook_s.get(phase, 0.0) * rate

    def end(self) -> str:
        """Add the last gradients, and return the task with which backward ends: all gradients are written.

        All other waits of the thread are dependencies of earlier tasks.
        """
        step = self.step
        if waits := self.gradients.flush(self.last):
            last = float(self.work.batch * self.work.context)  # the loop over the parameters continues after it
            self.last = step.add(f"{BACKWARD}: last gradients", BACKWARD, {"gpu0": last}, after=(self.last, *waits))
        return step.add(f"end of {BACKWARD}", BACKWARD, after=(self.last, *self.gradients.rest(self.last)))


class _Buffers:
    """The buffers of the parameter pool: uniform, or by size in the adaptive pool."""

    def __init__(self, work: Workload, numels: Iterable[int]) -> None:
        parts, flight = work.streamed(), work.blocks_in_flight
        self.in_use: dict[str, int] = {}
        self.idle: set[str] = set()  # buffers in `in_use` whose weight has been gathered
        self.sizes: dict[int, int] | None = None
        self.count = work.sizes.pool_buffers or parts.monolithic_count(flight)
        if work.arrangement.pool == "adaptive":
            most: Counter[int] = Counter()
            for block in parts.blocks:
                most |= Counter(block)
            self.sizes = {numel: flight * times for numel, times in most.items()}
            for numel in parts.outside:
                self.sizes[numel] = self.sizes.get(numel, 0) + 1
            self.count = sum(self.sizes.values())
        self.ranks = work.ranks

    @property
    def free(self) -> int:
        """Buffers that hold no weight."""
        return max(0, self.count - len(self.in_use))

    def take(self, name: str, numel: int) -> bool:
        """Take a buffer for a weight; return False if there is none. In the adaptive pool, a buffer of the same size
        whose weight has been gathered is reused."""
        numel = -(-numel // self.ranks)
        if name in self.in_use:
            return False
        if self.sizes is None:
            if not self.free:
                return False
        else:
            mine = [each for each, size in self.in_use.items() if size == numel]
            if len(mine) >= self.sizes[numel]:
                if (idle := next((each for each in mine if each in self.idle), None)) is None:
                    return False
                self.give(idle)
        self.in_use[name] = numel
        return True

    def gathered(self, name: str) -> None:
        """Note that a weight has been gathered, so that its buffer may be reused."""
        if name in self.in_use:
            self.idle.add(name)

    def give(self, name: str) -> None:
        """Return a weight's buffer, if it has one."""
        self.in_use.pop(name, None)
        self.idle.discard(name)


class _Gradients:
    """The bucket and the swap buffers of gradients written to the SSD; it adds no tasks if gradients stay in memory."""

    def __init__(self, step: Step) -> None:
        from memascend.planner.gpu_memory import REDUCE_BUCKET  # which imports torch

        self.step, work = step, step.work
        self.each = step.swapped_states_bytes / work.spec.parameters if work.arrangement.swaps_gradients else 0.0
        self.bucket_size = max(1, min(int(REDUCE_BUCKET) // work.spec.k**2, work.spec.parameters))
        self.buffer_bytes = work.ranks * max(map(sum, work.sub_groups())) * step.state_bytes
        self.free = work.optimizer_buffers
        self.bucket: list[int] = []
        self.filled = 0.0
        self.writes: list[str] = []  # writes since the last wait for all of them
        self.waits: list[str] = []  # writes for which the thread has to wait
        self.number = 0
        self.last_write = ""

    def add(self, numel: int, after: str) -> None:
        """Put the gradients of `numel` elements into the bucket, which is emptied first if they do not fit."""
        if not (self.each and numel):
            return
        if self.bucket and sum(self.bucket) + numel > self.bucket_size:
            self._empty(after)
        self.bucket.append(numel)

    def awaited(self) -> list[str]:
        """Return, and clear, the tasks for which the thread waits before it continues."""
        waits, self.waits = self.waits, []
        return waits

    def flush(self, after: str) -> list[str]:
        """Empty the last bucket; return the tasks for which the thread waits."""
        self._empty(after)
        return self.awaited()

    def rest(self, after: str) -> list[str]:
        """Write the last, partially filled buffer; return the last write, which follows all others."""
        self._write(after)
        return [self.last_write] if self.last_write else []

    def _empty(self, after: str) -> None:
        """Copy the bucket into swap buffers, and write each buffer that is full. If no buffer is left, the thread waits
        for all writes."""
        bucket, self.bucket = self.bucket, []
        for numel in bucket:
            nbytes = numel * self.each
            if self.filled and self.filled + nbytes > self.buffer_bytes:
                self._write(after)
                self.free -= 1
                if self.free <= 0:
                    self.waits, self.writes = [*self.waits, *self.writes], []
                    self.free = self.step.work.optimizer_buffers
            self.filled += nbytes

    def _write(self, after: str) -> None:
        """Add the write of the current buffer, after all earlier ones."""
        if self.filled:
            self.number += 1
            before = (after, self.last_write, *self.waits)
            name = f"write gradients {self.number}"
            self.last_write = self.step.add(name, BACKWARD, {"ssd.write": self.filled}, after=before)
            self.writes.append(self.last_write)
            self.filled = 0.0

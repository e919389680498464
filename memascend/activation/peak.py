"""Simulated forward and backward pass under an offloading plan: peak of saved activations, and duration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memascend.activation.record import Plan, Record, block_of
from memascend.activation_policy import KEEP, OFFLOAD, RECOMPUTE
from memascend.simulator import Drive, Fifo, ResourceModel, SimulationResult, Task, simulate

_POOL, _AHEAD = "saved activations", "read ahead"
_MOST_TASKS = 600  # with more than a third as many regions, neighbours are merged


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """Peak bytes of saved tensors in device memory; `kept_bytes` is the peak without offloading."""

    peak_bytes: float
    kept_bytes: int
    offloaded_bytes: int
    seconds: float

    @property
    def reduction(self) -> float:
        """Fraction by which the peak is below that without offloading."""
        return 1.0 - self.peak_bytes / self.kept_bytes if self.kept_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class _Region:
    """A saved region. `seconds` of forward precede it; `block` is the name of its block, None outside of all blocks."""

    nbytes: float
    seconds: float
    policy: str
    block: str | None


def predicted_peak(
    record: Record,
    plan: Plan,
    *,
    write_bytes_per_s: float,
    read_bytes_per_s: float,
    prefetch_bytes: float,
    backward_over_forward: float = 2.0,
    policies: Mapping[str, str] | None = None,
    entry_bytes: float = 0.0,
) -> PredictedPeak:
    """Simulate one forward and backward pass with the sizes and times of `record`.

    A region enters the pool when it is saved, leaves it when it has been written, returns when it is read ahead, and
    leaves for good when backward has used it. A region whose write has not ended by then is forwarded, not read.
    `policies` maps block names to policies and replaces `plan`; regions outside of blocks are kept. A recomputed block
    leaves `entry_bytes`, its input, and everything that it saves returns before its backward. `record` must then be
    that of a pass that keeps everything.
    """
    regions = _folded(_regions(record, plan, policies))
    machine = ResourceModel(
        name="activations",
        resources={
            "device": Fifo(),
            "ssd": Drive(read=read_bytes_per_s, write=write_bytes_per_s, duplex=True),
        },
        pools={
            _POOL: float("inf"),
            _AHEAD: max(prefetch_bytes, *(r.nbytes for r in regions if r.policy == OFFLOAD), 0.0),
        },
    )
    forward = _forward(regions, entry_bytes)
    begun = simulate(forward, machine)
    written = {event.name: event.end_s for event in begun.events if event.name.startswith("write ")}
    sent = [number for number, region in enumerate(regions) if region.policy == OFFLOAD]
    # A region is forwarded if it is still being written when backward reaches it. A delay of backward lets more regions
    # be written, and then read, before that: repeat until no more are.
    read = {n for n in sent if written[f"write {n}"] <= _comes(regions, n, backward_over_forward)}
    while True:
        simulated = simulate(forward + _backward(regions, read, backward_over_forward, entry_bytes), machine)
        begins = {event.name: event.begin_s for event in simulated.events if event.resource == "device"}
        more = {n for n in sent if n not in read and written[f"write {n}"] <= begins[f"backward {n}"]}
        if not more:
            break
        read.add(max(more))  # backward reaches it first
    return PredictedPeak(
        peak_bytes=simulated.peak(_POOL),
        kept_bytes=record.bytes,
        offloaded_bytes=int(sum(region.nbytes for region in regions if region.policy == OFFLOAD)),
        seconds=_end(simulated),
    )


def _comes(regions: list[_Region], number: int, ratio: float) -> float:
    """Return when backward reaches a region, if nothing delays it."""
    behind = sum(region.seconds * (ratio + (region.policy == RECOMPUTE)) for region in regions[number + 1 :])
    return sum(region.seconds for region in regions) + behind


def _end(simulated: SimulationResult) -> float:
    """Return the time in seconds at which the device has finished."""
    return max((event.end_s for event in simulated.events if event.resource == "device"), default=0.0)


def _regions(record: Record, plan: Plan, policies: Mapping[str, str] | None) -> list[_Region]:
    """Return the record's regions with their policies, and one without bytes for the rest of forward."""
    regions: list[_Region] = []
    offloaded, last_s = 0, 0.0
    for name, nbytes, at_s in record.tensors:
        block = block_of(name)
        if policies is not None:
            policy = policies.get(block, KEEP) if block else KEEP
        else:
            goes = plan.offload_bytes is None or offloaded + nbytes <= plan.offload_bytes
            offloaded += nbytes if goes else 0
            policy = OFFLOAD if goes else KEEP
        regions.append(_Region(nbytes=float(nbytes), seconds=max(0.0, at_s - last_s), policy=policy, block=block))
        last_s = at_s
    # What follows the last region saves nothing, and its backward comes first.
    tail_s = max(0.0, record.forward_s - last_s)
    return [*regions, _Region(nbytes=0.0, seconds=tail_s, policy=KEEP, block=None)]


def _folded(regions: list[_Region]) -> list[_Region]:
    """Merge neighbours of the same block and policy if there are many; merge recomputed ones per block."""
    fold = 1 + 3 * len(regions) // _MOST_TASKS
    folded: list[_Region] = []
    for number, region in enumerate(regions):
        last = folded[-1] if folded else None
        joined = number % fold or region.policy == RECOMPUTE
        if last is not None and joined and (last.policy, last.block) == (region.policy, region.block):
            folded[-1] = replace(last, nbytes=last.nbytes + region.nbytes, seconds=last.seconds + region.seconds)
        else:
            folded.append(region)
    return folded


def _forward(regions: list[_Region], entry_bytes: float) -> list[Task]:
    """Return the forward tasks: for each region its computation, its entry into the pool, and its write."""
    tasks: list[Task] = []
    for number, region in enumerate(regions):
        before = (f"save {number - 1}",) if number else ()
        tasks.append(Task(name=f"forward {number}", phase="forward", needs={"device": region.seconds}, after=before))
        # The pool is charged when this task begins: once the region has been computed.
        left = entry_bytes if region.policy == RECOMPUTE else region.nbytes
        tasks.append(Task(name=f"save {number}", phase="forward", after=(f"forward {number}",), takes={_POOL: left}))
        if region.policy == OFFLOAD:
            tasks.append(
                Task(
                    name=f"write {number}",
                    phase="forward",
                    needs={"ssd.write": region.nbytes},
                    after=(f"save {number}",),
                    gives={_POOL: region.nbytes},
                )
            )
    return tasks


def _backward(regions: list[_Region], read: set[int], ratio: float, entry_bytes: float) -> list[Task]:
    """Return the backward tasks. Forwarded regions left the pool when their writes ended and are not counted again:
    autograd holds them until their use, which comes while they are written."""
    tasks: list[Task] = []
    last = f"save {len(regions) - 1}"
    last_read = last
    for number in range(len(regions) - 1, -1, -1):
        region = regions[number]
        after = [last]
        gives = {} if region.policy == OFFLOAD and number not in read else {_POOL: region.nbytes}
        if number in read:
            tasks.append(
                Task(
                    name=f"read {number}",
                    phase="backward",
                    needs={"ssd.read": region.nbytes},
                    after=(f"write {number}", last_read),
                    takes={_POOL: region.nbytes, _AHEAD: region.nbytes},
                )
            )
            last_read = f"read {number}"
            after.append(last_read)
            gives = {_POOL: region.nbytes, _AHEAD: region.nbytes}
        elif region.policy == RECOMPUTE:
            again, save = f"again {number}", f"save again {number}"
            tasks.append(Task(name=again, phase="backward", needs={"device": region.seconds}, after=(last,)))
            tasks.append(Task(name=save, phase="backward", after=(again,), takes={_POOL: region.nbytes}))
            after, gives = [save], {_POOL: region.nbytes + entry_bytes}
        tasks.append(
            Task(
                name=f"backward {number}",
                phase="backward",
                needs={"device": region.seconds * ratio},
                after=tuple(after),
                gives=gives,
            )
        )
        last = f"backward {number}"
    return tasks

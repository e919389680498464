"""The peak of saved activations under a plan, before it is tried: forward and backward played by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from memascend.activation.record import Plan, Record
from memascend.simulator import Fifo, Machine, Path, Played, Task, play

_POOL = "saved activations"
_MOST_TASKS = 600  # regions beyond a third of it are folded with their neighbours


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """Bytes of saved tensors in the device's memory at the worst instant; `kept_bytes` is that without offloading."""

    peak_bytes: float
    kept_bytes: int
    offloaded_bytes: int
    seconds: float

    @property
    def reduction(self) -> float:
        """Share of the saved activations that is never in memory together with the rest."""
        return 1.0 - self.peak_bytes / self.kept_bytes if self.kept_bytes else 0.0


def predicted_peak(
    record: Record,
    plan: Plan,
    *,
    write_bytes_per_s: float,
    read_bytes_per_s: float,
    prefetch_bytes: float,
    backward_over_forward: float = 2.0,
) -> PredictedPeak:
    """Play one forward and backward pass with the sizes and times of `record`.

    A region enters the pool when it is saved, leaves it when it has been written, comes back when it is read ahead and
    leaves for good when backward has used it. One whose write has not ended by then is forwarded: it is not read.
    """
    regions = _folded(record, plan)
    machine = Machine(
        name="activations",
        resources={
            "device": Fifo(),
            "ssd": Path(read=read_bytes_per_s, write=write_bytes_per_s, duplex=True),
        },
        pools={_POOL: float("inf"), "read ahead": max(prefetch_bytes, max((r[0] for r in regions), default=0.0))},
    )
    forward = _forward(regions)
    begun = play(forward, machine)
    ends = {event.name: event.end_s for event in begun.events}
    forward_s = sum(seconds for _, seconds, _ in regions)
    # When backward comes to a region, if nothing holds it up.
    comes, at = {}, forward_s
    for number in range(len(regions) - 1, -1, -1):
        comes[number] = at
        at += regions[number][1] * backward_over_forward
    read = {number for number in comes if regions[number][2] and ends[f"write {number}"] <= comes[number]}
    played = play(forward + _backward(regions, read, backward_over_forward), machine)
    return PredictedPeak(
        peak_bytes=played.peak(_POOL),
        kept_bytes=record.bytes,
        offloaded_bytes=int(sum(size for size, _, offloaded in regions if offloaded)),
        seconds=_end(played),
    )


def _end(played: Played) -> float:
    return max((event.end_s for event in played.events if event.resource == "device"), default=0.0)


def _folded(record: Record, plan: Plan) -> list[tuple[float, float, bool]]:
    """(bytes, seconds of forward before it is saved, offloaded) of each region, neighbours of one kind together."""
    regions: list[tuple[float, float, bool]] = []
    offloaded, last_s = 0, 0.0
    for _, nbytes, at_s in record.tensors:
        goes = plan.offload_bytes is None or offloaded + nbytes <= plan.offload_bytes
        offloaded += nbytes if goes else 0
        regions.append((float(nbytes), max(0.0, at_s - last_s), goes))
        last_s = at_s
    fold = 1 + 3 * len(regions) // _MOST_TASKS
    folded: list[tuple[float, float, bool]] = []
    for number, (nbytes, seconds, goes) in enumerate(regions):
        if folded and number % fold and folded[-1][2] == goes:
            folded[-1] = (folded[-1][0] + nbytes, folded[-1][1] + seconds, goes)
        else:
            folded.append((nbytes, seconds, goes))
    return folded


def _forward(regions: list[tuple[float, float, bool]]) -> list[Task]:
    tasks: list[Task] = []
    for number, (nbytes, seconds, goes) in enumerate(regions):
        before = (f"save {number - 1}",) if number else ()
        tasks.append(Task(name=f"forward {number}", phase="forward", needs={"device": seconds}, after=before))
        # Taken at its begin: when the region has been computed.
        tasks.append(Task(name=f"save {number}", phase="forward", after=(f"forward {number}",), takes={_POOL: nbytes}))
        if goes:
            tasks.append(
                Task(
                    name=f"write {number}",
                    phase="forward",
                    needs={"ssd.write": nbytes},
                    after=(f"save {number}",),
                    gives={_POOL: nbytes},
                )
            )
    return tasks


def _backward(regions: list[tuple[float, float, bool]], read: set[int], ratio: float) -> list[Task]:
    """What was forwarded gave its bytes when its write ended, and is no longer counted then: autograd holds it until
    its use, which comes within the time of that write."""
    tasks: list[Task] = []
    last = f"save {len(regions) - 1}"
    last_read = last
    for number in range(len(regions) - 1, -1, -1):
        nbytes, seconds, goes = regions[number]
        after = [last]
        gives = {} if goes and number not in read else {_POOL: nbytes}
        if number in read:
            tasks.append(
                Task(
                    name=f"read {number}",
                    phase="backward",
                    needs={"ssd.read": nbytes},
                    after=(f"write {number}", last_read),
                    takes={_POOL: nbytes, "read ahead": nbytes},
                )
            )
            last_read = f"read {number}"
            after.append(last_read)
            gives = {_POOL: nbytes, "read ahead": nbytes}
        tasks.append(
            Task(
                name=f"backward {number}",
                phase="backward",
                needs={"device": seconds * ratio},
                after=tuple(after),
                gives=gives,
            )
        )
        last = f"backward {number}"
    return tasks

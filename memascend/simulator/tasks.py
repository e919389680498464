"""Tasks: work on named resources, with the buffers that a task takes and gives back and the locks that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Task:
    """One piece of a step.

    Args:
        name: unique in a run.
        phase: the phase to which its time is attributed (forward, backward, optimizer ...).
        rank: the process that runs it; only for the trace.
        needs: work by resource: bytes or floating-point operations for a resource that has a rate, seconds where the
            rate is 1. At most one of them is a FIFO resource (a stream, a drive, the CPU optimizer), which the task
            occupies from its begin to its end; of shared resources (PCIe, DRAM, a CXL node) it uses a share.
        after: names of tasks that have to end first.
        takes: amounts of memory pools, taken when the task begins; it waits until every pool has enough.
        gives: amounts given back to pools when the task ends. One task may give back what another has taken.
        holds: locks that the task holds exclusively while it runs.
    """

    name: str
    phase: str
    rank: int = 0
    needs: Mapping[str, float] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    takes: Mapping[str, float] = field(default_factory=dict)
    gives: Mapping[str, float] = field(default_factory=dict)
    holds: tuple[str, ...] = ()


def check_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError, in one line, for a duplicate name, an unknown predecessor, or an amount not finite and >= 0."""
    names: set[str] = set()
    for task in tasks:
        if task.name in names:
            raise ValueError(f"duplicate task name {task.name!r}: names must be unique")
        names.add(task.name)
    for task in tasks:
        unknown = next((name for name in task.after if name not in names), None)
        if unknown is not None:
            raise ValueError(f"task {task.name!r} waits for {unknown!r}, which is not a task of this simulation")
        for what, amounts in (("needs", task.needs), ("takes", task.takes), ("gives", task.gives)):
            for name, amount in amounts.items():
                if not 0 <= amount < float("inf"):
                    raise ValueError(f"task {task.name!r} {what} {amount!r} of {name!r}: amounts are finite and >= 0")

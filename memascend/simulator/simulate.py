"""Simulation of a graph of tasks on a machine.

A task begins when the tasks before it have ended, its pools have the amounts that it takes, its locks are free and its
FIFO resource is idle, all at the same instant: a waiting task occupies nothing. Pools and locks are granted in the
order in which tasks became ready; a FIFO resource goes to the first ready task that can begin (a write that frees a
buffer overtakes a read that waits for one). While it runs, a task loads each of its resources at the same time, and
ends when all have served it. On a shared resource tasks get max-min fair shares; no task takes more than it would if it
were alone.

Time is continuous: rates change only when a piece of work begins or ends, so the clock jumps from one such instant to
the next. SimPy was considered: its FIFO resources and containers fit, but shares that change while a task runs have to
be built from interrupted processes, which is most of the code of this module.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memascend.simulator.machine import ResourceModel, Server
from memascend.simulator.tasks import Task, check_tasks
from memascend.simulator.trace import Event, busy_s, phase_spans

_DONE = 1e-9  # fraction of a piece of work below which the remainder is rounding error


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Result of a simulation.

    `served_s` gives, by phase and server, the seconds that the server's work takes at its full rate. `levels` gives,
    by pool, (second, amount taken) at each change.
    """

    machine: str
    seconds: float
    events: tuple[Event, ...]
    served_s: Mapping[str, Mapping[str, float]]
    levels: Mapping[str, tuple[tuple[float, float], ...]]

    def busy(self, phase: str) -> dict[str, float]:
        """Return the seconds that each resource was occupied in `phase`."""
        return busy_s(self.events).get(phase, {})

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return the (begin, end) of each phase in seconds, in the order in which they begin; phases may overlap."""
        return phase_spans(self.events)

    def bottleneck(self, phase: str | None = None) -> str:
        """Return the server with the most work in one phase or in the whole step. Raises ValueError without work."""
        totals: dict[str, float] = {}
        for name, by_server in self.served_s.items():
            if phase in (None, name):
                for server, seconds in by_server.items():
                    totals[server] = totals.get(server, 0.0) + seconds
        if not totals:
            raise ValueError(f"no work was done in phase {phase!r}; phases: {', '.join(self.served_s)}")
        return max(totals, key=lambda server: totals[server])

    def peak(self, pool: str) -> float:
        """Return the largest amount that was taken from a pool at any instant."""
        return max((amount for _, amount in self.levels[pool]), default=0.0)


@dataclass
class _Flow:
    """A task's work on one server. `cap`: units per second that it would use if the task ran alone."""

    work: str
    server: Server
    amount: float
    rate: float
    cap: float
    left: float
    speed: float = 0.0
    end_s: float | None = None


@dataclass
class _Running:
    """A task that has begun, with its work on each server."""

    task: Task
    begin_s: float
    flows: list[_Flow] = field(default_factory=list)

    def unfinished(self) -> list[_Flow]:
        """Return the work that is not done yet."""
        return [flow for flow in self.flows if flow.end_s is None]


def roofline_s(tasks: Sequence[Task], machine: ResourceModel) -> float:
    """Return the seconds that the busiest server needs at its full rate, a lower bound on any simulated time."""
    totals: dict[str, float] = {}
    for task in tasks:
        for work, amount in task.needs.items():
            server, rate = machine.serve(work)
            totals[server.name] = totals.get(server.name, 0.0) + amount / rate
    return max(totals.values(), default=0.0)


def simulate(tasks: Sequence[Task], machine: ResourceModel) -> SimulationResult:
    """Simulate `tasks` on `machine`. The same input gives the same output, bit for bit.

    Raises ValueError, in one line, for duplicate or unknown names, two FIFO resources in one task, a task that takes
    more than a pool's size, and a deadlock (naming a waiting task and what it waits for).
    """
    check_tasks(tasks)
    return _Simulation(tasks, machine).run()


class _Simulation:
    """State of one simulation: the clock, and what every task waits for, holds and has done."""

    def __init__(self, tasks: Sequence[Task], machine: ResourceModel) -> None:
        self.machine = machine
        self.tasks = list(tasks)
        self.now = 0.0
        self.taken = dict.fromkeys(machine.pools, 0.0)
        self.levels: dict[str, list[tuple[float, float]]] = {name: [(0.0, 0.0)] for name in machine.pools}
        self.busy_fifo: dict[str, str] = {}
        self.held: dict[str, str] = {}
        self.running: list[_Running] = []
        # By FIFO resource: tasks in the order in which they became ready, each with its number in that order.
        self.waiting: dict[str | None, list[tuple[int, Task]]] = {}
        self.readied = 0
        self.events: list[Event] = []
        self.served_s: dict[str, dict[str, float]] = {}
        self._serve = {work: machine.serve(work) for work in {work for task in self.tasks for work in task.needs}}
        self._fifo_of = {task.name: self._fifo(task) for task in self.tasks}
        self._check_pools_and_locks()
        self._before = {task.name: len(set(task.after)) for task in self.tasks}
        self._then: dict[str, list[Task]] = {task.name: [] for task in self.tasks}
        for task in self.tasks:
            for name in set(task.after):
                self._then[name].append(task)

    def _fifo(self, task: Task) -> str | None:
        """Return the FIFO server that a task needs, or None. Raises ValueError if it needs two."""
        names = {self._serve[work][0].name for work in task.needs if not self._serve[work][0].shared}
        if len(names) > 1:
            raise ValueError(
                f"task {task.name!r} occupies {' and '.join(sorted(names))}: a task has at most one FIFO resource, "
                "split it"
            )
        return next(iter(names), None)

    def _check_pools_and_locks(self) -> None:
        """Raise ValueError for an unknown pool or lock, or a task that takes more than its pool has."""
        for task in self.tasks:
            for pool in (*task.takes, *task.gives):
                if pool not in self.taken:
                    known = ", ".join(self.taken) or "none"
                    raise ValueError(
                        f"task {task.name!r}: machine {self.machine.name} has no pool {pool!r}; it has {known}"
                    )
            for pool, amount in task.takes.items():
                if amount > self.machine.pools[pool]:
                    raise ValueError(
                        f"task {task.name!r} takes {amount:g} of pool {pool!r}, which holds "
                        f"{self.machine.pools[pool]:g}"
                    )
            for lock in task.holds:
                if lock not in self.machine.locks:
                    known = ", ".join(self.machine.locks) or "none"
                    raise ValueError(
                        f"task {task.name!r}: machine {self.machine.name} has no lock {lock!r}; it has {known}"
                    )

    # -- the clock -----------------------------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        """Run to the end. Raises ValueError if tasks are left that can never begin."""
        for task in self.tasks:
            if not self._before[task.name]:
                self._ready(task)
        ended = 0
        self._begin_what_can()
        while self.running:
            ended += self._advance()
            self._begin_what_can()
        if ended < len(self.tasks):
            raise ValueError(self._stuck())
        return SimulationResult(
            machine=self.machine.name,
            seconds=self.now,
            events=tuple(self.events),
            served_s=self.served_s,
            levels={name: tuple(changes) for name, changes in self.levels.items()},
        )

    def _advance(self) -> int:
        """Advance the clock to the next instant at which a piece of work is done; return how many tasks ended then."""
        self._share()
        flows_by_task = [each.unfinished() for each in self.running]
        idle = not all(flows_by_task)  # tasks without work
        step = 0.0 if idle else min(flow.left / flow.speed for flows in flows_by_task for flow in flows)
        self.now += step
        still: list[_Running] = []
        ended: list[_Running] = []
        for each, flows in zip(self.running, flows_by_task, strict=True):
            left = len(flows)
            for flow in flows:
                flow.left -= flow.speed * step
                if flow.left <= _DONE * flow.amount:
                    flow.end_s = self.now
                    left -= 1
            (still if left else ended).append(each)
        self.running = still
        for each in ended:
            self._end(each)
        return len(ended)

    def _share(self) -> None:
        """Set the speeds of all work in progress: full on FIFO servers, max-min fair with caps on shared ones."""
        shared: dict[str, list[_Flow]] = {}
        for each in self.running:
            for flow in each.unfinished():
                if flow.server.shared:
                    shared.setdefault(flow.server.name, []).append(flow)
                else:
                    flow.speed = flow.rate
        for flows in shared.values():
            left = flows[0].rate
            for number, flow in enumerate(sorted(flows, key=lambda flow: flow.cap)):
                flow.speed = min(flow.cap, left / (len(flows) - number))
                left -= flow.speed

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _begin_what_can(self) -> None:
        """Begin every waiting task that can begin.

        A pool or lock that an earlier task waits for is not given to a later one, so that small requests do not starve
        a large one.
        """
        spoken_for: set[str] = set()
        # The head of each queue whose resource is idle: (rank among all ready tasks, resource, index in the queue).
        firsts = [
            (queue[0][0], fifo, 0) for fifo, queue in self.waiting.items() if queue and fifo not in self.busy_fifo
        ]
        heapq.heapify(firsts)
        while firsts:
            _, fifo, at = heapq.heappop(firsts)
            queue = self.waiting[fifo]
            task = queue[at][1]
            if (lacking := self._lacking(task, spoken_for)) is not None:
                spoken_for.add(lacking)
                at += 1
            else:
                del queue[at]
                self._begin(task)
            if at < len(queue) and (fifo is None or fifo not in self.busy_fifo):
                heapq.heappush(firsts, (queue[at][0], fifo, at))

    def _lacking(self, task: Task, spoken_for: set[str]) -> str | None:
        """Return the first pool or lock that `task` has to wait for, or None if it can begin."""
        for name, amount in task.takes.items():
            if name in spoken_for or not self._has(name, amount):
                return name
        return next((name for name in task.holds if name in spoken_for or name in self.held), None)

    def _has(self, pool: str, amount: float) -> bool:
        return self.taken[pool] + amount <= self.machine.pools[pool] * (1 + _DONE)

    def _begin(self, task: Task) -> None:
        """Begin a task now: it takes its pools, locks and FIFO server, all at once."""
        for name, amount in task.takes.items():
            self._change(name, amount)
        for name in task.holds:
            self.held[name] = task.name
        fifo = self._fifo_of[task.name]
        if fifo is not None:
            self.busy_fifo[fifo] = task.name
        self.running.append(_Running(task, self.now, self._flows(task)))

    def _flows(self, task: Task) -> list[_Flow]:
        """Return a task's work on each server, with the speed that it would have alone as its cap."""
        alone_s = max((amount / self._serve[work][1] for work, amount in task.needs.items()), default=0.0)
        flows = []
        for work, amount in task.needs.items():
            if amount > 0:
                server, rate = self._serve[work]
                flows.append(_Flow(work, server, amount, rate, amount / alone_s, amount))
        return flows

    def _end(self, each: _Running) -> None:
        """End a task now: record its events, give back what it holds, and ready the tasks that waited for it."""
        task = each.task
        for name, amount in task.gives.items():
            self._change(name, -amount)
        for name in task.holds:
            del self.held[name]
        fifo = self._fifo_of[task.name]
        if fifo is not None:
            del self.busy_fifo[fifo]
        by_server = self.served_s.setdefault(task.phase, {})
        for flow in each.flows:
            end = self.now if not flow.server.shared or flow.end_s is None else flow.end_s
            self.events.append(
                Event(
                    name=task.name,
                    phase=task.phase,
                    resource=flow.work,
                    begin_s=each.begin_s,
                    end_s=end,
                    rank=task.rank,
                    amount=flow.amount,
                )
            )
            by_server[flow.server.name] = by_server.get(flow.server.name, 0.0) + flow.amount / flow.rate
        for later in self._then[task.name]:
            self._before[later.name] -= 1
            if not self._before[later.name]:
                self._ready(later)

    def _ready(self, task: Task) -> None:
        self.waiting.setdefault(self._fifo_of[task.name], []).append((self.readied, task))
        self.readied += 1

    def _change(self, pool: str, amount: float) -> None:
        """Change the amount taken from a pool. Raises ValueError if more is released than was taken."""
        taken = self.taken[pool] + amount
        if taken < -_DONE * max(1.0, abs(amount)):
            raise ValueError(f"pool {pool!r}: {-taken:g} more is released than was acquired")
        self.taken[pool] = max(0.0, taken)
        self.levels[pool].append((self.now, self.taken[pool]))

    def _stuck(self) -> str:
        """Return the message for tasks that can never begin: a circular wait, or what the first one waits for."""
        waiting = sorted(each for queue in self.waiting.values() for each in queue)
        if not waiting:
            names = [task.name for task in self.tasks if self._before[task.name]]
            return f"circular wait between tasks: {', '.join(names[:5])}"
        task = waiting[0][1]
        reasons = [
            f"{amount:g} of pool {name!r}, of which {self.taken[name]:g} of {self.machine.pools[name]:g} are in use"
            for name, amount in task.takes.items()
            if not self._has(name, amount)
        ] + [f"lock {name!r}" for name in task.holds if name in self.held]
        return (
            f"simulation deadlock at {self.now:g} s with {len(waiting)} tasks waiting: {task.name!r} waits for "
            f"{' and '.join(reasons) or 'a resource'}, which is never released"
        )

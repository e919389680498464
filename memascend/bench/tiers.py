"""Benchmark of several paths used by one or more processes: rates, an update's pass against its formula, fairness.

A pass reads every sub-group and writes each back as soon as it has been read, with at most `held` in memory at a time.
This is the traffic of an optimizer step over several paths (MLP-Offload 3.2), without its arithmetic. A duplex path is
busy in both directions only if one sub-group is being read and another written, so it needs two sub-groups in memory.
Several processes have their own sub-groups and share the paths, either one process at a time on each path (`exclusive`)
or without coordination (`free`). With `apart` each direction is also measured alone, one sub-group per process at a
time, as in MLP-Offload's Fig. 4. With `halved`, the first path is finally limited to half its rates for that many
passes, which shows how soon the sub-groups are redistributed.

`predict` measures nothing: the simulator runs the same passes over simplex paths, each of which serves one transfer at
a time, in order of request. There it makes no difference which process a transfer belongs to, so one run stands for
both ways of sharing.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memascend.bench.rate_limit import RateLimitedTier, SharedRateLimiter, clock_of
from memascend.bench.rounds import conditions, spread
from memascend.simulator import simulate
from memascend.simulator.machine import Drive, ResourceModel
from memascend.simulator.tasks import Task
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.multi_path import MultiPathTier
from memascend.storage.open_paths import open_paths
from memascend.storage.placement import Rates, arrange, counts, update_seconds

WAYS = ("exclusive", "free")
DIRECTIONS = ("read", "write")


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Options of the benchmark.

    Each process has `groups` sub-groups of `group_bytes` each, with `held` of them in memory (None: two per path and
    one more). `repeats` passes are timed after an untimed one. `simplex` limits each path to a read and a write rate in
    bytes per second; both directions share the path (`memascend.bench.rate_limit`). `halved` is the number of passes
    after the first such path has been slowed down.
    """

    paths: tuple[str, ...]
    processes: tuple[int, ...] = (1,)
    groups: int = 12
    group_bytes: int = 32 << 20
    held: int | None = None
    repeats: int = 3
    simplex: tuple[tuple[float, float], ...] | None = None
    apart: bool = False
    halved: int = 0

    @property
    def in_memory(self) -> int:
        """Sub-groups in memory at a time: two per path and one more by default."""
        return self.held or 2 * len(self.paths) + 1


def measure(options: TierOptions) -> dict[str, Any]:
    """Run the benchmark; return points and a summary row for each number of processes and way of sharing.

    `rates` are those of the options, or those that the first process has measured for each path, one direction at a
    time.
    """
    rows, rates, points, apart, halved = [], {}, [], [], []
    for processes in options.processes:
        for way in WAYS if processes > 1 else WAYS[1:]:
            workers = _run(options, processes, exclusive=way == "exclusive")
            rates = rates or _limits(options) or workers[0]["rates"]
            seconds = [max(worker["seconds"][n] for worker in workers) for n in range(options.repeats)]
            points.append(_point(processes, way, seconds, [worker["seconds"] for worker in workers]))
            rows.append(_row(options, processes, way, workers, rates, seconds))
            if options.apart and way == "free":
                apart += [_apart(options, workers, direction) for direction in DIRECTIONS]
            if options.halved:
                halved.append(_halved(options, processes, way, workers))
    return _facts(options) | {"rates": rates, "points": points, "summary": rows, "apart": apart, "halved": halved}


def _limits(options: TierOptions) -> dict[str, list[float]]:
    """Return the rates to which the options limit each path; an empty dict if they do not."""
    return {path: list(rates) for path, rates in zip(options.paths, options.simplex or (), strict=False)}


def _facts(options: TierOptions) -> dict[str, Any]:
    """Return the conditions of the benchmark, for its result."""
    asked = {"groups": options.groups, "group_bytes": options.group_bytes, "held": options.in_memory}
    facts = {"benchmark": "tiers", "conditions": conditions() | asked | {"simplex": options.simplex}}
    return facts | {"paths": list(options.paths)}


def predict(options: TierOptions) -> dict[str, Any]:
    """Return the result of `measure` as simulated for paths with the rates `simplex`; the paths need not exist."""
    rates, rows, points = _limits(options), [], []
    for processes in options.processes:
        each = [[seconds] for seconds in _played(options, processes)]
        for way in WAYS if processes > 1 else WAYS[1:]:
            points.append(_point(processes, way, max(each), each))
            rows.append(_row(options, processes, way, [{"seconds": one} for one in each], rates, max(each)))
    return _facts(options) | {"lane": "modelled", "rates": rates, "points": points, "summary": rows, "apart": []}


def _point(processes: int, way: str, seconds: list[float], of_each: list[list[float]]) -> dict[str, Any]:
    return {"method": f"{processes} processes, {way}", "seconds": seconds, "seconds_of_each": of_each}


def _played(options: TierOptions, processes: int) -> list[float]:
    """Return the simulated seconds of each process's pass."""
    names = [f"path{number}" for number in range(len(options.paths))]
    drives = {name: Drive(read=read, write=write) for name, (read, write) in zip(names, options.simplex, strict=True)}
    rates = [Rates(*each) for each in options.simplex]
    places = arrange({str(n): options.group_bytes for n in range(options.groups)}, "balanced", rates)
    tasks = []
    for group in range(options.groups):
        path = names[places[str(group)]]
        for rank in range(processes):
            read, write = (f"{direction} {rank}.{group}" for direction in DIRECTIONS)
            common = {"rank": rank, "phase": "pass"}
            needs = [{f"{path}.{direction}": options.group_bytes} for direction in DIRECTIONS]
            tasks.append(Task(name=read, needs=needs[0], takes={f"slots{rank}": 1}, **common))
            tasks.append(Task(name=write, needs=needs[1], after=(read,), gives={f"slots{rank}": 1}, **common))
    slots = {f"slots{rank}": options.in_memory for rank in range(processes)}
    events = simulate(tasks, ResourceModel(name="paths", resources=drives, pools=slots)).events
    return [max(event.end_s for event in events if event.rank == rank) for rank in range(processes)]


def _apart(options: TierOptions, workers: list[dict[str, Any]], direction: str) -> dict[str, Any]:
    """Return, by repeat, the total bandwidth (by the slowest process's time) and the mean time of a sub-group."""
    mine = list(zip(*(worker["apart"][direction] for worker in workers), strict=True))
    moved = len(workers) * options.groups * options.group_bytes
    return {
        "processes": len(workers),
        "direction": direction,
        "bytes_per_second": [moved / max(each) for each in mine],
        "latency_s": [sum(each) / len(each) / options.groups for each in mine],
    }


def _halved(options: TierOptions, processes: int, way: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return data on each pass after the first path was slowed down.

    These are its seconds, the fraction of the formula's rate that it reached with the new rates, and the number of
    sub-groups on the first path at its end.
    """
    (read, write), *others = options.simplex
    rates = [Rates(read / 2, write / 2), *(Rates(*each) for each in others)]
    seconds = [max(each) for each in zip(*(worker["halved"] for worker in workers), strict=True)]
    formula = _formula(options, processes, rates, duplex=False)
    groups = [sum(each) for each in zip(*(worker["groups_of_first"] for worker in workers), strict=True)]
    shares = [formula / each for each in seconds]
    found = {"seconds": seconds, "share_of_formula": shares, "groups_of_first": groups}
    return {"processes": processes, "way": way, "path": options.paths[0]} | found


def _formula(options: TierOptions, processes: int, rates: Sequence[Rates], duplex: bool) -> float:
    """Return the seconds of a pass according to the update formula, for the paths' rates and equal sub-groups."""
    load_bytes = [n * options.group_bytes for n in counts(processes * options.groups, "balanced", rates)]
    return update_seconds(load_bytes, rates, duplex=duplex)


def _row(
    options: TierOptions,
    processes: int,
    way: str,
    workers: list[dict[str, Any]],
    rates: dict[str, list[float]],
    seconds: list[float],
) -> dict[str, Any]:
    """Return the summary row of one number of processes and way of sharing.

    `bytes_per_second` counts the reads and writes of all processes. `share_of_formula` compares with the formula for
    the same number of equal sub-groups at `rates`.
    """
    whole = [Rates(*rates[path]) for path in options.paths]
    bounds = {name: _formula(options, processes, whole, duplex=name == "duplex") for name in ("simplex", "duplex")}
    moved = 2 * processes * options.groups * options.group_bytes
    each = [sum(worker["seconds"]) for worker in workers]
    return {
        "processes": processes,
        "way": way,
        "seconds": vars(spread(seconds)),
        "bytes_per_second": moved / spread(seconds).median,
        "share_of_formula": {name: bound / spread(seconds).median for name, bound in bounds.items()},
        "fairness": min(each) / max(each),  # of the processes' own times
        "groups_by_path": [worker.get("groups") for worker in workers],
    }


def _run(options: TierOptions, processes: int, *, exclusive: bool) -> list[dict[str, Any]]:
    """Run the worker processes and return their results. All start each pass together, once every one is ready."""
    asked = json.dumps(
        {
            "paths": options.paths,
            "groups": options.groups,
            "group_bytes": options.group_bytes,
            "held": options.in_memory,
            "repeats": options.repeats,
            "exclusive": exclusive,
            "simplex": options.simplex,
            "apart": options.apart and not exclusive,
            "halved": options.halved,
        }
    )
    command = [sys.executable, "-m", "memascend.bench.tiers", asked]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    try:
        passes = 1 + len(DIRECTIONS) * (options.apart and not exclusive)
        for _ in range(passes * (options.repeats + 1) + options.halved):
            for child in children:
                _hear(child)
            for child in children:
                child.stdin.write("go\n")
                child.stdin.flush()
        return [json.loads(_hear(child)) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
        for path in options.paths if options.simplex else ():
            clock_of(path).unlink(missing_ok=True)


def _hear(child: subprocess.Popen[str]) -> str:
    """Return the next line of a worker. Raises RuntimeError if it has ended."""
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the benchmark ended with status {child.wait()}: see its error above")
    return line


def _worker(asked: dict[str, Any]) -> None:
    """Run the passes of one process and print its result; the parent starts each pass. `asked` is from `_run`."""
    torch.set_num_threads(1)
    buffers = [torch.empty(asked["group_bytes"], dtype=torch.uint8).fill_(number) for number in range(asked["held"])]
    config = DirectEngineConfig(workers=1, depth=32, volatile=True)
    drives = {path: SharedRateLimiter(clock_of(path), *rates) for path, rates in _limited(asked)}
    around = (lambda path, tier: RateLimitedTier(tier, drives[path])) if drives else None
    with open_paths(
        asked["paths"], "memascend bench", config=config, exclusive=asked["exclusive"], around=around
    ) as tier:
        rates = {each.name: [each.rates.read, each.rates.write] for each in tier.report()}
        for buffer in buffers:
            tier.register(buffer)
        for group in range(asked["groups"]):
            tier.write(str(group), buffers[group % len(buffers)])
        tier.wait()
        ways: dict[str, Callable[[], None]] = {"both": lambda: _pass(tier, asked["groups"], buffers)}
        for name, move in {"read": tier.read, "write": tier.write}.items() if asked["apart"] else ():
            ways[name] = partial(_one_by_one, move, asked["groups"], buffers[0])
        seconds = {name: [_timed(way) for _ in range(asked["repeats"] + 1)][1:] for name, way in ways.items()}
        groups = {each.name: each.groups for each in tier.report()}
        after: list[tuple[float, int]] = []
        for number in range(asked["halved"]):
            if not number:
                drives[asked["paths"][0]].limit(*(rate / 2 for rate in asked["simplex"][0]))
            after.append((_timed(ways["both"]), tier.report()[0].groups))
    found = {"rates": rates, "seconds": seconds.pop("both"), "apart": seconds, "groups": groups}
    found |= {"halved": [each[0] for each in after], "groups_of_first": [each[1] for each in after]}
    print(json.dumps(found), flush=True)


def _timed(way: Callable[[], None]) -> float:
    """Wait until the parent starts all processes together, run `way`, and return its seconds."""
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def _one_by_one(move: Callable[[str, torch.Tensor], Any], groups: int, buffer: torch.Tensor) -> None:
    """Move every sub-group through one buffer, waiting for each."""
    for group in range(groups):
        move(str(group), buffer).wait()


def _limited(asked: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Return the (path, rates) pairs that the options limit; empty without limits."""
    return list(zip(asked["paths"], asked["simplex"], strict=True)) if asked["simplex"] else []


def _pass(tier: MultiPathTier, groups: int, buffers: Sequence[torch.Tensor]) -> None:
    """Read and write back every sub-group; whichever buffer becomes free first takes the next one."""
    free: queue.SimpleQueue[tuple[torch.Tensor, BaseException | None]] = queue.SimpleQueue()
    for buffer in buffers:
        free.put((buffer, None))
    for group in [*map(str, range(groups)), *[None] * len(buffers)]:
        buffer, error = free.get()
        if error is not None:
            raise error
        if group is not None:
            written = tier.read(group, buffer).then(lambda _, key=group, buffer=buffer: tier.write(key, buffer))
            written.add_done_callback(lambda end, buffer=buffer: free.put((buffer, end.error())))
    tier.observe()  # as training does after an update


if __name__ == "__main__":
    _worker(json.loads(sys.argv[1]))

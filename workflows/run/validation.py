"""Compare the simulator with measured steps of this machine, phase by phase.

The SSDs are drives of known speed (`memascend.bench.rate_limit`) with a rate for each direction, and the simulator uses
these rates; MLP-Offload has two drives, all others the first. The seconds that the training thread computes come from
smaller models: the same system trains a quarter and half of the blocks at each size (fewer blocks fit into the caches
and say nothing about more) on a drive without a limit. The thread's waits are subtracted, and a line through the number
of blocks gives the seconds of each block (its slope) and those outside the blocks. The same runs say how long a hook of
DeepSpeed computes before it begins to read ahead. Rates of memory, copies and AdamW are micro-benchmarks. No rate is
taken from a judged step. The measurement takes an hour, in which the machine has to be free of other work. With
`--folder` the traces are kept, and existing ones are not measured again. `--record` judges the measurements of an
earlier record again, with the current simulator.

A phase is the time that the training thread spends in it. A simulated phase therefore ends with its last products, and
the last phase with the step, while transfers continue in the next phase. A phase that is not simulated (the update of a
system that keeps its states on the device) is in no row and in no step. Where updates are simulated in the backward
pass, updates after it count as backward.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from memascend.doctor.speed import memory_speed
from memascend.memory.heap import MALLOC
from memascend.planner import model_spec
from memascend.planner.derived_sizes import cached_sub_group_buffers, cached_sub_groups_for
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.pieces import forward_flops
from memascend.planner.step_time import StepTime, step_time
from memascend.planner.workload import SwapSizes
from memascend.simulator import read_trace
from memascend.simulator.recorder import CPU, DEVICE, READ, WAIT
from memascend.simulator.side_by_side import StepOf, step_of_trace
from memascend.training.config import TrainConfig
from memascend.training.prepare import workload_of_run
from workflows import staleness
from workflows.refusals import ready
from workflows.run import children, provenance

Run = tuple[str, str]  # system, arm
Point = tuple[int, int, int]  # k of the twin, tokens per sequence, sequences

# (system, arm) -> further options of `memascend train`. DeepSpeed's pipelined swapper is an arm of MLP-Offload.
RUNS: dict[Run, dict[str, Any]] = {
    ("zero_infinity", "as_published"): {},
    ("mlp_offload", "zero3"): {},
    ("memascend", "memascend"): {},
    ("zero_offload", "today"): {},
    ("cxl", "cxl_aware"): {},
    ("lohan", "optimized"): {},
    ("mlp_offload", "mlp_offload"): {"tiers": 2},
    ("ssdtrain", "ssdtrain"): {"checkpointing": "ssd", "activations": "all"},
}
# DeepSpeed's configuration of the pipelined arm has as many buffers as MLP-Offload's (baselines/mlp_offload/system.py).
SIZES = {
    ("mlp_offload", "zero3"): SwapSizes(optimizer_buffers=cached_sub_group_buffers(False, cached_sub_groups_for(2)))
}
UPDATES_IN_BACKWARD = ("lohan", "optimized")
IN_MEMORY = (("zero_offload", "today"), ("cxl", "cxl_aware"))  # they move nothing to a drive
PHASES = ("forward", "backward", "optimizer")
MODEL, DTYPE = "llama3.2-1b", "bf16"
POINTS: tuple[Point, ...] = ((8, 256, 2), (4, 32, 1), (4, 256, 2))  # second: bound by storage; third: by products
BLOCKS = (4, 8)  # blocks of the smaller models; the judged models have 16
ROUNDS = ("before", "after")  # smaller models run minutes before and after the judged steps, since machines drift
LEAST_S = 1e-6  # least seconds of a block in a phase, where noise gives less than zero
STEPS = 6  # the first is not counted
DRIVES = {"faster": 1.0, "slower": 0.5}  # name -> factor on the rates of PATHS
PATHS = [{"name": "path0", "read_gb_per_s": 0.6, "write_gb_per_s": 0.45, "duplex": True}]
PATHS += [{"name": "path1", "read_gb_per_s": 0.3, "write_gb_per_s": 0.225, "duplex": True}]
_ADAM_NUMEL = 30_000_000
_TEXT = Path(sysconfig.get_paths()["stdlib"]) / "json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-id", default="", metavar="ID", help="id of the run (default: the name of --out)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="folder that keeps rates and traces")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record to judge again: nothing is measured")
    args = parser.parse_args(argv)
    if args.record and args.folder:
        raise ValueError("--record measures nothing, and --folder keeps what is measured: leave one of them out")
    if args.record:
        ready(args.out.parent, "--out")
        return _written(args.out, args.run_id, judge_again(args.record))
    if MALLOC.items() - os.environ.items():  # benchmarks use the same allocator settings as training
        os.execve(
            sys.executable, [sys.executable, "-m", "workflows.run.validation", *sys.argv[1:]], os.environ | MALLOC
        )
    ready(args.out.parent, "--out")
    place = Path(os.environ.get("MEMASCEND_NVME", "nvme")).absolute()
    with contextlib.nullcontext(args.folder) if args.folder else children.scratch_folder(place) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder.absolute())
        found = judge(folder)
    return _written(args.out, args.run_id, found)


def _written(out: Path, run_id: str, found: dict[str, Any]) -> int:
    code = staleness.digest("workflows.run.validation", sorted({system for system, _ in RUNS}), [MODEL])
    provenance.write_record(out, run_id or out.stem, "simulation-validation", code, found)
    print(as_text(found))
    return 0


# -- what is measured --------------------------------------------------------------------------------------------------


def measure(folder: Path) -> None:
    """Measure the rates, then for each case the judged steps, before and after which its smaller models run."""
    if not (folder / "rates.json").exists():
        (folder / "rates.json").write_text(json.dumps(rates_here(), indent=1) + "\n")
    paths = [folder / "drives" / path["name"] for path in PATHS]
    for run, point in itertools.product(RUNS, POINTS):
        smaller_models(folder, paths, run, point, ROUNDS[0])
        for drive in drives_of(run):
            rates = [[1e9 * float(path[f"{way}_gb_per_s"]) for way in ("read", "write")] for path in paths_of(drive)]
            train(folder, dict(zip(paths, rates, strict=True)), run, point, drive, MODEL)
        smaller_models(folder, paths, run, point, ROUNDS[1])


def smaller_models(folder: Path, paths: list[Path], run: Run, point: Point, when: str) -> None:
    """Train the smaller models on a drive without a limit; they give the seconds that the training thread computes."""
    for blocks in BLOCKS:
        train(folder, dict.fromkeys(paths), run, point, f"{blocks}-{when}", _fewer_blocks(folder, blocks))


def paths_of(drive: str) -> list[dict[str, Any]]:
    """Return the paths with the rates of a drive."""
    return [
        path | {key: DRIVES[drive] * float(path[key]) for key in ("read_gb_per_s", "write_gb_per_s")} for path in PATHS
    ]


def drives_of(run: Run) -> list[str]:
    """Return the names of the drives that a run is measured on."""
    return [*DRIVES][:1] if run in IN_MEMORY else [*DRIVES]


def traces_of(folder: Path, run: Run, point: Point, called: str) -> list[Path]:
    """Return the trace files; `called` is a drive, or a smaller model's number of blocks and when it was trained."""
    k, context, batch = point
    name = f"{'-'.join(run)}-k{k}-c{context}-b{batch}-{called}"
    return [folder / f"{name}-{step}.json" for step in range(2, STEPS + 1)]


def train_options(run: Run, point: Point, model: str) -> dict[str, Any]:
    """Return the options of `memascend train`."""
    k, context, batch = point
    sizes = {"twin": k, "context": context, "batch": batch, "steps": STEPS, "eval_sequences": 0, "clip": 0.0}
    text = {"data": [str(_TEXT)], "files": "*.py"}
    more = {name: value for name, value in RUNS[run].items() if name != "tiers"}
    return {"model": model, "dtype": DTYPE, "system": run[0], "arm": run[1], **text, **sizes, **more}


def train(folder: Path, paths: dict[Path, list[float] | None], run: Run, point: Point, called: str, model: str) -> None:
    """Train by `memascend train` and keep the trace of each step but the first; existing traces are kept. `paths` has
    the bytes per second that each reads and writes, None: no limit. The training is stopped after the last trace,
    because the checkpoint that would follow takes as long as the steps."""
    *_, last = traces = traces_of(folder, run, point, called)
    if _is_whole(last):
        return
    name, output = traces[0].stem.removesuffix("-2"), folder / "run"
    drives = {path.parent for path in paths}  # the rate limiter keeps a file next to the path
    for left in (output, *drives):  # left by a call that was killed
        shutil.rmtree(left, ignore_errors=True)
    for path in paths:
        path.mkdir(parents=True)
    keys = train_options(run, point, model) | {"output": output, "trace": folder / f"{name}-{{step}}.json"}
    keys |= {"tiers": [*paths]} if RUNS[run].get("tiers") else {"nvme": next(iter(paths))}
    limits = {str(path): rates for path, rates in paths.items() if rates}
    command = [sys.executable, "-m", "workflows.run.rate_limited_train", json.dumps(limits)]
    for key, value in keys.items():
        command += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training:
        while training.poll() is None and not _is_whole(last):
            time.sleep(0.1)
        for number in (signal.SIGTERM, signal.SIGINT):  # the second signal quits at once
            training.send_signal(number)
    if not _is_whole(last):
        raise subprocess.CalledProcessError(training.returncode, command)
    for left in (output, *drives):
        shutil.rmtree(left)


def _is_whole(trace: Path) -> bool:
    try:
        read_trace(trace)
    except ValueError:
        return False
    return True


def _fewer_blocks(folder: Path, blocks: int) -> str:
    """Write the model with this many blocks as a folder that `memascend train` accepts, and return the folder."""
    made = folder / f"model-{blocks}"
    made.mkdir(exist_ok=True)
    config = dataclasses.replace(model_spec(MODEL), layers=blocks).hf_config_dict()
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def rates_here() -> dict[str, Any]:
    """Run the micro-benchmarks, and return them with their conditions."""
    import torch

    from memascend.engine.swap import link_rate

    return {
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "memory_bytes_per_s": memory_speed(),
        "copy_bytes_per_s": link_rate(torch.device("cpu")),
        "adamw_bytes_per_s": adamw_rate(),
    }


def adamw_rate() -> float:
    """Return bytes per second of DeepSpeed's AdamW over fp32 states (28 per element), by `memascend bench adamw`."""
    command = [sys.executable, "-m", "memascend.cli", "bench", "adamw", "--json"]
    command += ["--numels", str(_ADAM_NUMEL), "--repeats", "5"]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    point = next(each for each in done["points"] if each["method"] == "deepspeed")
    return point["bytes"] / statistics.median(point["seconds"])


def steps_of(folder: Path, run: Run, point: Point, called: str) -> list[StepOf]:
    """Return the summaries of the traced steps."""
    return [step_of_trace(*read_trace(trace)) for trace in traces_of(folder, run, point, called)]


def seconds_of(folder: Path, run: Run, point: Point, drive: str, phases: Collection[str]) -> dict[str, float]:
    """Return the median seconds of each of the phases, and of their sum."""
    steps = [step.phase_s for step in steps_of(folder, run, point, drive)]
    if run == UPDATES_IN_BACKWARD:
        steps = [step | {"backward": step["backward"] + step.get("optimizer", 0.0)} for step in steps]
    steps = [{phase: step.get(phase, 0.0) for phase in phases} for step in steps]
    steps = [step | {"step": sum(step.values())} for step in steps]
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def host_seconds(folder: Path, run: Run, point: Point) -> dict[str, dict[str, float]]:
    """Return phase -> seconds of the training thread without its waits, per block and outside the blocks.

    For a system whose updates run in another thread, `optimizer` is what that thread computes.
    """
    found = {}
    for phase in PHASES:
        few, many = (
            statistics.median(
                _computing(run, step, phase)
                for when in ROUNDS
                for step in steps_of(folder, run, point, f"{blocks}-{when}")
            )
            for blocks in BLOCKS
        )
        each = max(LEAST_S, (many - few) / (BLOCKS[1] - BLOCKS[0]))
        hook = hook_seconds(folder, run, point, phase)
        found[phase] = {"each_block": each, "outside": max(0.0, few - BLOCKS[0] * each), "hook": hook}
    return found


def hook_seconds(folder: Path, run: Run, point: Point, phase: str) -> float:
    """Return the seconds that the thread computes after its last wait, before it begins to read the next weights: the
    lower quartile, because modules without a wait in between make this time longer. 0 if nothing is read."""
    passed = []
    for called in (f"{blocks}-{when}" for blocks in BLOCKS for when in ROUNDS):
        for trace in traces_of(folder, run, point, called):
            events = [event for event in read_trace(trace)[0] if event.phase == phase]
            computing = sorted((event.begin_s, event.end_s) for event in events if event.resource == DEVICE)
            for read in (event for event in events if event.resource == READ):
                within = [begin for begin, end in computing if begin <= read.begin_s <= end]
                passed += [read.begin_s - within[-1]] if within else []
    return sorted(passed)[len(passed) // 4] if passed else 0.0


def _computing(run: Run, step: StepOf, phase: str) -> float:
    if run == UPDATES_IN_BACKWARD and phase == "optimizer":
        return sum(busy.get(CPU, 0.0) for busy in step.busy_s.values())
    return step.phase_s.get(phase, 0.0) - step.busy_s.get(phase, {}).get(WAIT, 0.0)


# -- what is simulated -------------------------------------------------------------------------------------------------


def measured_machine(found: dict[str, Any], flops_per_s: float, **storage: Any) -> tuple[MachineSpec, Calibrations]:
    """Return this machine as its micro-benchmarks describe it; `storage` sets further fields."""
    machine = MachineSpec(
        name="local",
        gpu_flops_per_s=flops_per_s,
        pcie_bytes_per_s=found["copy_bytes_per_s"],
        memory_bytes_per_s=found["memory_bytes_per_s"],
        **storage,
    )
    adam = found["adamw_bytes_per_s"] / found["memory_bytes_per_s"]
    return machine, Calibrations(gpu_efficiency=1.0, host_seconds_per_parameter=0.0, adam_memory_efficiency=adam)


def block_flops_per_s(point: Point, host: dict[str, dict[str, float]]) -> float:
    """Return the FLOP per second of the products of one block in the forward pass."""
    spec, (_, context, batch) = model_spec(MODEL).twin(point[0]), point
    outside = 2.0 * batch * context * spec.vocab * spec.hidden
    return (forward_flops(spec, batch, context) - outside) / spec.layers / host["forward"]["each_block"]


def simulated(found: dict[str, Any], run: Run, point: Point, drive: str, host: dict[str, dict[str, float]]) -> StepTime:
    """Simulate a step of a run on this machine, with the thread's seconds from the smaller models (`host`)."""
    k, context, _ = point
    paths = paths_of(drive)
    storage: dict[str, Any] = {
        f"ssd_{way}_bytes_per_s": 1e9 * float(paths[0][f"{way}_gb_per_s"]) for way in ("read", "write")
    }
    storage |= {"described": {"paths": paths} if RUNS[run].get("tiers") else {"ssd_duplex": True}}
    machine, costs = measured_machine(found, block_flops_per_s(point, host), **storage)
    spec = model_spec(MODEL).twin(k)
    work = workload_of_run(TrainConfig(**train_options(run, point, MODEL)), spec, context)
    again = 1 if work.stack.checkpoints else 0
    update = host["optimizer"]
    costs = dataclasses.replace(
        costs,
        backward_products=max(0.0, host["backward"]["each_block"] / host["forward"]["each_block"] - again),
        output_s={phase: host[phase]["outside"] for phase in ("forward", "backward")},
        hook_s={phase: host[phase].get("hook", 0.0) for phase in ("forward", "backward")},
        adam_memory_efficiency=math.inf,  # AdamW is part of the seconds of the update
        own_s={"optimizer": spec.layers * update["each_block"] + update["outside"]},
    )
    return step_time(dataclasses.replace(work, sizes=SIZES.get(run, work.sizes)), machine, calibrations=costs)


def thread_seconds(made: StepTime) -> dict[str, float]:
    """Return the seconds that the training thread spends in each simulated phase, and those of the step."""
    names = [phase.name for phase in made.phases]
    ends = [
        max(event.end_s for event in made.simulated.events if (event.phase, event.resource) == (name, DEVICE))
        for name in names[:-1]
    ]
    begins = [0.0, *ends]
    seconds = {name: end - begin for name, begin, end in zip(names, begins, [*ends, made.seconds], strict=True)}
    return seconds | {"step": made.seconds}


def judge(folder: Path) -> dict[str, Any]:
    """Return the simulated and measured seconds of each phase, and how far apart they are."""
    found = json.loads((folder / "rates.json").read_text())
    hosts = {(run, point): host_seconds(folder, run, point) for run in RUNS for point in POINTS}
    return _judged(found, hosts, functools.partial(seconds_of, folder)) | {"repeated": repeated(folder)}


def repeated(folder: Path) -> dict[str, dict[str, float]]:
    """Return by how many percent the smaller models compute longer after the judged steps than before: the effect of
    drift. Given for the forward and backward pass, and for the sum of a step's phases."""
    apart: dict[str, list[float]] = {"phases": [], "steps": []}
    for run in RUNS:
        for point in POINTS:
            for blocks in BLOCKS:
                before, after = (
                    [statistics.median(_computing(run, step, phase) for step in steps) for phase in PHASES]
                    for steps in (steps_of(folder, run, point, f"{blocks}-{when}") for when in ROUNDS)
                )
                apart["phases"] += [100 * (b / a - 1) for a, b in zip(before[:2], after[:2], strict=True)]
                apart["steps"].append(100 * (sum(after) / sum(before) - 1))
    return {what: _distribution(each) for what, each in apart.items()}


def judge_again(record: Path) -> dict[str, Any]:
    """Judge the measurements of an earlier record; `measured` says when they were made. ValueError for another kind."""
    try:
        read = json.loads(record.read_text())
        hosts = {_run_and_point(each): {phase: each[phase] for phase in PHASES} for each in read["host_s"]}
        kept = {(*_run_and_point(row), row["drive"], row["phase"]): row["measured_s"] for row in read["rows"]}
        when = read.get("measured") or {name: read[name] for name in ("commit", "dirty", "started_at")}
        found = {name: value for name, value in read["rates"].items() if name != "points"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{record}: not a record of this program ({type(error).__name__}: {error})") from None

    def measured(run: Run, point: Point, drive: str, phases: Collection[str]) -> dict[str, float]:
        lacking = [phase for phase in phases if (run, point, drive, phase) not in kept]
        if lacking:
            name = f"{'-'.join(run)}, k = {point[0]}, {drive}"
            raise ValueError(f"{record} has no {lacking[0]} of {name}, which is simulated now: measure it again")
        return {phase: kept[run, point, drive, phase] for phase in (*phases, "step")}

    again = _judged(found, hosts, measured) | {"measured": when}
    return again | ({"repeated": read["repeated"]} if "repeated" in read else {})


def _run_and_point(row: dict[str, Any]) -> tuple[Run, Point]:
    return (row["system"], row["arm"]), (row["k"], row["context"], row["batch"])


def _judged(
    found: dict[str, Any],
    hosts: dict[tuple[Run, Point], dict[str, dict[str, float]]],
    measured: Callable[[Run, Point, str, Collection[str]], dict[str, float]],
) -> dict[str, Any]:
    rows = [
        row
        for (run, point), host in hosts.items()
        for drive in drives_of(run)
        for row in _rows(measured, found, run, point, drive, host)
    ]
    plain = ("mlp_offload", "zero3")  # its forward pass is PyTorch's and DeepSpeed's alone
    found["points"] = [
        dict(zip(("k", "context", "batch"), point, strict=True))
        | {"block_flops_per_s": block_flops_per_s(point, hosts[plain, point])}
        for point in POINTS
    ]
    return {
        "model": MODEL,
        "dtype": DTYPE,
        "rates": found,
        "drives": {drive: paths_of(drive) for drive in DRIVES},
        "host_s": [{**_named(run, point), **host} for (run, point), host in hosts.items()],
        "rows": rows,
        "phases": _distribution([row["error_percent"] for row in rows if row["phase"] != "step"]),
        "steps": _distribution([row["error_percent"] for row in rows if row["phase"] == "step"]),
    }


def _named(run: Run, point: Point) -> dict[str, Any]:
    return dict(zip(("system", "arm", "k", "context", "batch"), (*run, *point), strict=True))


def _rows(
    measured: Callable[[Run, Point, str, Collection[str]], dict[str, float]],
    found: dict[str, Any],
    run: Run,
    point: Point,
    drive: str,
    host: dict[str, dict[str, float]],
) -> Iterator[dict[str, Any]]:
    said = thread_seconds(simulated(found, run, point, drive, host))
    took = measured(run, point, drive, [phase for phase in said if phase != "step"])
    for phase, seconds in said.items():
        yield {
            **_named(run, point),
            "drive": drive,
            "phase": phase,
            "simulated_s": seconds,
            "measured_s": took[phase],
            "error_percent": 100 * (seconds / took[phase] - 1),
        }


def _distribution(errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "count": len(errors),
        "lowest_percent": min(errors),
        "median_percent": statistics.median(errors),
        "highest_percent": max(errors),
        "half_within_percent": statistics.median(sizes),
        "nine_of_ten_within_percent": sizes[math.ceil(0.9 * len(sizes)) - 1],
    }


def as_text(record: dict[str, Any]) -> str:
    """Return a line for each judged phase, and the distributions of the errors."""
    lines = [f"{'':<60}{'simulated':>10}{'measured':>10}{'error':>8}"]
    for row in record["rows"]:
        name = (
            f"{row['system']} {row['arm']} k={row['k']} {row['batch']} x {row['context']} {row['drive']} {row['phase']}"
        )
        lines.append(f"{name:<60}{row['simulated_s']:>10.3f}{row['measured_s']:>10.3f}{row['error_percent']:>7.0f}%")
    for what in ("phases", "steps"):
        spread = record[what]
        lines.append(
            f"{what}: {spread['count']} errors, {spread['lowest_percent']:.0f} to {spread['highest_percent']:.0f} %, "
            f"median {spread['median_percent']:.0f} %, half within {spread['half_within_percent']:.0f} %, "
            f"nine of ten within {spread['nine_of_ten_within_percent']:.0f} %"
        )
    for what, spread in record.get("repeated", {}).items():
        lines.append(
            f"the same computing again, {what}: half within {spread['half_within_percent']:.0f} %, "
            f"nine of ten within {spread['nine_of_ten_within_percent']:.0f} %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(provenance.program("validation", main))

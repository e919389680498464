"""Compare the simulator with measured steps of this machine, phase by phase.

The SSDs are loop devices that the kernel holds to a rate in each direction, and these are their rates; MLP-Offload has
both, all others the first. Other rates come from micro-benchmarks alone: a decoder block by itself for the device,
output matrix and loss by themselves, AdamW's benchmark, a try of memory; and for what the runtime takes for itself the
same system on a model so small that this is most of its step, less what is simulated for it. Never from the steps that
are judged. A phase that is not simulated (the update of a system that keeps its states on the device) is in no row, and
in no step; where updates are simulated in the backward pass, those that are left after it count as backward. `--stage
rates` and `--stage steps` measure (keep the machine free of other work, three minutes each), `--stage judge` simulates
and writes the record.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hardware.throttled import throttled_paths
from memascend.doctor.speed import memory_speed
from memascend.memory.heap import MALLOC
from memascend.planner import model_spec
from memascend.planner.derived_sizes import cached_sub_group_buffers, cached_sub_groups_for
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.step_time import step_time
from memascend.planner.workload import SwapSizes
from memascend.simulator import read_trace
from memascend.simulator.side_by_side import step_of_trace
from memascend.training.config import TrainConfig
from memascend.training.prepare import workload_of_run

Run = tuple[str, str]  # system, arm

# (system, arm) -> what else `memascend train` is told. DeepSpeed's pipelined swapper is an arm of MLP-Offload's.
RUNS: dict[Run, dict[str, Any]] = {
    ("zero_infinity", "as_published"): {},
    ("mlp_offload", "zero3"): {},
    ("memascend", "memascend"): {},
    ("zero_offload", "today"): {},
    ("cxl", "cxl_aware"): {},
    ("lohan", "optimized"): {},
    ("mlp_offload", "mlp_offload"): {"tiers": ["path0", "path1"]},
    ("ssdtrain", "ssdtrain"): {"checkpointing": "ssd", "activations": "all"},
}
# DeepSpeed's configuration of the pipelined arm has as many buffers as MLP-Offload's (baselines/mlp_offload/system.py).
SIZES = {
    ("mlp_offload", "zero3"): SwapSizes(optimizer_buffers=cached_sub_group_buffers(False, cached_sub_groups_for(2)))
}
UPDATES_IN_BACKWARD = ("lohan", "optimized")
PHASES = ("forward", "backward", "optimizer")
MODEL, DTYPE = "llama3.2-1b", "bf16"
# (k, tokens per sequence, sequences): one bound by storage, one by products.
POINTS = ((4, 32, 1), (4, 256, 2))
TINY = (32, 8, 1)
STEPS = 4  # the first is left out
PATHS = [{"name": "path0", "read_gb_per_s": 0.6, "write_gb_per_s": 0.45, "duplex": True}]
PATHS += [{"name": "path1", "read_gb_per_s": 0.3, "write_gb_per_s": 0.225, "duplex": True}]
_TEXT = Path(sysconfig.get_paths()["stdlib"]) / "json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stage", choices=("rates", "steps", "judge"), required=True, help="part of the comparison to run"
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="folder for rates and traces")
    parser.add_argument(
        "--point", type=int, choices=range(len(POINTS)), default=0, help="point that --stage steps trains"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="record that --stage judge writes")
    options = parser.parse_args()
    if MALLOC.items() - os.environ.items():  # the benchmarks allocate as the trainings do
        os.execve(
            sys.executable, [sys.executable, "-m", "workflows.run.validation", *sys.argv[1:]], os.environ | MALLOC
        )
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.stage == "rates":
        with ssds(folder) as paths:
            (folder / "rates.json").write_text(json.dumps(rates(folder, paths), indent=1) + "\n")
    elif options.stage == "steps":
        with ssds(folder) as paths:
            for run in RUNS:
                train(folder, paths, run, *POINTS[options.point])
    else:
        record = judge(folder)
        text = json.dumps(record, indent=1) + "\n"
        (options.out or folder / "validation.json").write_text(text)
        print(as_text(record))
    return 0


# -- what is measured --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ssds(folder: Path) -> Iterator[dict[str, str]]:
    """Name -> folder of the drives of `PATHS`. Raises CannotThrottleError."""
    with throttled_paths(folder.absolute() / "ssd", [0] * len(PATHS), 8 << 30) as drives:
        for said, drive in zip(PATHS, drives, strict=True):
            drive.limit(1e9 * said["read_gb_per_s"], 1e9 * said["write_gb_per_s"])
        yield {said["name"]: str(drive.folder) for said, drive in zip(PATHS, drives, strict=True)}


def traces_of(folder: Path, run: Run, k: int, context: int, batch: int) -> list[Path]:
    name = f"{'-'.join(run)}-k{k}-c{context}-b{batch}"
    return [folder / f"{name}-{step}.json" for step in range(2, STEPS + 1)]


def told(run: Run, k: int, context: int, batch: int) -> dict[str, Any]:
    """Keys of `memascend train`."""
    sizes = {"twin": k, "context": context, "batch": batch, "steps": STEPS, "eval_sequences": 0, "clip": 0.0}
    text = {"data": [str(_TEXT)], "files": "*.py"}
    return {"model": MODEL, "dtype": DTYPE, "system": run[0], "arm": run[1], **text, **sizes, **RUNS[run]}


def train(folder: Path, paths: dict[str, str], run: Run, k: int, context: int, batch: int) -> None:
    """Steps by `memascend train`, each but the first leaves its trace; what is there is kept."""
    traces = traces_of(folder, run, k, context, batch)
    if traces[-1].exists():
        return
    name = traces[0].stem.removesuffix("-2")
    keys = told(run, k, context, batch) | {"output": folder / f"run-{name}", "trace": folder / f"{name}-{{step}}.json"}
    keys |= {"tiers": [paths[each] for each in keys["tiers"]]} if "tiers" in keys else {"nvme": paths["path0"]}
    command = [sys.executable, "-m", "memascend.cli", "train"]
    for key, value in keys.items():
        command += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rates(folder: Path, paths: dict[str, str]) -> dict[str, Any]:
    """Micro-benchmarks, each with what it is of."""
    import torch

    from memascend.bench.device_rates import adamw_rate, device_seconds
    from memascend.engine.swap import link_rate

    memory = memory_speed()
    for run in RUNS:
        train(folder, paths, run, *TINY)
    return {
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "memory_bytes_per_s": memory,
        "copy_bytes_per_s": link_rate(),
        "paths": PATHS,
        "adamw_bytes_per_s": adamw_rate(),
        "tiny": device_seconds(model_spec(MODEL).twin(TINY[0]), *TINY[1:]),
        "points": [device_seconds(model_spec(MODEL).twin(k), *sizes) for k, *sizes in POINTS],
    }


# -- what is simulated -------------------------------------------------------------------------------------------------


def seconds_of(traces: list[Path], run: Run, phases: Collection[str]) -> dict[str, float]:
    """Median seconds of each of the phases, and of all of them together."""
    steps = [step_of_trace(*read_trace(trace)).phase_s for trace in traces]
    if run == UPDATES_IN_BACKWARD:
        steps = [step | {"backward": step["backward"] + step.get("optimizer", 0.0)} for step in steps]
    steps = [{phase: step.get(phase, 0.0) for phase in phases} for step in steps]
    steps = [step | {"step": sum(step.values())} for step in steps]
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def measured_machine(found: dict[str, Any], point: dict[str, Any], **storage: Any) -> tuple[MachineSpec, Calibrations]:
    """This machine by its micro-benchmarks, the device's rate the block's at these sizes; `storage`: other fields."""
    machine = MachineSpec(
        name="local",
        gpu_flops_per_s=point["block_flops"] / point["block_forward_s"],
        pcie_bytes_per_s=found["copy_bytes_per_s"],
        memory_bytes_per_s=found["memory_bytes_per_s"],
        **storage,
    )
    adam = found["adamw_bytes_per_s"] / found["memory_bytes_per_s"]
    return machine, Calibrations(gpu_efficiency=1.0, host_seconds_per_parameter=0.0, adam_memory_efficiency=adam)


def simulated_s(found: dict[str, Any], point: dict[str, Any], run: Run, own_s: dict[str, float]) -> dict[str, float]:
    """Seconds of each phase, and of the step, on this machine."""
    k, context, batch = point["k"], point["context"], point["batch"]
    first = found["paths"][0]
    drive = {f"ssd_{name}_bytes_per_s": 1e9 * first[f"{name}_gb_per_s"] for name in ("read", "write")}
    several = {"described": {"paths": found["paths"]}} if "tiers" in RUNS[run] else {}
    machine, costs = measured_machine(found, point, **({"described": {"ssd_duplex": True}, **drive} | several))
    outside = point["outside_forward_s"]
    costs = dataclasses.replace(
        costs,
        backward_products=max(0.0, point["block_both_s"] / point["block_forward_s"] - 1),
        own_s=own_s,
        output_s={"forward": outside, "backward": point["outside_both_s"] - outside},
    )
    work = workload_of_run(TrainConfig(**told(run, k, context, batch)), model_spec(MODEL).twin(k), context)
    made = step_time(dataclasses.replace(work, sizes=SIZES.get(run, work.sizes)), machine, calibrations=costs)
    return {phase.name: phase.seconds for phase in made.phases} | {"step": made.seconds}


def own_seconds(folder: Path, found: dict[str, Any], run: Run) -> dict[str, float]:
    """What a phase of the tiny model takes beyond what is simulated for it."""
    simulated = simulated_s(found, found["tiny"], run, {})
    measured = seconds_of(traces_of(folder, run, *TINY), run, simulated.keys() - {"step"})
    return {phase: max(0.0, measured[phase] - simulated[phase]) for phase in PHASES if phase in simulated}


def judge(folder: Path) -> dict[str, Any]:
    """Simulated and measured seconds of each phase, and how far apart they are."""
    found = json.loads((folder / "rates.json").read_text())
    own = {run: own_seconds(folder, found, run) for run in RUNS}
    rows = [row for run in RUNS for row in _rows(folder, found, run, own[run])]
    errors = sorted(row["error_percent"] for row in rows if row["phase"] != "step")
    steps = sorted(row["error_percent"] for row in rows if row["phase"] == "step")
    return {
        "kind": "simulation-validation",
        "model": MODEL,
        "dtype": DTYPE,
        "rates": found,
        "own_s": {" ".join(run): seconds for run, seconds in own.items()},
        "rows": rows,
        "phases": _distribution(errors),
        "steps": _distribution(steps),
    }


def _rows(folder: Path, found: dict[str, Any], run: Run, own_s: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Of the sizes that were measured to their end."""
    for point in found["points"]:
        sizes = {name: point[name] for name in ("k", "context", "batch")}
        if not traces_of(folder, run, **sizes)[-1].exists():
            continue
        simulated = simulated_s(found, point, run, own_s)
        phases = [phase for phase in PHASES if phase in simulated]
        measured = seconds_of(traces_of(folder, run, **sizes), run, phases)
        for phase in (*phases, "step"):
            yield {
                "system": run[0],
                "arm": run[1],
                **sizes,
                "phase": phase,
                "simulated_s": simulated[phase],
                "measured_s": measured[phase],
                "error_percent": 100 * (simulated[phase] / measured[phase] - 1),
            }


def _distribution(errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "count": len(errors),
        "lowest_percent": errors[0],
        "median_percent": statistics.median(errors),
        "highest_percent": errors[-1],
        "median_size_percent": statistics.median(sizes),
    }


def as_text(record: dict[str, Any]) -> str:
    lines = [f"{'':<52}{'simulated':>10}{'measured':>10}{'error':>8}"]
    for row in record["rows"]:
        name = f"{row['system']} {row['arm']} k={row['k']} {row['batch']} x {row['context']} {row['phase']}"
        lines.append(f"{name:<52}{row['simulated_s']:>10.3f}{row['measured_s']:>10.3f}{row['error_percent']:>7.0f}%")
    for what in ("phases", "steps"):
        spread = record[what]
        lines.append(
            f"{what}: {spread['count']} errors, {spread['lowest_percent']:.0f} to {spread['highest_percent']:.0f} %, "
            f"median {spread['median_percent']:.0f} %, median size {spread['median_size_percent']:.0f} %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

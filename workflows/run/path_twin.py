"""Measure an iteration of DeepSpeed and of MLP-Offload's arms over paths of known rates (Figs. 3, 5, 7-10, 13-15).

The arms alternate. Paths are loop devices that the kernel limits to a rate per direction (*duplex*); with `--simplex`,
or if the kernel cannot, folders that a token bucket limits, in DeepNVMe's handle as in our tier
(`memascend.bench.rate_limit`). With `--ranks 2` two processes of each arm share the paths and the cores. `--predict`
only simulates the same arms, model and rates: it writes a record of the modelled lane, to be kept before the measured
record is made. Its other rates (matrix products, AdamW, memory) are micro-benchmarks of this machine, from
validation.json in the folder of results/reference that MEMASCEND_HOST names; without that file, nothing is predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware.throttled import CannotThrottleError, throttled_paths
from memascend.planner import Workload
from memascend.planner.spec import ModelSpec
from memascend.planner.step import io_volume
from memascend.planner.step_time import step_time
from memascend.planner.workload import SwapSizes
from workflows.paper_models import spec
from workflows.run import children, provenance
from workflows.run.interleaved import ARMS, POINT, Arm, rounds, started, turns_requested, write
from workflows.run.training import FREE_SPACE_FACTOR, parser, point
from workflows.run.validation import measured_machine

REFERENCE = Path("results/reference")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    own: dict[str, dict[str, Any]] = {"arms": ARMS, "points": {"required": True}, "time_limit": {"default": 600}}
    own["rounds"] = {"type": int, "default": 3, "metavar": "N", "help": "measured rounds: one step of each arm"}
    own["rates"] = {"nargs": "+", "required": True, "metavar": "READ/WRITE", "help": "rates of each path in MB/s"}
    own["ranks"] = {"help": "processes per arm"}
    own["accumulate"] = {
        "nargs": "+",
        "type": int,
        "default": [],
        "metavar": "N",
        "help": "micro-batches per update: one point each",
    }
    own["transfers"] = {
        "action": "store_true",
        "help": "record the transfers of each update: direction, begin, end, bytes",
    }
    own["simplex"] = {"action": "store_true", "help": "reads and writes of a path share its rate"}
    own["predict"] = {"action": "store_true", "help": "simulate only, and write the modelled record"}
    p = parser(__doc__, "run-id", "model", "k", "device", "matmul", "nvme", "out", **own)
    return p.parse_args(argv)


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the record that follow from the command line alone."""
    return turns_requested(args, spec("mlpoffload", args.model)) | paths_requested(args) | {"time_twin": None}


def paths_requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields about the paths that follow from the command line alone."""
    fields = {"rates": args.rates, "duplex": not args.simplex, "ranks": args.ranks}
    return fields | {"points_requested": [list(each) for each in points_of(args)]}


def rates_of(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return (bytes read per second, bytes written per second) of each path."""
    try:
        return [(1e6 * float(read), 1e6 * float(write)) for read, write in (word.split("/") for word in args.rates)]
    except ValueError:
        raise ValueError(
            f"--rates: expected READ/WRITE in MB/s for each path, such as 69/53, got {args.rates}"
        ) from None


def rates_here() -> dict[str, Any]:
    """Return the micro-benchmarks of this machine; raise ValueError if it has none, since another machine's do not
    apply."""
    path = REFERENCE / provenance.host()["name"] / "validation.json"
    if not path.exists():
        how = "name the machine with MEMASCEND_HOST, or measure it with python -m workflows.run.validation"
        raise ValueError(f"nothing is predicted: this machine has no {path}; {how}")
    return json.loads(path.read_text())["rates"]


def predicted(args: argparse.Namespace, arms: list[Arm], twin: ModelSpec) -> list[dict[str, Any]]:
    """Return one simulated step of each arm at each point, in the form that `rounds` returns. ValueError as
    `rates_here`."""
    found = rates_here()
    paths = [
        {"name": f"path{n}", "read_gb_per_s": read / 1e9, "write_gb_per_s": written / 1e9, "duplex": not args.simplex}
        for n, (read, written) in enumerate(rates_of(args))
    ]
    fewest = min(found["points"], key=lambda each: each["batch"] * each["context"])
    where, costs = measured_machine(found, fewest["block_flops_per_s"], described={"paths": paths})
    points = []
    for arm, (tokens, batch, *more) in itertools.product(arms, points_of(args)):
        zero, batches = arm.config["zero_optimization"], (more or [1])[0]
        buffers = zero["offload_optimizer"].get("buffer_count", 1)  # absent where the states stay in host memory
        sizes = SwapSizes(sub_group_size=zero["sub_group_size"], optimizer_buffers=buffers, bounce_buffers=False)
        words = {"system": arm.system_name, "arm": arm.arm, "dtype": arm.dtype}
        size = {"batch": batch, "context": tokens, "ranks": args.ranks, "accumulation": batches}
        work = Workload(spec=twin, sizes=sizes, **size, **words)
        made, moved = step_time(work, where, calibrations=costs), io_volume(work)
        seconds = {"bytes_read": [moved.total_read_bytes], "bytes_written": [moved.total_write_bytes]}
        seconds |= {f"{phase.name}_s": [phase.seconds] for phase in made.phases}
        at = dict(zip(POINT, (tokens, batch, *more), strict=False))
        points.append({**at, **arm.labels, "step_s": [made.seconds], **seconds})
    return points


def points_of(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the points: (tokens, sequences), each with the accumulated batches if some are given."""
    at = point(args.points[0])
    return [(*at, batches) for batches in args.accumulate] or [at]


@contextlib.contextmanager
def places(args: argparse.Namespace, size: int) -> Iterator[tuple[list[Path], dict[str, list[Any]], list[Any]]]:
    """Yield the folders of the paths, the rates that token buckets enforce by folder, and the devices that the kernel
    limits.

    Either the rates or the devices are empty.
    """
    rates = rates_of(args)
    Path(args.nvme).mkdir(parents=True, exist_ok=True)
    with children.scratch_folder(Path(args.nvme).absolute()) as folder, contextlib.ExitStack() as stack:
        devices = []
        with contextlib.suppress(CannotThrottleError):
            if not args.simplex:
                devices = stack.enter_context(throttled_paths(folder, [0] * len(rates), size))
        for device, rate in zip(devices, rates, strict=False):
            device.limit(*rate)
        folders = [device.folder for device in devices] or [folder / f"path{n}" for n in range(len(rates))]
        for each in folders:
            each.mkdir(exist_ok=True)
        rate_limits = (
            {} if devices else {str(f): [*rate, not args.simplex] for f, rate in zip(folders, rates, strict=True)}
        )
        yield folders, rate_limits, devices


def run(args: argparse.Namespace) -> int:
    """Measure or simulate the arms, and write the record; return the exit status."""
    twin = spec("mlpoffload", args.model).twin(args.k)
    parameters = sum(tensor.numel for tensor in twin.tensors())
    deadline = time.monotonic() + args.time_limit
    fields = paths_requested(args)
    with places(args, len(args.arms) * FREE_SPACE_FACTOR * parameters * 9 // 8 + (1 << 30)) as (
        folders,
        limits,
        devices,
    ):
        args.nvme, args.paths = str(folders[0]), folders
        if args.predict:
            arms = [Arm(word, args, twin) for word in args.arms]
            fields |= {"lane": "modelled", "testbed": f"paths of {', '.join(args.rates)} MB/s", "status": "ok"}
            fields["points"] = predicted(args, arms, twin)
        else:
            before = sum(device.direct_bytes for device in devices)
            how = {"record_step": "transfers"} if args.transfers else {}
            with started(args, twin, rate_limits=limits, **how) as arms, contextlib.suppress(TimeoutError):
                fields["status"] = "timeout"
                for arm in arms:
                    arm.wait_until_ready(deadline)
                fields["points"] = rounds(arms, points_of(args), args.rounds, deadline)
                fields["status"] = "ok"
            fields["direct_bytes"] = sum(device.direct_bytes for device in devices) - before
            fields["held_by"] = "the kernel" if devices else "a token bucket"
            try:
                fields["predicted"] = predicted(args, arms, twin)
            except ValueError as reason:
                print(f"path_twin: {reason}", file=sys.stderr)
    write(args, "path_twin", twin, arms, committed=False, **fields)
    print(f"{args.run_id}: {fields['status']}")
    for each in fields.get("points", []):
        print(", ".join([each["arm"], *(f"{n} {v}" for n, v in each.items() if n.endswith("_s") or n == "paths")]))
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return provenance.program("path_twin", lambda: run(args), RuntimeError)


if __name__ == "__main__":
    sys.exit(main())

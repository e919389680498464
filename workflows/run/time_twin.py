"""Measure a time twin: a twin whose times on device, SSD and host are in the ratios of a described testbed.

A twin preserves bytes but not times: matrix products, drive and host work of this machine are not in the testbed's
ratios. Here the device's time is set by tokens and number of layers, the SSD's by the kernel's block I/O controller
(direct I/O to a loop device), and host work (AdamW, overflow check) depends on its threads and share of a CPU: the
smaller the share, the slower the drive may be. The first arm is tried without a limit, at two lengths, then at a length
and at rates for which its times should be in the ratios of its schedule on the testbed, since host work takes a
different time beside a rate-limited drive; then the arms alternate.
Only busy time counts: the training thread's own time for device and host, bytes divided by the enforced rates for the
SSD. The time of DeepSpeed's Python code is part of the device's, and a lower bound of it.

One record, kind ``step-times``, with the target and the measured ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hardware.control_groups import require_cpu_share
from hardware.registry import load_testbed
from hardware.throttled import ThrottledPath, limited_cpu, throttled_paths
from memascend.planner import Workload, model_spec
from memascend.planner.machine import MachineSpec, machine_from_testbed
from memascend.planner.step import io_volume
from memascend.planner.step_time import CPU, GPU, step_time
from memascend.planner.workload import papers
from workflows.run import children, provenance
from workflows.run.interleaved import ARMS, Arm, rounds, started, write
from workflows.run.training import FREE_SPACE_FACTOR, parser

RESOURCES = ("device", "ssd", "host")
PILOT_TOKENS = (32, 256)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    rounds = {"type": int, "default": 3, "metavar": "N", "help": "measured rounds: one step of each arm"}
    own: dict[str, dict[str, Any]] = {"rounds": rounds, "time_limit": {"default": 1200}, "arms": ARMS}
    own["testbed"] = {"required": True, "help": "testbed with the target ratios; the first arm is tuned to them"}
    own["layers"] = {
        "type": int,
        "metavar": "N",
        "help": "layers of the twin: with fewer, larger ones the framework takes less of the time",
    }
    own["threads"] = {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "threads per arm: fewer make host work slower relative to the drive",
    }
    own["cpu_share"] = {
        "type": float,
        "default": 0,
        "metavar": "X",
        "help": "CPU seconds per second for the arms (0: no limit)",
    }
    own["huge_pages"] = {"action": "store_true", "help": "use huge pages for temporaries, which avoids page faults"}
    own["context"] = {"type": int, "default": 4096, "metavar": "TOKENS", "help": "tokens per sequence of the cell"}
    own |= {
        "ranks": {"help": "GPUs of the cell"},
        "batch": {"default": None, "required": True, "help": "batch per GPU of the cell"},
    }
    p = parser(__doc__, "run-id", "model", "k", "nvme", "out", **own)
    p.set_defaults(device="cpu", matmul="native")
    return p.parse_args(argv)


def target_ratios(args: argparse.Namespace, where: MachineSpec) -> dict[str, float]:
    """Return the seconds of the first arm's work on the testbed by resource."""
    system, arm, dtype = args.arms[0].split(":")
    shape = {"ranks": args.ranks, "batch": args.batch, "context": args.context}
    work = papers(Workload(spec=model_spec(args.model), system=system, arm=arm, dtype=dtype, **shape))
    made, moved = step_time(work, where), io_volume(work)
    ssd = moved.total_read_bytes / where.ssd_read_bytes_per_s + moved.total_write_bytes / where.ssd_write_bytes_per_s
    device, host = (sum(phase.by_resource.get(name, 0.0) for phase in made.phases) for name in (GPU, CPU))
    return {"device": device, "ssd": ssd, "host": host}


def tokens_for(device_s: float, tried: list[tuple[int, float]]) -> int:
    """Return the number of tokens whose products take `device_s`, by a line through two trials; a multiple of 8."""
    (short, of_short), (long, of_long) = tried
    slope = max((of_long - of_short) / (long - short), 1e-9)
    return max(8, 8 * round((short + (device_s - of_short) / slope) / 8))


def rates_for(ssd_s: float, read: float, written: float, where: MachineSpec) -> tuple[float, float]:
    """Return (bytes read per second, written per second) at which a step's I/O takes `ssd_s`, in
    the testbed's ratio."""
    at_full_rate = read / where.ssd_read_bytes_per_s + written / where.ssd_write_bytes_per_s
    factor = at_full_rate / ssd_s
    return where.ssd_read_bytes_per_s * factor, where.ssd_write_bytes_per_s * factor


def measure(
    args: argparse.Namespace,
    arms: list[Arm],
    path: ThrottledPath,
    limit_cpu: Callable[[float], None],
    where: MachineSpec,
) -> dict[str, Any]:
    """Measure and return the measured fields of the record."""
    deadline = time.monotonic() + args.time_limit
    for arm in arms:
        arm.wait_until_ready(deadline)
    aim = target_ratios(args, where)
    pilot = [rounds(arms, [(tokens, 1)], 1, deadline, warm_up)[0] for tokens, warm_up in zip(PILOT_TOKENS, (2, 1))]
    slower = 1 / args.cpu_share if args.cpu_share else 1.0
    line = [(point["sequence"], slower * point["device_s"][0]) for point in pilot]

    def tune(host_s: float) -> tuple[int, float, float]:
        """Return the length by the line so far and the rates of the drive, which are enforced from now on."""
        wanted = {name: seconds * host_s / aim["host"] for name, seconds in aim.items()}
        rates = rates_for(wanted["ssd"], pilot[0]["bytes_read"][0], pilot[0]["bytes_written"][0], where)
        path.limit(*rates)
        return tokens_for(wanted["device"], line), *rates

    limit_cpu(args.cpu_share)
    tried = tune(slower * median(point["host_s"][0] for point in pilot))[0]
    pilot += rounds(arms, [(tried, 1)], 3, deadline, warm_up=0)[:1]
    line = [next(point for point in line if point[0] != tried), (tried, median(pilot[2]["device_s"]))]
    tokens, read, write = tune(median(pilot[2]["host_s"]))
    before = path.direct_bytes
    points = rounds(arms, [(tokens, 1)], args.rounds, deadline, warm_up=1)
    moved = sum(sum(p["bytes_read"]) + sum(p["bytes_written"]) for p in points) * (1 + 1 / args.rounds)
    for point in points:
        ssd = [r / read + w / write for r, w in zip(point["bytes_read"], point["bytes_written"], strict=True)]
        point["ssd_s"] = ssd
    reached = {name: median(points[0][f"{name}_s"]) for name in RESOURCES}
    twin = {
        "testbed": args.testbed,
        "cell": {"ranks": args.ranks, "batch": args.batch, "context": args.context},
        "aimed_s": aim,
        "aimed_ratio": {name: aim[name] / aim["host"] for name in RESOURCES},
        "reached_ratio": {name: reached[name] / reached["host"] for name in RESOURCES},
        "pilot": pilot,
        "layers": args.layers,
        "threads": args.threads or os.cpu_count(),
        "cpu_share": args.cpu_share,
        "huge_pages": args.huge_pages,
        "read_bytes_per_s": read,
        "write_bytes_per_s": write,
        "direct_share": (path.direct_bytes - before) / moved,
        "against_first": [against(points[0], point) for point in points[1:]],
    }
    return {"time_twin": twin, "points": points, "points_requested": [[tokens, 1]]}


def against(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compare an arm with the first: its gain in throughput by round, and the median seconds saved in each phase."""

    def step(point: dict[str, Any]) -> list[float]:
        return [sum(each) for each in zip(*(point[f"{name}_s"] for name in ("forward", "backward", "optimizer")))]

    parts = ("forward_s", "backward_s", "optimizer_s", "overflow_check_s", "host_s")
    percent = [100 * (a / b - 1) for a, b in zip(step(first), step(other), strict=True)]
    fewer = {name: median(a - b for a, b in zip(first[name], other[name], strict=True)) for name in parts}
    labels = {name: other[name] for name in ("system", "arm", "dtype")}
    return {**labels, "improvement_percent": percent, "median_percent": median(percent), "fewer_seconds": fewer}


def run(args: argparse.Namespace) -> int:
    """Tune the twin to the testbed, measure the arms, and write the record; return the exit status."""
    require_cpu_share(args.cpu_share)
    where = machine_from_testbed(load_testbed(args.testbed))
    twin = model_spec(args.model).twin(args.k)
    if args.layers:
        twin = dataclasses.replace(twin, layers=args.layers)
    parameters = sum(t.numel for t in twin.tensors())
    size = len(args.arms) * FREE_SPACE_FACTOR * parameters * 9 // 8 + (1 << 30)
    Path(args.nvme).mkdir(parents=True, exist_ok=True)
    if args.huge_pages:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(children.scratch_folder(Path(args.nvme).absolute()))
        (path,) = stack.enter_context(throttled_paths(folder, [0], size))
        limit_cpu = stack.enter_context(limited_cpu()) if args.cpu_share else lambda share: None
        args.nvme, args.points = str(path.folder), [f"{PILOT_TOKENS[0]}x1"]
        with started(args, twin, args.threads, record_step=True) as arms:
            found = measure(args, arms, path, limit_cpu, where)
    record = write(args, "time_twin", twin, arms, **found)
    print(text_of(record["time_twin"]))
    return 0


def text_of(twin: dict[str, Any]) -> str:
    """Return the ratios aimed at and reached, and each arm's comparison with the first, as text."""
    lines = [f"{twin['testbed']}: device : SSD : host, host = 1"]
    for name in ("aimed", "reached"):
        lines.append(f"  {name:<8}" + " : ".join(f"{twin[f'{name}_ratio'][each]:.2f}" for each in RESOURCES))
    for each in twin["against_first"]:
        fewer = (f"{name.removesuffix('_s')} {seconds:+.2f}" for name, seconds in each["fewer_seconds"].items())
        percents = ", ".join(f"{percent:.1f}" for percent in each["improvement_percent"])
        lines.append(f"  {each['arm']}: {each['median_percent']:+.1f} % throughput ({percents})")
        lines[-1] += f"; fewer seconds: {', '.join(fewer)}"
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return provenance.program("time_twin", lambda: run(args), RuntimeError)


if __name__ == "__main__":
    sys.exit(main())

"""Overflow check: time and extra memory of each way, in one run, as a run record.

Ways: ``chain`` (isinf().any(), isnan().any(): as published and today's DeepSpeed), ``aminmax`` (one torch.aminmax),
``fused`` (MemAscend IV-D), and ``sum`` (tensor.sum(): the read limit). Extra memory is the largest sum of temporaries
alive at once, from torch's allocation events. Finite data, since that is what training checks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workflows import staleness
from workflows.run import memory_account, provenance

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--run-id", default="")
    p.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "fp16", "bf16"])
    p.add_argument("--numels", nargs="+", type=int, default=[1_000_000, 30_000_000, 100_000_000])
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--points-only", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.repeats < 1 or min(args.numels) < 1:
        p.error("--repeats and --numels must be at least 1")
    if args.points_only:
        args.out.write_text(json.dumps(measure(args.dtypes, args.numels, args.repeats)))
        return 0
    points = _in_own_process(args)
    record = provenance.record_header(
        args.run_id or args.out.stem, "bench-overflow", staleness.digest("workflows.run.overflow")
    )
    requested = {"dtypes": args.dtypes, "numels": args.numels, "repeats": args.repeats}
    record |= {"points_requested": requested, "points": points}
    record["wall_s"] = provenance.wall_s()
    record["key"] = provenance.record_key(record)
    provenance.write_json_atomically(args.out, record)
    return 0


def _in_own_process(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The tracking allocator stays for a process's life, so the measurement has a process of its own."""
    partial = args.out.with_suffix(".points")
    partial.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "workflows.run.overflow", "--points-only", "--out", str(partial)]
    command += ["--repeats", str(args.repeats), "--dtypes", *args.dtypes, "--numels", *map(str, args.numels)]
    subprocess.run(command, check=True)
    points = json.loads(partial.read_text())
    partial.unlink()
    return points


def measure(dtypes: list[str], numels: list[int], repeats: int) -> list[dict[str, Any]]:
    import torch

    from memascend.memory import tracking
    from memascend.ops.overflow import has_overflow, has_overflow_aminmax, has_overflow_chain

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "chain": has_overflow_chain,
        "aminmax": has_overflow_aminmax,
        "fused": has_overflow,
        "sum": lambda t: t.sum(),
    }
    points = []
    for dtype in dtypes:
        for numel in numels:
            data = torch.empty(numel, dtype=getattr(torch, DTYPES[dtype])).uniform_(-1, 1)
            seconds = {w: [] for w in ways}
            for _ in range(repeats + 1):  # the first round is a warm-up; ways alternate so that drift hits all alike
                for name, way in ways.items():
                    begin = time.perf_counter()
                    way(data)
                    seconds[name].append(time.perf_counter() - begin)
            points += [
                {"method": n, "dtype": dtype, "numel": numel, "seconds": s[1:], "extra_bytes": 0}
                for n, s in seconds.items()
            ]
    tracking.install()  # after the timing: the allocator must not slow it
    for point in points:
        data = torch.empty(point["numel"], dtype=getattr(torch, DTYPES[point["dtype"]])).uniform_(-1, 1)
        tracking.events()
        ways[point["method"]](data)
        point["extra_bytes"] = memory_account.peak_of_events([list(e) for e in tracking.events()])
    return points


if __name__ == "__main__":
    sys.exit(main())

"""The command `memascend doctor`: checks this machine and prints fixes. Exit status 1 if a check fails."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

_WIDTH = 15


def add_doctor(commands: Any) -> None:
    """Register `doctor` with the argparse subparsers `commands`."""
    from memascend.planner.command import count

    parser = commands.add_parser(
        "doctor",
        help="check this machine, and print what is missing with the exact fix",
        description="Check kernel, memory, SSD, GPU and packages. Writes nothing but one unnamed temporary file in "
        "--nvme and in each of --tiers. Exit status: 0, 1 if a check fails, 2 for an error.",
    )
    parser.add_argument(
        "--nvme", type=Path, metavar="DIR", help="folder for swap files: tested with O_DIRECT and timed"
    )
    parser.add_argument(
        "--tiers",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders on several drives, as for the key tiers: each is tested, and all in parallel",
    )
    parser.add_argument("--no-speed", action="store_true", help="skip the timed write and read (up to 1 GiB)")
    parser.add_argument("--model", metavar="MODEL", help="check against the needs of a plan for this model")
    parser.add_argument("--system", metavar="SYSTEM", help="system of that plan (default memascend)")
    parser.add_argument("--gpus", "--ranks", type=count, default=1, metavar="N", help="GPUs of that plan (default 1)")
    parser.add_argument("--context", type=count, metavar="TOKENS", help="context of that plan (default: that of plan)")
    parser.add_argument("--batch", type=count, metavar="N", help="batch per GPU of that plan (default 1)")
    parser.add_argument("--dtype", metavar="DTYPE", help="dtype of that plan: bf16 (default) or fp16")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the checks; return the text to print and the exit status."""
    from memascend.doctor import probe
    from memascend.doctor.checks import FAIL, check_all, check_gpu
    from memascend.doctor.packages import check_packages, cuda

    if not options.model:
        _refuse_options_of_plan(options)
    needs = _needs(options) if options.model else None
    others = bool(options.tiers)
    checks = list(check_all(options.nvme, needs, options.gpus, try_speed=not options.no_speed, other_paths=others))
    if options.tiers:
        from memascend.doctor.tiers import check_tiers

        checks += check_tiers(options.tiers, needs, try_speed=not options.no_speed)
    checks.append(check_gpu(needs, cuda(), probe.gpus()))
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints to stdout on import
        checks += check_packages()
    status = 1 if any(check.status == FAIL for check in checks) else 0
    if options.json:
        made = {"plan": needs.label if needs else None, "checks": [dataclasses.asdict(check) for check in checks]}
        return json.dumps(made | {"failed": bool(status)}, indent=2), status
    return _as_text(checks, needs.label if needs else None), status


def _refuse_options_of_plan(options: argparse.Namespace) -> None:
    """Raise ValueError for an option that only describes the plan of --model, of which there is none."""
    for name in ("system", "context", "batch", "dtype"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} belongs to the plan of --model: add --model, or leave --{name} out")


def _needs(options: argparse.Namespace) -> Any:
    """Return the bytes that the plan of --model needs. It imports torch, so it is called only if a model is named."""
    from memascend.doctor.checks import Needs
    from memascend.memory.ledger import HOST
    from memascend.planner.footprint import plan
    from memascend.planner.gpu_memory import gpu_memory
    from memascend.planner.options import DEFAULT_CLIP, default_context
    from memascend.planner.spec import fused_experts, model_spec
    from memascend.planner.step import io_volume
    from memascend.planner.workload import Workload

    spec = model_spec(options.model).fused(fused_experts("auto"))
    work = Workload(
        spec=spec,
        system=options.system or "memascend",
        dtype=options.dtype or "bf16",
        ranks=options.gpus,
        batch=options.batch or 1,
        context=options.context or default_context(spec.config),
        clip=DEFAULT_CLIP,
    )
    host, volume = plan(work), io_volume(work)
    unlocked = ("process", "nvme_engine_buffers")
    pinned = [
        e for e in host.entries if e.role == HOST and not e.allocator.startswith("torch") and e.owner not in unlocked
    ]
    return Needs(
        label=f"{host.label}, {work.spec.display}, {work.dtype}, {work.ranks} GPU, batch {work.batch}, "
        f"context {work.context}",
        host_bytes=host.host_bytes,
        locked_bytes=sum(entry.reserved_bytes for entry in pinned) // work.ranks,
        device_bytes=gpu_memory(work).device_bytes,
        ssd_bytes=volume.stored_bytes,
        read_bytes=volume.total_read_bytes,
        write_bytes=volume.total_write_bytes,
    )


def _as_text(checks: list[Any], plan: str | None) -> str:
    """Return the report: one line per check, its fix if it is not ok, and the counts."""
    lines = [f"against the plan: {plan}", ""] if plan else []
    for check in checks:
        lines.append(f"{check.status:<5} {check.name:<{_WIDTH}} {check.found}")
        if check.fix and check.status != "ok":
            lines.append(f"{'':<{7 + _WIDTH}}fix: {check.fix}")
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    lines += ["", ", ".join(f"{number} {status}" for status, number in counts.items())]
    return "\n".join(lines)

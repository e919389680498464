"""The `memascend` command. Whatever is wrong with the input is one line on standard error, and exit status 2."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from memascend import __version__
from memascend.storage.commands import add_storage

if TYPE_CHECKING:
    from memascend.planner import Plan

# Subcommands of the design that are later parts: named, so that nobody looks for a typo.
NOT_BUILT = ("doctor", "train")
_GIB = 2**30


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage text; abbreviated options are refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, or 2 for an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parse(arguments)
        print(options.run(options))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, MemoryError, ImportError) as error:
        print(f"memascend: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    if arguments and arguments[0] in NOT_BUILT:
        raise ValueError(f"'{arguments[0]}' is not built yet; what there is: bench, plan, storage")
    parser = _Parser(prog="memascend", description="Full-parameter fine-tuning where host memory is scarce.")
    parser.add_argument("--version", action="version", version=f"memascend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    _add_plan(commands)
    _add_bench(commands)
    add_storage(commands)
    return parser.parse_args(arguments)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="where every GiB of host memory would go, and whether it fits",
        description="Host memory of one training step, buffer by buffer, before a run. Sizes are GiB (2^30 bytes).",
    )
    parser.add_argument("--model", required=True, help="qwen2.5-7b, Qwen/Qwen2.5-7B, or a path to a config.json")
    parser.add_argument("--gpus", type=_count, default=1, help="data-parallel ranks on this machine (default 1)")
    parser.add_argument("--context", type=_count, default=4096, help="tokens a sequence (default 4096)")
    parser.add_argument("--batch", type=_count, default=1, help="sequences a GPU and step (default 1)")
    parser.add_argument("--ram", type=_gib, help="host memory in GiB that it must fit")
    parser.add_argument("--system", default="memascend", help="memascend, zero_infinity, zero_offload, all_in_gpu")
    parser.add_argument("--arm", help="a variant of the system, such as as_published or today for zero_infinity")
    parser.add_argument("--dtype", default="fp16", help="fp16 (default) or bf16, which needs no overflow check")
    parser.add_argument("--json", action="store_true", help="machine-readable: components and the whole ledger")
    parser.set_defaults(run=_plan)


def _add_bench(commands: Any) -> None:
    from memascend.bench.command import add_benchmarks

    parser = commands.add_parser(
        "bench",
        help="each part against its peers and its limit, in the same run",
        description="Alternating rounds; medians with quartiles. Keep the machine free of other work meanwhile.",
    )
    add_benchmarks(parser.add_subparsers(dest="part", required=True, metavar="part", parser_class=_Parser), _count)


_LARGEST_COUNT = 10**8  # far beyond any run, and products of two still fit 64 bits with the model's sizes


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number up to {_LARGEST_COUNT:,}")
    return value


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of GiB")
    return value


def _plan(options: argparse.Namespace) -> str:
    from memascend.planner import model_spec, plan

    spec = model_spec(options.model)
    workload = {
        "dtype": options.dtype,
        "ranks": options.gpus,
        "batch": options.batch,
        "context": options.context,
    }
    chosen = plan(spec, options.system, options.arm, **workload)
    if options.json:
        return json.dumps(_as_json(chosen, options.ram), indent=2)
    others = [plan(spec, system, **workload) for system in ("memascend", "zero_infinity", "zero_offload")]
    return _as_text(chosen, [other for other in others if other.system != chosen.system], options.ram)


def _as_json(chosen: Plan, ram_gib: float | None) -> dict[str, Any]:
    return {
        "model": chosen.spec.label,
        "parameters": chosen.spec.parameters,
        "system": chosen.system,
        "arm": chosen.arm,
        "dtype": chosen.dtype,
        "gpus": chosen.ranks,
        "batch": chosen.batch,
        "context": chosen.context,
        "host_bytes": chosen.host_bytes,
        "device_bytes": chosen.device_bytes,
        "components_bytes": chosen.components(),
        "ram_gib": ram_gib,
        "fits": None if ram_gib is None else chosen.host_bytes <= ram_gib * _GIB,
        "ledger": [dataclasses.asdict(entry) for entry in chosen.entries],
    }


def _as_text(chosen: Plan, others: list[Plan], ram_gib: float | None) -> str:
    spec, total = chosen.spec, chosen.host_bytes
    lines = [
        f"{chosen.label}: {spec.display}, {spec.parameters / 1e9:.2f} B parameters, {chosen.dtype}, {chosen.ranks} GPU"
        f"{'s' if chosen.ranks > 1 else ''}, batch {chosen.batch} a GPU, context {chosen.context}",
        "",
        f"{'host memory at the worst instant of a step':<44}{'GiB':>10}{'share':>8}",
    ]
    for name, size in sorted(chosen.components().items(), key=lambda item: -item[1]):
        if size:
            lines.append(f"  {name:<42}{_gib_cell(size):>10}{size / total:>8.1%}")
    lines.append(f"  {'total':<42}{total / _GIB:>10.2f}{1:>8.0%}")
    if chosen.device_bytes:
        lines.append(f"  GPU memory for model states alone, without activations: {chosen.device_bytes / _GIB:.2f} GiB")
    lines += ["", *(_other(other, total, ram_gib) for other in others)]
    if ram_gib is not None:
        lines += ["", _verdict(chosen, ram_gib)]
    return "\n".join(lines)


def _gib_cell(size: int) -> str:
    return f"{size / _GIB:.2f}" if size >= _GIB // 200 else "< 0.01"


def _other(other: Plan, total: int, ram_gib: float | None) -> str:
    fits = "" if ram_gib is None else (", fits" if other.host_bytes <= ram_gib * _GIB else ", does not fit")
    return f"{other.label} would take {other.host_bytes / _GIB:.2f} GiB ({other.host_bytes / total:.2f} x{fits})"


def _verdict(chosen: Plan, ram_gib: float) -> str:
    spare = ram_gib - chosen.host_bytes / _GIB
    if spare >= 0:
        return f"fits {ram_gib:g} GiB, with {spare:.2f} GiB to spare for the page cache and other processes"
    name, size = max(chosen.components().items(), key=lambda item: item[1])
    return f"does not fit {ram_gib:g} GiB: {-spare:.2f} GiB short; largest part: {name}, {size / _GIB:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())

"""`memascend plan`: arguments in, report out. Exit status 1 where the plan does not fit what was given."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from memascend.planner.options import DEFAULT_STACK, MODEL_OPTIONS, Stack, default_context
from memascend.planner.spec import model_spec

_GIB = 2**30
_LARGEST_COUNT = 10**8  # far beyond any run, and products of two still fit 64 bits with the model's sizes


def add_plan(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="where every GiB would go, whether it fits, how long a step takes and what it writes",
        description="Memory, time and SSD wear of one training step, before a run. Sizes are GiB (2^30 bytes). "
        "Exit status: 0, or 1 where something does not fit what was given, or 2 for an error.",
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", required=True, help="qwen2.5-7b, Qwen/Qwen2.5-7B, or a path to a config.json")
    what.add_argument("--twin", type=count, default=1, metavar="K", help="divide the model's widths by K")
    what.add_argument("--gpus", "--ranks", type=count, default=1, help="data-parallel ranks here (default 1)")
    what.add_argument("--context", type=count, help="tokens a sequence (default 4096, or the model's longest if less)")
    what.add_argument("--batch", type=count, default=1, help="sequences a GPU at a time (default 1)")
    what.add_argument("--accumulate", type=count, default=1, help="batches a step (default 1)")
    what.add_argument("--dtype", default="bf16", help="bf16 (default), or fp16, which needs an overflow check")
    what.add_argument("--states", default="fp32", help="optimizer states: fp32 (default), or bf16 with --dtype bf16")
    what.add_argument(
        "--gradients", default="fp32", help="the gradient buffer: fp32 (default), or bf16 with --dtype bf16"
    )
    what.add_argument(
        "--experts",
        default="auto",
        choices=("auto", "fused", "separate"),
        help="how a mixture's experts are stored: fused (transformers 5), separate (one matrix each, to 4.57), or as "
        "the installed transformers has it (auto)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--system", default="memascend", help="memascend, zero_infinity, zero_offload, all_in_gpu")
    how.add_argument("--arm", help="a variant of the system, such as as_published or today for zero_infinity")
    for name, words in MODEL_OPTIONS.items():
        preset = getattr(DEFAULT_STACK, name)
        how.add_argument(f"--{name}", default=preset, help=f"{', '.join(words)} (default {preset}), as train's")
    where = parser.add_argument_group("what there is")
    where.add_argument("--gpu-memory", type=gib, metavar="GIB", help="memory of one GPU")
    where.add_argument("--ram", type=gib, metavar="GIB", help="host memory")
    where.add_argument("--ssd-space", type=gib, metavar="GIB", help="room for swap files")
    where.add_argument(
        "--ssd-endurance", type=terabytes, metavar="TB", help="terabytes that the drive is rated to write"
    )
    where.add_argument("--nvme", type=Path, metavar="FOLDER", help="folder for swap files: its free space is the room")
    where.add_argument(
        "--testbed",
        help="local (this machine; with --nvme its SSD is tried for some seconds), a described machine's "
        "name in a checkout (memascend-c1), or a YAML file; gives times, and limits that are not given",
    )
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", action="store_true", help="machine-readable, with the whole ledger")
    out.add_argument("--picture", type=Path, metavar="FILE", help="stacked bars of every system: .svg, .png or .pdf")
    out.add_argument("--write-config", type=Path, metavar="FILE", help="the DeepSpeed JSON of this plan (needs --nvme)")
    out.add_argument("--force", action="store_true", help="let --write-config and --picture replace a file")
    parser.set_defaults(run=run)


def count(text: str) -> int:
    """A whole number from 1 to 10^8, for argparse."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number up to {_LARGEST_COUNT:,}")
    return value


def gib(text: str) -> float:
    """A positive number of GiB, for argparse."""
    return _positive(text, "GiB")


def terabytes(text: str) -> float:
    """A positive number of TB, for argparse."""
    return _positive(text, "TB")


def _positive(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of {unit}")
    return value


def run(options: argparse.Namespace) -> tuple[str, int]:
    """(what to print, exit status)."""
    from memascend.planner.answers import answer
    from memascend.planner.limits import Limits, Workload
    from memascend.planner.report import as_json, as_text

    spec = model_spec(options.model).fused(fused_experts(options.experts))
    options.context = options.context or default_context(spec.config)
    work = Workload(
        spec=spec.twin(options.twin) if options.twin > 1 else spec,
        system=options.system,
        arm=options.arm,
        dtype=options.dtype,
        states=options.states,
        gradients=options.gradients,
        stack=Stack(**{name: getattr(options, name) for name in MODEL_OPTIONS}),
        ranks=options.gpus,
        batch=options.batch,
        context=options.context,
        micro_batches=options.accumulate,
    )
    work.host(), work.device()  # refuse what is wrong in them before the machine is tried
    machine = _machine(options.testbed, options.nvme)
    limits = Limits(
        gpu_bytes=_bytes(options.gpu_memory),
        ram_bytes=_bytes(options.ram),
        ssd_bytes=_bytes(options.ssd_space) if options.ssd_space else _free_bytes(options.nvme),
    ).with_machine(machine)
    answers = answer(work, limits, machine, options.ssd_endurance)
    notes = _outputs(options, answers)
    status = 1 if answers.fits is False else 0
    if options.json:
        return json.dumps(as_json(answers), indent=2), status
    return "\n".join([as_text(answers), *notes]), status


def fused_experts(experts: str) -> bool:
    """Whether experts are fused: as asked for, or as the installed transformers does (separate where there is none)."""
    if experts != "auto":
        return experts == "fused"
    try:
        return int(metadata.version("transformers").partition(".")[0]) >= 5
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _bytes(size_gib: float | None) -> float | None:
    return None if size_gib is None else size_gib * _GIB


def _free_bytes(folder: Path | None) -> float | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"--nvme {folder} is no folder: make it first, on the SSD that is meant for swap files")
    return float(shutil.disk_usage(folder).free)


def _machine(name: str | None, nvme: Path | None) -> Any:
    from memascend.planner.machine import machine_from_file

    if name is None:
        return None
    if name == "local":
        from memascend.doctor.local import local_machine

        return local_machine(nvme)
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return machine_from_file(path)
    folder = Path(__file__).parents[2] / "hardware" / "testbeds"
    if (folder / f"{name}.yaml").is_file():
        return machine_from_file(folder / f"{name}.yaml")
    known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
    there = f"; described in this checkout: {known}" if known else ""
    raise ValueError(f"unknown testbed '{name}': say local, or name a YAML file{there}")


def _outputs(options: argparse.Namespace, answers: Any) -> list[str]:
    """Write the files that were asked for; a line about each."""
    notes = []
    if options.write_config:
        from memascend.planner.ds_config import deepspeed_config, write_config
        from memascend.planner.io_volume import SSD_SYSTEMS

        if options.nvme is None and options.system in SSD_SYSTEMS:
            raise ValueError("--write-config needs --nvme: the folder on the SSD that the configuration names")
        folder = str(options.nvme.absolute()) if options.nvme else ""
        write_config(deepspeed_config(answers.work, folder), options.write_config, force=options.force)
        notes += ["", f"DeepSpeed configuration: {options.write_config}", *_train_line(options)]
    if options.picture:
        from memascend.planner.picture import draw

        draw(answers, options.picture, force=options.force)
        notes += ["", f"picture: {options.picture}"]
    return notes


def _train_line(options: argparse.Namespace) -> list[str]:
    """The same run by `memascend train`, which configures DeepSpeed itself."""
    given = {
        "--model": options.model,
        "--twin": options.twin if options.twin > 1 else None,
        "--data": "FILES",
        "--context": options.context,
        "--batch": options.batch,
        "--accumulate": options.accumulate if options.accumulate > 1 else None,
        "--dtype": options.dtype,
        "--gradients": options.gradients if options.gradients != "fp32" else None,
        "--system": options.system,
        "--arm": options.arm,
        "--states": options.states if options.states != "fp32" else None,
        "--ranks": options.gpus if options.gpus > 1 else None,
        **{f"--{name}": getattr(options, name) for name in MODEL_OPTIONS},
        "--nvme": options.nvme,
    }
    words = " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in given.items() if value is not None)
    return [f"the same run: memascend train {words}"]

"""`memascend plan`: from the command line to the report. The exit status is 1 if the plan exceeds a given limit."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memascend.memory.budget import parse_bytes
from memascend.memory.placement_policy import PlacementPolicy
from memascend.planner.derived_sizes import io_settings
from memascend.planner.options import (
    ACCUMULATION_ORDERS,
    DEFAULT_CLIP,
    DEFAULT_STACK,
    MODEL_OPTIONS,
    STATE_VERSIONS,
    default_context,
)
from memascend.planner.spec import ModelSpec, fused_experts, model_spec
from memascend.planner.workload import CPU, CUDA, DEVICES, SwapSizes, Workload, workload_asked_for
from memascend.suggestions import did_you_mean
from memascend.systems import arrangement, own_defaults, require_order, require_versions

_GIB = 2**30
_LARGEST_COUNT = 10**8  # far beyond any run, and products of two still fit 64 bits with the model's sizes


def add_plan(commands: Any, probe: Callable[[Path | None], Any]) -> None:
    """Register the subcommand. ``probe`` measures this machine, and its SSD in the given folder."""
    parser = commands.add_parser(
        "plan",
        help="predict memory, step time and SSD writes of a run, and say whether it fits",
        description="Predict host memory, GPU memory, step time and SSD wear of one training step. Sizes are in GiB "
        "(2^30 bytes). Exit status: 0; 1 if something does not fit the given limits; 2 on an error.",
    )
    _add_run(parser)
    _add_system(parser)
    _add_machine(parser)
    _add_output(parser)
    parser.set_defaults(run=run, probe=probe)


def _add_run(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("the training run")
    what.add_argument("--model", required=True, help="a known name (qwen2.5-7b, Qwen/Qwen2.5-7B) or a config.json")
    what.add_argument("--twin", type=count, default=1, metavar="K", help="divide the model's widths by K")
    what.add_argument(
        "--gpus", "--ranks", type=count, default=1, metavar="N", help="data-parallel ranks on this machine (default 1)"
    )
    what.add_argument(
        "--context",
        type=count,
        metavar="TOKENS",
        help="tokens per sequence (default: 4096, or the model's maximum if that is less)",
    )
    what.add_argument("--batch", type=count, metavar="N", help="sequences per GPU in one forward pass (default 1)")
    what.add_argument("--accumulate", type=count, metavar="N", help="micro-batches per optimizer step (default 1)")
    what.add_argument("--clip", type=norm, metavar="NORM", help="maximum gradient norm (default 1.0; 0: no clipping)")
    what.add_argument("--dtype", metavar="DTYPE", help="bf16 (default), or fp16, which needs an overflow check")
    what.add_argument(
        "--states",
        metavar="DTYPE",
        help="optimizer states: fp32 (default); with --dtype bf16 also bf16, or int8 (--system lohan)",
    )
    what.add_argument(
        "--gradients", metavar="DTYPE", help="gradient buffer: fp32 (default), or bf16 (with --dtype bf16)"
    )
    what.add_argument(
        "--experts",
        default="auto",
        choices=("auto", "fused", "separate"),
        help="storage of a mixture's experts: fused (transformers 5), separate (one matrix each, up to 4.57), or auto: "
        "as the installed transformers does (default)",
    )


def _add_system(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("the offloading system")
    how.add_argument(
        "--system",
        metavar="NAME",
        help="memascend (default), lohan, zero_infinity, zero_offload, mlp_offload, ssdtrain, cxl, all_in_gpu, "
        "in_memory, colossal_ai or flashneuron",
    )
    how.add_argument(
        "--arm", metavar="NAME", help="a variant of the system, such as as_published or today of zero_infinity"
    )
    for name, words in MODEL_OPTIONS.items():
        preset = getattr(DEFAULT_STACK, name)
        how.add_argument(f"--{name}", metavar="NAME", help=f"{', '.join(words)} (default {preset}); as in train")
    how.add_argument(
        "--accumulation",
        choices=ACCUMULATION_ORDERS,
        help="order of the micro-batches of a step with --system lohan, as in train (default horizontal)",
    )
    how.add_argument(
        "--state-versions",
        choices=STATE_VERSIONS,
        default="auto",
        help="copies of the states that --system lohan keeps on the SSD, as in train; auto (default): two if they fit",
    )
    how.add_argument(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="plan the run that this DeepSpeed JSON describes: it gives dtype, batch and system",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("the machine")
    where.add_argument(
        "--device",
        choices=DEVICES,
        help="what computes: cuda (default), or cpu, where the tensors of the computation are in host memory too "
        "(default with --testbed local on a machine without a GPU)",
    )
    where.add_argument("--gpu-memory", type=gib, metavar="GIB", help="memory of one GPU")
    where.add_argument("--ram", type=gib, metavar="GIB", help="host memory")
    where.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="a hard limit, such as 24GiB: a plan that exceeds it is refused",
    )
    where.add_argument("--ssd-space", type=gib, metavar="GIB", help="space for swap files")
    where.add_argument(
        "--ssd-endurance", type=terabytes, metavar="TB", help="the drive's rated endurance, in terabytes written"
    )
    where.add_argument(
        "--ssd-endurance-gain",
        type=factor,
        default=1.0,
        metavar="FACTOR",
        help="expected lifetime writes over the rated endurance (default 1). The SSDTrain paper assumes 215 for "
        "activations: 2.5 for large sequential writes, times 86 for retention of a day instead of three years",
    )
    where.add_argument("--nvme", type=Path, metavar="DIR", help="folder for swap files; its free space is the limit")
    where.add_argument(
        "--testbed",
        metavar="NAME",
        help="local (this machine; with --nvme its SSD is measured for some seconds), a machine described in the "
        "checkout (memascend-c1), or a YAML file; gives step times, and limits that are not given",
    )
    where.add_argument(
        "--placement",
        metavar="POLICY",
        help="host buffers on a testbed with several memory nodes: latency_first (default), interleave, "
        "process_interleave or '{class: node, ...}', as in train",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON, with the whole ledger")
    out.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw stacked bars of every system (.svg, .png, .pdf)"
    )
    out.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write this plan as a DeepSpeed JSON (needs --nvme)"
    )
    out.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the simulated step for Perfetto (needs --testbed)"
    )
    out.add_argument("--force", action="store_true", help="overwrite existing output files")


def count(text: str) -> int:
    """Parse a whole number from 1 to 10^8, for argparse."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number up to {_LARGEST_COUNT:,}")
    return value


def norm(text: str) -> float:
    """Parse a finite number of at least 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 0")
    return value


def gib(text: str) -> float:
    """Parse a positive amount of memory and return it in GiB, for argparse; a unit is optional (GiB, GB, MiB ...)."""
    try:
        value = float(text) if not text[-1:].isalpha() else parse_bytes(text) / _GIB
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not an amount of memory: write 64 (GiB), 64GiB or 64GB")
    return value


def factor(text: str) -> float:
    """Parse a finite number of at least 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return value


def terabytes(text: str) -> float:
    """Parse a positive number of TB, for argparse."""
    return _positive(text, "TB")


def _positive(text: str, unit: str) -> float:
    """Return a positive finite number. Raises ArgumentTypeError, which names the unit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of {unit}")
    return value


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command; return the text to print and the exit status."""
    from memascend.planner.host_budget import FLAGS, KEYS, require_host_memory
    from memascend.planner.limits import Limits
    from memascend.planner.plan_result import full_plan
    from memascend.planner.report import as_json, as_text

    work = replace(_workload(options), state_versions=options.state_versions)
    require_versions(work.system, work.state_versions)
    require_order(work.system, work.accumulation_order)
    of_the_file = options.ds_config is not None and options.host_memory is None
    require_host_memory(work, words=KEYS if of_the_file else FLAGS)
    machine = _machine(options)
    limits = Limits(
        gpu_bytes=_bytes(options.gpu_memory),
        ram_bytes=min(filter(None, (_bytes(options.ram), work.host_memory)), default=None),
        ssd_bytes=_bytes(options.ssd_space) if options.ssd_space else _free_bytes(options.nvme),
    ).with_machine(machine)
    if options.placement is not None:
        options.placement = PlacementPolicy.parse(options.placement, "--placement").as_text()
    endurance, gain = options.ssd_endurance, options.ssd_endurance_gain
    result = full_plan(work, limits, machine, endurance, options.placement, gain)
    notes = _outputs(options, result)
    status = 1 if result.fits is False else 0
    if options.json:
        return json.dumps(as_json(result), indent=2), status
    return "\n".join([as_text(result), *notes]), status


# Defaults without an option on the command line or a DeepSpeed configuration; the same as those of train.
_PRESETS = {"batch": 1, "accumulate": 1, "dtype": "bf16", "states": "fp32", "gradients": "fp32", "system": "memascend"}
_PRESETS |= {"accumulation": "horizontal", "clip": DEFAULT_CLIP} | {
    name: getattr(DEFAULT_STACK, name) for name in MODEL_OPTIONS
}


def _workload(options: argparse.Namespace) -> Workload:
    """Return the workload for the options; values that are not given are completed in `options`, in place."""
    spec = model_spec(options.model).fused(fused_experts(options.experts))
    spec = spec.twin(options.twin) if options.twin > 1 else spec
    options.context = options.context or default_context(spec.config)
    if options.ds_config is not None:
        work = _configured(options, spec)
        budget = parse_bytes(options.host_memory, "--host-memory") if options.host_memory else None
        return replace(work, host_memory=budget or work.host_memory, device=_device(options))
    own = own_defaults(str(options.system or _PRESETS["system"]), options.arm)
    for name, preset in {**_PRESETS, **own}.items():
        if getattr(options, name) is None:
            setattr(options, name, preset)
    sizes = SwapSizes(io=io_settings({}, options.nvme))
    others = {"sizes": sizes, "device": _device(options), "saves_meanwhile": True}  # the default of train
    return workload_asked_for(options, spec, options.context, options.gpus, **others)


def _device(options: argparse.Namespace) -> str:
    """Return what computes on the planned machine: `cuda` or `cpu`."""
    import torch

    if options.device == CPU and options.gpu_memory is not None:
        raise ValueError("--gpu-memory and --device cpu exclude each other: leave one of them out")
    here = options.testbed == "local" and options.gpu_memory is None and not torch.cuda.is_available()
    return options.device or (CPU if here else CUDA)


def _configured(options: argparse.Namespace, spec: ModelSpec) -> Workload:
    """Return the workload of the DeepSpeed JSON that --ds-config names."""
    from memascend.planner.from_config import CommandLine, read_config, workload_of

    for name in ("system", "arm", "states", "gradients", "clip", "accumulation", "write_config"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} and --ds-config exclude one another: the configuration says what is planned")
    command_line = CommandLine(
        dtype=options.dtype,
        batch=options.batch,
        accumulation=options.accumulate,
        **{name: getattr(options, name) for name in MODEL_OPTIONS},
    )
    return workload_of(
        read_config(options.ds_config), spec, ranks=options.gpus, context=options.context, command_line=command_line
    )


def _bytes(size_gib: float | None) -> float | None:
    return None if size_gib is None else size_gib * _GIB


def _free_bytes(folder: Path | None) -> float | None:
    """Return the free space in a folder, or None without one. Raises ValueError for a missing folder."""
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"--nvme {folder} is no folder: make it first, on the SSD that is meant for swap files")
    return float(shutil.disk_usage(folder).free)


def testbeds() -> dict[str, Path]:
    """Return the described machines by name. The folder `testbeds` next to this file links to those of hardware/."""
    folder = Path(__file__).parent / "testbeds"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _machine(options: argparse.Namespace) -> Any:
    """Return the machine that --testbed names, or None without that option. Raises a one-line ValueError."""
    from memascend.planner.machine import machine_from_file

    name = options.testbed
    if name is None:
        return None
    if name == "local":
        return options.probe(options.nvme)
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return machine_from_file(path)
    if name in (described := testbeds()):
        return machine_from_file(described[name])
    there = f"; described: {', '.join(described)}" if described else ""
    hint = did_you_mean(name, ["local", *described])
    raise ValueError(f"unknown testbed '{name}'{hint}: say local, or name a YAML file{there}")


def _outputs(options: argparse.Namespace, result: Any) -> list[str]:
    """Write the requested output files; return lines about them."""
    notes = []
    if options.write_config:
        from memascend.planner.ds_config import deepspeed_config, write_config

        if options.nvme is None and arrangement(options.system, options.arm).states_on == "ssd":
            raise ValueError("--write-config needs --nvme: the folder on the SSD that the configuration names")
        folder = str(options.nvme.absolute()) if options.nvme else ""
        write_config(deepspeed_config(result.work, folder), options.write_config, force=options.force)
        notes += ["", f"DeepSpeed configuration: {options.write_config}", *_train_line(options)]
    if options.trace:
        from memascend.planner.step_trace import write_step

        write_step(result, options.trace, force=options.force)
        notes += ["", f"trace of the simulated step: {options.trace}"]
    if options.picture:
        from memascend.planner.picture import draw

        draw(result, options.picture, force=options.force)
        notes += ["", f"picture: {options.picture}"]
    return notes


def _train_line(options: argparse.Namespace) -> list[str]:
    """Return the command line of the same run with `memascend train`, which configures DeepSpeed itself."""
    given = {
        "--model": options.model,
        "--twin": options.twin if options.twin > 1 else None,
        "--data": "FILES",
        "--context": options.context,
        "--batch": options.batch,
        "--accumulate": options.accumulate if options.accumulate > 1 else None,
        "--accumulation": options.accumulation if options.accumulation != "horizontal" else None,
        "--clip": options.clip if options.clip != DEFAULT_CLIP else None,
        "--dtype": options.dtype,
        "--gradients": options.gradients if options.gradients != "fp32" else None,
        "--system": options.system,
        "--arm": options.arm,
        "--states": options.states if options.states != "fp32" else None,
        "--state-versions": options.state_versions if options.state_versions != "auto" else None,
        "--ranks": options.gpus if options.gpus > 1 else None,
        **{f"--{name}": getattr(options, name) for name in MODEL_OPTIONS},
        "--nvme": options.nvme,
    }
    words = " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in given.items() if value is not None)
    return [f"the same run: memascend train {words}"]

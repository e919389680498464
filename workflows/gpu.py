"""`make gpu`: checks and measurements on a machine with an NVIDIA GPU, in stages, with one command.

usage: python -m workflows.gpu [--out DIR] [--exhibits ID ...] [--cores N] [--again] [--rehearse]

The stages: what torch sees; `memascend doctor`; DeepSpeed's ops for the GPU, which are compiled when first loaded; the
tests marked `gpu`; the runs of the profile `gpu` with their report; a count of the records; the artifact, and its
check. After each stage one line says what it found, how long it took and where its log is. The output folder holds
`stages.md` (a table), `stages.json`, the logs, `raw/` and `derived/`; the report is in `figures/gpu`. After an
interruption the same command continues with the first stage, and within the runs with the first run, that is missing.

--rehearse runs the same stages on a machine without a GPU. The tests then use the device made for tests
(tests/late_device), whose copies arrive late, as a GPU's may. DeepSpeed does not know that device, so the profile's
runs use the CPU, with the smallest twins. A rehearsal checks the procedure; it says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memascend.suggestions import did_you_mean
from workflows import stages
from workflows.refusals import ready
from workflows.run.children import require_device
from workflows.run.provenance import checkout
from workflows.stages import Stage

if TYPE_CHECKING:
    from workflows.configuration import Configuration

PROFILE, EXPERIMENTS = "gpu", Path("workflows/config/experiments.yaml")
LARGEST_K = 64  # maximum in experiments.schema.json
GPU_TESTS = ("-m", "gpu", "tests")
# Tests of the engine and its copies, on the device made for tests; excluded are those that count the CPU's own
# products.
REHEARSED_TESTS = (
    "-p",
    "tests.late_device.plugin",
    "tests/late_device/cases.py",
    "tests/unit/test_streaming_engine.py",
)
NOT_REHEARSED = "not swapping_everything and not schedulers_and_groups and not goes_on_in_another_folder_and_in_torch"


def stages_of(args: argparse.Namespace) -> list[Stage]:
    """Return the stages of one call, in order."""
    program = (sys.executable, "-m", "workflows.gpu")
    rehearse = ("--rehearse",) if args.rehearse else ()
    some = ("--exhibits", *args.exhibits) if args.exhibits else ()
    whole = "only some exhibits were requested; an artifact covers a whole profile" if some else ""
    tests = (*REHEARSED_TESTS, "-k", NOT_REHEARSED) if args.rehearse else GPU_TESTS
    snakemake = snakemake_words(args)
    return [
        Stage(name="torch", command=(*program, "--look", *rehearse)),
        Stage(
            name="doctor",
            command=(sys.executable, "-m", "memascend.cli", "doctor", "--nvme", str(args.out)),
            finding=r"^\d+ ok, \d+ warn",
        ),
        Stage(
            name="ops",
            command=(*program, "--load-ops"),
            needs=["torch"],
            finding="DeepSpeed's ops|Error|error",
            environment={"DS_ACCELERATOR": "cpu" if args.rehearse else "cuda"},
        ),
        Stage(
            name="tests",
            command=(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),
            needs=["torch"],
            finding=r"\d+ (passed|failed|errors?|skipped)\b.* in ",
        ),
        Stage(
            name="runs",
            command=(*snakemake, *(args.exhibits or ["figures"])),
            needs=["torch", "ops"],
            finding=r"^Done in|^Stopped|Error: \S",
        ),
        Stage(name="records", command=(*program, "--count", *rehearse, "--out", str(args.out), *some), needs=["torch"]),
        Stage(name="artifact", command=(*snakemake, "artifact"), needs=["runs"], skip=whole, finding=r"MB, \d+ tables"),
        Stage(
            name="artifact-check",
            command=(*snakemake, "artifact-verify"),
            needs=[] if whole else ["artifact"],
            skip=whole,
            finding=r"^(PASS|FAIL)",
        ),
    ]


def folders(out: Path) -> dict[str, str]:
    """Return the result folders of this machine, which are separate from those of runs without a GPU."""
    figures = Path("figures", out.name)
    return {
        "raw_dir": f"{out}/raw",
        "derived_dir": f"{out}/derived",
        "figures_dir": str(figures),
        "artifact_dir": str(out),
    }


def refuse_out(out: Path) -> None:
    """Raise ValueError for a folder whose last part cannot name a separate folder in figures/."""
    from workflows.configuration import FILES, NOT_HOSTS

    taken = NOT_HOSTS - {PROFILE, f"{PROFILE}-rehearsal"}
    if out.name in ("", "..", *taken) or out.name.endswith(FILES):
        raise ValueError(
            f"--out {str(out)!r}: figures would go to {folders(out)['figures_dir']}, which is not a folder of their "
            f"own; name one such as results/{PROFILE}-2"
        )


def refuse_environment() -> None:
    """Raise ValueError for variables that would make a run fail after the minutes of the stages before it."""
    from workflows.configuration import HOST

    if (name := os.environ.get("MEMASCEND_HOST")) is not None and not re.fullmatch(HOST, name):
        raise ValueError(
            f"MEMASCEND_HOST={name!r}: a host's name has lower-case letters and digits, with - _ . between"
        )
    if (place := os.environ.get("MEMASCEND_NVME")) is not None and not Path(place).is_dir():
        raise ValueError(f"MEMASCEND_NVME={place!r} is not a folder: make it, or name another one for swap files")


def settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of the harness that override workflows/config/config.yaml."""
    small = {"experiments": str(args.out / "experiments.yaml")} if args.rehearse else {}
    return {"profile": PROFILE, **folders(args.out), **small}


def snakemake_words(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that runs Snakemake with this machine's settings; targets follow it."""
    config = [f"{name}={value}" for name, value in settings(args).items()]
    return (sys.executable, "-m", "snakemake", "--keep-going", "--cores", args.cores, "--config", *config, "--")


def rehearsal(document: dict[str, Any]) -> dict[str, Any]:
    """Return the experiments with a profile `gpu` of the same runs on the CPU, as small as possible.

    The twins have the largest k that leaves a head two elements wide; runs have two points or steps, and tensors and
    files of a few megabytes.
    """
    profile = document["profiles"][PROFILE]
    groups = [_small(group) for group in profile["training"]]
    benches = [bench | {"options": _small_options(bench["options"])} for bench in profile["bench"]]
    times = [
        run | _on_the_cpu() | {"k": _k(run["model"]), "rounds": 1, "points": [[4096, 1]]} for run in profile["times"]
    ]
    small = {"training": groups, "bench": benches, "times": times}
    return document | {"profiles": document["profiles"] | {PROFILE: small}}


def _on_the_cpu() -> dict[str, str]:
    return {"device": "cpu", "matmul": "fp32"}


def _k(model: str) -> int:
    """Return the largest divisor with which a head of the model is at least two elements wide."""
    from memascend.planner.spec import model_spec

    config = model_spec(model).config
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return min(LARGEST_K, width // 2)


def _small(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group of trainings as small as possible, on the CPU."""
    found = group | _on_the_cpu() | {"models": {model: _k(model) for model in group["models"]}}
    if "points" in group:
        found["points"] = group["points"][:2]
    if "steps" in group:
        found["steps"] = min(group["steps"], 4 if group.get("evaluate_every") else 2)
    if group.get("evaluate_every"):
        found["evaluate_every"] = 2
    return found


def _small_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark's options with two rounds and small sizes."""
    found = options | {"repeats": 2}
    if "numels" in options:
        found["numels"] = [1_000_000, 4_000_000, 16_000_000]
    if "bytes" in options:
        found |= {"bytes": [2 << 20, 8 << 20], "budget-mib": 64}
    return found


def look(rehearse: bool) -> int:
    """Print what torch sees; return 1 if it sees no GPU."""
    import torch

    if rehearse:
        from tests.late_device import late_device

        device = late_device()
        torch.ones(8, device=device).add_(1)
        print(f"torch {torch.__version__} computes on {device}, the device made for tests: a rehearsal, no GPU")
        return 0
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: {why_not(torch.version.cuda)}")
        return 1
    torch.ones(8, device="cuda").add_(1)
    each = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = ", ".join(f"{of.name} with {of.total_memory / 2**30:.0f} GiB" for of in each)
    print(f"torch {torch.__version__} with CUDA {torch.version.cuda} computes on {names}")
    return 0


def why_not(cuda: str | None) -> str:
    """Return the reason and the fix if torch, built for this CUDA version (None: CPU only), sees no GPU."""
    try:
        require_device("cuda")
    except ValueError:
        return "this machine has no NVIDIA device (/dev/nvidiactl); to rehearse without one: make gpu GPU=--rehearse"
    if cuda is None:
        return "it is the build for CPUs, from a set-up without a GPU: rm -rf .venv, then make gpu"
    return f"it is built for CUDA {cuda}; check that nvidia-smi works and that the driver is new enough"


def load_ops() -> int:
    """Load DeepSpeed's ops as the first run will need them, compiling those that are not built yet."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    from memascend.integrations.deepspeed import ops

    ops.readable_architectures()
    for name in ops.NEEDED:
        ALL_OPS[name].load(verbose=False)
    print(f"DeepSpeed's ops {', '.join(ops.NEEDED)} load for its accelerator {get_accelerator().device_name()}")
    return 0


def configured(with_settings: dict[str, str]) -> Configuration:
    """Return the harness's configuration with some settings changed."""
    from workflows.configuration import Configuration

    return Configuration(yaml.safe_load(Path("workflows/config/config.yaml").read_text()) | with_settings, [])


def exhibits_of(names: Sequence[str]) -> list[str]:
    """Return the named exhibits; the name of a paper stands for all its exhibits that have runs in this profile.

    Raises ValueError for an unknown name or one without runs in this profile, minutes before Snakemake would refuse it.
    """
    if not names:
        return []
    known = configured({"profile": PROFILE})
    run = [name for name in known.built if any(name in (run["exhibits"] or ()) for run in known.runs.values())]
    papers = {known.target_of(paper): paper for paper in known.papers}
    found: dict[str, None] = {}
    for name in names:
        if name not in known.entries and name not in papers:
            raise ValueError(
                f"--exhibits: {name} is no exhibit{did_you_mean(name, [*known.entries, *papers])}; "
                f"those with runs on a GPU: {', '.join(run)}"
            )
        mine = [each for each in run if each == name or known.entries[each]["paper"] == papers.get(name)]
        if not mine:
            raise ValueError(
                f"--exhibits: {name} has no run in the profile {PROFILE}; those with runs: {', '.join(run)}"
            )
        found |= dict.fromkeys(mine)
    return list(found)


def count(args: argparse.Namespace) -> int:
    """Print how the runs ended; return 1 if one has no record, or none has a result."""
    known = configured(settings(args))
    wanted = [
        name
        for name, run in known.runs.items()
        if not args.exhibits or run["exhibits"] is None or set(run["exhibits"]) & set(args.exhibits)
    ]
    ended, missing = Counter(), []
    for name in wanted:
        path = Path(known.raw, f"{name}.json")
        if path.is_file():
            ended[json.loads(path.read_text()).get("status", "ok")] += 1
        else:
            missing.append(name)
    for name in missing:
        print(f"no record: {name}")
    ways = ", ".join(f"{number} {status}" for status, number in ended.most_common())
    print(f"{sum(ended.values())} of {len(wanted)} runs have a record in {known.raw}: {ways or 'none'}")
    return 1 if missing or not ended["ok"] else 0


def report(args: argparse.Namespace, outcomes: list[stages.Outcome]) -> str:
    """Return the lines that say where to look."""
    figures = Path(folders(args.out)["figures_dir"], "index.html")
    lines = [f"Stages: {args.out / stages.TABLE}; records: {args.out / 'raw'}"]
    if figures.exists():
        lines.append(f"Report: {figures}")
    if args.rehearse:
        lines.append("This was a rehearsal without a GPU: none of it says how a GPU does.")
    good = sum(outcome.status == stages.OK for outcome in outcomes)
    return "\n".join([f"{good} of {len(outcomes)} stages are ok.", *lines])


def cores(text: str) -> str:
    """Parse --cores as Snakemake does: a positive number or "all"."""
    if text == "all" or (text.isdecimal() and int(text) > 0):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of cores above 0 nor 'all'")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="make gpu GPU='...'", description=__doc__.split("\n\n", 1)[1])
    p.add_argument("--out", type=Path, metavar="DIR", help="default: results/gpu, or results/gpu-rehearsal")
    p.add_argument(
        "--exhibits", nargs="+", default=[], metavar="ID", help="only the runs of these exhibits; no artifact"
    )
    p.add_argument("--cores", type=cores, default="all", metavar="N", help="of Snakemake (default all)")
    p.add_argument("--again", action="store_true", help="repeat the stages that an earlier call completed")
    p.add_argument("--rehearse", action="store_true", help="the same stages without a GPU")
    for part in ("look", "load-ops", "count"):
        p.add_argument(f"--{part}", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    args.out = args.out or Path("results", "gpu-rehearsal" if args.rehearse else "gpu")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.look:
        return look(args.rehearse)
    if args.load_ops:
        return load_ops()
    try:
        refuse_environment()
        refuse_out(args.out)
        args.exhibits = exhibits_of(args.exhibits)
        if args.count:
            return count(args)
        ready(args.out, "--out")
        if args.rehearse:
            small = rehearsal(yaml.safe_load(EXPERIMENTS.read_text()))
            (args.out / "experiments.yaml").write_text(yaml.safe_dump(small, sort_keys=False))
    except (ValueError, OSError) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before the first stage", file=sys.stderr)
        return 130
    try:
        outcomes = stages.run_stages(stages_of(args), args.out, checkout(), again=args.again)
    except KeyboardInterrupt:
        print(
            f"stopped; {args.out / stages.TABLE} has the stages so far, and the same command continues", file=sys.stderr
        )
        return 130
    print(report(args, outcomes))
    return stages.exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())

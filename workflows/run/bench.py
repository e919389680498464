"""Run `memascend bench PART …` and write its result as a run record.

usage: python -m workflows.run.bench --part adamw --out results/raw/bench-adamw.json [-- --numels 30000000]
Arguments after `--` are passed to the benchmark, which runs in its own process and knows nothing of records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware.throttled import throttled_paths
from workflows import registry, staleness
from workflows.run import children, provenance

PARTS = ("overflow", "unscale", "adamw", "pinned", "pool", "nvme", "activations", "engine", "latency", "placement")
PARTS += ("tiers", "checkpoints", "saves")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--part", choices=PARTS, required=True, help="benchmark to run")
    p.add_argument("--run-id", default="", metavar="ID", help="id of the run (default: the name of --out)")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    p.add_argument(
        "--throttle",
        type=int,
        metavar="BYTES",
        help="limit a --folder made for the run to BYTES per second in each direction (root)",
    )
    p.add_argument("options", nargs="*", help="options of the benchmark, after --")
    return p.parse_args(argv)


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the record that follow from the command line alone."""
    asked = {"part": args.part, "options": args.options} | ({"throttle": args.throttle} if args.throttle else {})
    if named := next((option.partition(":")[2].replace("-", " ") for option in args.options if ":" in option), None):
        asked["model"] = named
    return {"benchmark": args.part, "points_requested": asked}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder, _throttled(args.throttle) as place:
        options = [_model(option, Path(folder)) for option in args.options] + place
        command = [sys.executable, "-m", "memascend.cli", "bench", args.part, "--json", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return done.returncode
    models = None if args.part == "pool" else ()  # only this benchmark uses the tensors of a model
    code = staleness.digest("workflows.run.bench", models=models)
    found = requested(args) | json.loads(done.stdout)
    provenance.write_record(args.out, args.run_id or args.out.stem, "bench", code, found)
    return 0


@contextlib.contextmanager
def _throttled(rate: int | None) -> Iterator[list[str]]:
    """Yield the benchmark's options that name a path limited to this rate; no options for None."""
    if rate is None:
        yield []
        return
    place = Path(os.environ.get("MEMASCEND_NVME", "nvme")).absolute()
    with children.scratch_folder(place) as folder, throttled_paths(folder, [rate], 8 << 30) as (path,):
        yield ["--folder", str(path.folder)]


def _model(option: str, folder: Path) -> str:
    """Return the option, with `PAPER:NAME-WITH-DASHES` replaced by a config.json of that model of the paper's
    models.yaml."""
    paper, colon, name = option.partition(":")
    known = (registry.read(registry.file_of(paper, "models.yaml")) or {}) if colon and paper in registry.PAPERS else {}
    if (model := known.get(name.replace("-", " "))) is None:
        return option
    path = folder / f"{name}.json"
    path.write_text(json.dumps(model))
    return str(path)


if __name__ == "__main__":
    sys.exit(provenance.program("bench", main))

"""Host peaks of twins, and of the full models compared with the prediction from their twins.

usage: python -m workflows.run.full_size --ks 16 8 4 --out predicted.json
       python -m workflows.run.full_size --ks 1 --predicted predicted.json --out full-size.json

A case is system:arm:model. DeepSpeed's systems are run by `workflows.run.training`, which separates the memory of the
GPU: their value is the host's peak minus the process before it has a model. LoHan is run by `memascend train`, where
the ledger's buffers are compared, since its process also holds what a GPU would. Sequences are the tokens of the
full model divided by k, so that everything scales by 1/k². The predicted value is that of k = 8.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workflows import staleness
from workflows.run import children, provenance

CASES = (
    "zero_infinity:as_published:llama3.2-1b",
    "memascend:memascend:llama3.2-1b",
    "memascend:memascend:llama3.2-3b",
    "lohan:optimized:llama3.2-1b",
    "lohan:optimized:llama3.2-3b",
)
PREDICTS = 8
_TOKENS = 128  # of the full model, per sequence
_STEPS = 3
_GIB = 1 << 30


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--cases", nargs="+", default=list(CASES), metavar="SYSTEM:ARM:MODEL", help="cases to run (default: all)"
    )
    p.add_argument(
        "--ks",
        nargs="+",
        type=int,
        required=True,
        metavar="K",
        help="divisors of the models' widths, powers of two; 1: the full model",
    )
    p.add_argument(
        "--predicted",
        "--foretold",  # its former name
        type=Path,
        metavar="FILE",
        help="record of this program with k = 8, whose predictions are compared",
    )
    p.add_argument(
        "--folder",
        type=Path,
        default=Path(os.environ.get("MEMASCEND_NVME", "nvme")),
        metavar="DIR",
        help="folder on the drive",
    )
    p.add_argument(
        "--time-limit", type=float, default=1800, metavar="SECONDS", help="time limit per run (default 1800)"
    )
    p.add_argument("--run-id", default="", metavar="ID")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    args = p.parse_args(argv)
    if bad := [case for case in args.cases if case.count(":") != 2]:
        p.error(f"--cases: {bad[0]!r} is not a case: expected system:arm:model, such as {CASES[0]}")
    if args.predicted is not None and not args.predicted.is_file():
        p.error(f"--predicted: there is no record {args.predicted}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    predicted = json.loads(args.predicted.read_text())["summary"] if args.predicted else {}
    points = []
    for case in args.cases:
        for k in args.ks:
            points.append(measured(case, k, args))
            said = points[-1].get("reason") or f"{points[-1]['full_bytes'] / _GIB:.2f} GiB"
            print(f"{case} k = {k}: {said}", flush=True)
    asked = {name: getattr(args, name) for name in ("cases", "ks", "time_limit")}
    fields = {"points_requested": asked, "points": points, "summary": summary(points, predicted)}
    code = staleness.digest("workflows.run.full_size", models=None)
    record = provenance.write_record(args.out, args.run_id or args.out.stem, "full_size", code, fields)
    print(json.dumps(record["summary"], indent=1))
    return 0


def measured(case: str, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case; `full_bytes` is its estimate for the full model, or None, and then `reason` says why."""
    system, arm, model = case.split(":")
    run = _trained if system == "lohan" else _under_deepspeed
    with children.scratch_folder(args.folder) as place:
        found = run(system, arm, model, k, place, args.time_limit)
    full = None if found["host_bytes"] is None else found["host_bytes"] * k * k
    return {"case": case, "k": k, **found, "full_bytes": full}


def _under_deepspeed(system: str, arm: str, model: str, k: int, place: Path, limit: float) -> dict[str, Any]:
    """Run a case on a system of DeepSpeed; return the host's peak net of its baseline, in bytes."""
    out = place / "run.json"
    command = [sys.executable, "-m", "workflows.run.training", "--run-id", "run", "--out", str(out)]
    command += ["--system", system, "--arm", arm, "--model", model, "--k", str(k), "--dtype", "bf16"]
    command += ["--sequence", str(_TOKENS // k), "--steps", str(_STEPS), "--time-limit", str(limit)]
    _run([*command, "--nvme", str(place / "swap")])
    record = json.loads(out.read_text())
    if record["status"] != "ok":
        return {"host_bytes": None, "reason": f"{record['status']}: {record.get('reason', 'killed, or out of time')}"}
    memory = record["memory"]
    names = ("baseline_bytes", "raw_peak_bytes", "device_peak_bytes", "ledger_peak_bytes")
    return {"host_bytes": memory["host_peak_net_bytes"], **{name: memory[name] for name in names}}


def _trained(system: str, arm: str, model: str, k: int, place: Path, limit: float) -> dict[str, Any]:
    """Run a case with `memascend train`; return the bytes of the ledger's buffers."""
    folder, text = place / "run", place / "text"
    text.mkdir()
    for name in ("argparse.py", "inspect.py", "typing.py"):
        (text / name).write_text((Path(os.__file__).parent / name).read_text())
    command = [sys.executable, "-m", "memascend.cli", "train", "--output", str(folder), "--model", model]
    command += ["--random-weights"] if k == 1 else ["--twin", str(k)]
    command += ["--system", system, "--arm", arm, "--dtype", "bf16", "--context", str(_TOKENS // k)]
    command += ["--steps", str(_STEPS), "--checkpoints", "none", "--save-every", "0", "--eval-sequences", "0"]
    _run([*command, "--data", str(text), "--files", "*.py", "--nvme", str(place / "swap")], limit)
    report = json.loads((folder / "report.json").read_text())
    memory = report["memory"]
    names = ("idle_bytes", "host_peak_bytes")
    return {
        "host_bytes": sum(row["reserved_bytes"] for row in report["ledger"]),
        **{name: memory[name] for name in names},
        "ledger": {row["owner"]: row["reserved_bytes"] for row in report["ledger"]},
    }


def _run(command: list[str], limit: float | None = None) -> None:
    """Run a command. Raises ValueError, with the end of its errors, if it fails or exceeds the limit in seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{' '.join(command[2:4])} took longer than {limit:g} s: raise --time-limit") from None
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command[2:4])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def summary(points: list[dict[str, Any]], predicted: dict[str, Any]) -> dict[str, Any]:
    """Return by case the bytes of the full model for each k, and for k = 1 the ratio to the prediction."""
    found: dict[str, Any] = {}
    for point in points:
        found.setdefault(point["case"], {"full_bytes": {}})["full_bytes"][str(point["k"])] = point["full_bytes"]
    for case, each in found.items():
        theirs = predicted.get(case, {}).get("full_bytes", {}).get(str(PREDICTS))
        if theirs is not None and each["full_bytes"].get("1") is not None:
            each |= {"predicted_bytes": theirs, "of_the_predicted": each["full_bytes"]["1"] / theirs}
    return found


if __name__ == "__main__":
    sys.exit(provenance.program("full_size", main))

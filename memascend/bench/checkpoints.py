"""Benchmark of `memascend train`'s checkpoints on one file system: sharing the swap files' blocks against copying them.

Two trainings run one after the other, with swap files and checkpoints in folders of the same file system; each saves
after every step. Seconds are the duration of the save alone; bytes are those that the kernel reports as written. The
limit is the time that the bytes take at the drive's rates, which are measured before, between and after the trainings:
the whole checkpoint is read once, from the swap files or for its checksum, and the written bytes are written.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from memascend.bench.rounds import conditions, spread
from memascend.doctor.checks import file_system
from memascend.doctor.speed import DEFAULT_BYTES, DeviceSpeed, device_speed
from memascend.training.progress import read_metrics

WAYS = {"shared": (), "copied": ("--copy-checkpoints",)}


@dataclass(frozen=True, kw_only=True)
class CheckpointBench:
    """Options of the benchmark: `repeats` saves are timed after an untimed one; `twin` divides the model's sizes."""

    folder: Path
    model: str = "qwen2.5-0.5b"
    twin: int = 4
    context: int = 64
    repeats: int = 5
    system: str = "memascend"


def measure(options: CheckpointBench) -> dict[str, Any]:
    """Return points and summary by way. Raises RuntimeError with the last line of a training's output if it fails."""
    points, speeds = [], [_speed(options.folder)]
    for method, words in WAYS.items():
        points.append({"method": method, **_saved(options, words)})
        speeds.append(_speed(options.folder))
    read, write = (median(getattr(speed, f"{way}_bytes_per_s") for speed in speeds) for way in ("read", "write"))
    summary = [_summary(point, read, write) for point in points]
    asked = {name: getattr(options, name) for name in ("model", "twin", "context", "repeats", "system")}
    found = {"benchmark": "checkpoints", "conditions": conditions() | asked, "points": points, "summary": summary}
    rates = {"read_bytes_per_s": read, "write_bytes_per_s": write}
    return found | {"file_system": file_system(options.folder.resolve()), "rates": rates}


def _speed(folder: Path) -> DeviceSpeed:
    """Measure the drive's rates with a file of at most a tenth of the free space."""
    return device_speed(folder, min(DEFAULT_BYTES, shutil.disk_usage(folder).free // 10))


def _summary(point: dict[str, Any], read: float, write: float) -> dict[str, Any]:
    """Return the medians (with quartiles for seconds) and `limit_s` for drive rates `read` and `write` in bytes/s."""
    moved = {name: median(point[name]) for name in ("written_bytes", "shared_bytes")}
    limit = point["checkpoint_bytes"] / read + moved["written_bytes"] / write
    return {"method": point["method"], "seconds": vars(spread(point["seconds"])), "limit_s": limit, **moved}


def _saved(options: CheckpointBench, words: tuple[str, ...]) -> dict[str, Any]:
    """Train with a checkpoint after every step, in a folder that is removed; return the size of one and the numbers of
    each."""
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py")
    with TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, "-m", "memascend.cli", "train", "--model", options.model, "--random-weights"]
        command += ["--twin", str(options.twin), "--data", str(text), "--context", str(options.context)]
        command += ["--steps", str(options.repeats + 1), "--save-every", "1", "--keep", "1", "--eval-share", "0"]
        command += ["--system", options.system, "--output", f"{folder}/run", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        saved = Path(folder, "run/checkpoints").rglob("*.safetensors")
        size = sum(path.stat().st_size for path in saved)
        rows = [row for row in read_metrics(Path(folder, "run/metrics.jsonl")) if row["kind"] == "checkpoint"][1:]
    if done.returncode or len(rows) != options.repeats:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"the training to be saved ended with {done.returncode}: {' '.join(said)}")
    series = {name: [row[name] for row in rows] for name in ("seconds", "written_bytes", "shared_bytes")}
    return {"checkpoint_bytes": size, **series}

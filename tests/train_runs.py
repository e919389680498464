"""Runs of `memascend train` on a twin whose steps take less than a second, for the tests that examine them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import forked

STEPS = 8
# 16 layers, 2 M parameters: small enough to wait for, deep enough for the buffer pool to be reused many times.
MODEL = ["--model", "llama3.2-1b", "--twin", "32"]
WORK = ["--context", "32", "--steps", str(STEPS), "--accumulate", "2", "--save-every", "2", "--keep", "3"]
EVAL = ["--eval-every", "4", "--eval-sequences", "2", "--eval-share", "0.1"]
# sitecustomize.py of a run whose engine is changed by the function `patch` that follows.
_PATCHED = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "memascend.engine.runtime":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module.StreamingEngine)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
_FINISHED: dict[tuple[str, ...], Path] = {}


def text_folder(parent: Path) -> Path:
    """Copy some files of the standard library, which every installation has and which do not change during a run."""
    folder = parent / "text"
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "bisect.py", "copy.py", "heapq.py", "json/decoder.py", "json/encoder.py", "shlex.py"):
        shutil.copy(library / name, folder / Path(name).name)
    return folder


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "memascend.cli", "train", "--output", str(output), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def patched_environment(folder: Path, patch: str) -> dict[str, str]:
    """Return an environment in which each process passes StreamingEngine to the function `patch` that the code defines.

    It must be started by subprocess, and has a new folder in `folder`.
    """
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_PATCHED + patch)
    return environment() | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}


def train(output: Path, *options: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run the command; it and its processes are forked, whereas test_train_kill.py starts them as a user does."""
    return forked.run(command(output, *options), timeout=timeout, env=environment())


def options_for(text: Path, system: str = "memascend", *more: str) -> list[str]:
    return [*MODEL, "--data", str(text), "--files", "*.py", *WORK, *EVAL, "--system", system, *more]


def losses(output: Path) -> dict[int, float]:
    """Return the loss by step, to the last bit."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == sorted({row["step"] for row in steps})
    return {row["step"]: row["loss"] for row in steps}


def evaluations(output):
    """Return the evaluation loss by step, to the last bit."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}


def finished_run(factory: pytest.TempPathFactory, system: str = "memascend", *more: str) -> Path:
    """Return the folder of an uninterrupted run, which is made once per session.

    In the same parent folder are its text (`text`), its output (`said`) and the trace of its second step
    (`trace.json`).
    """
    key = (system, *more)
    if key not in _FINISHED:
        parent = factory.mktemp(f"train-{system}")
        trace = ["--trace", str(parent / "trace.json")]
        done = train(parent / "run", *options_for(text_folder(parent), system, *more), *trace)
        assert done.returncode == 0, done.stdout + done.stderr
        (parent / "said").write_text(done.stdout)
        _FINISHED[key] = parent / "run"
    return _FINISHED[key]

"""Real training runs of a k = 64 twin, each in its own process, shared by the tests of this folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 11


class Runs:
    """Runs an arm once per set of options and keeps its record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[tuple[str, ...], dict[str, Any]] = {}

    def record(self, system: str, arm: str, *options: str) -> dict[str, Any]:
        key = (system, arm, *options)
        if key not in self._records:
            out = self._folder / f"run{len(self._records)}.json"
            done = self.command(system, arm, "--out", str(out), *options)
            assert done.returncode == 0, done.stderr[-3000:]
            self._records[key] = json.loads(out.read_text())
        return self._records[key]

    def command(self, system: str, arm: str, *options: str) -> subprocess.CompletedProcess[str]:
        defaults = [
            "--model",
            "qwen2.5-7b",
            "--k",
            "64",
            "--steps",
            str(STEPS),
            "--run-id",
            f"test-{system}-{arm}",
            "--time-limit",
            "240",
            "--nvme",
            str(self._folder / "nvme"),
            "--out",
            str(self._folder / "refused.json"),
        ]
        command = [
            sys.executable,
            "-m",
            "workflows.scripts.run_training",
            "--system",
            system,
            "--arm",
            arm,
            *defaults,
            *options,
        ]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))

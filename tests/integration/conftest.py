"""Real training runs of Qwen2.5-7B's twins, each in its own process, shared by the tests of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from memascend.training import processes
from tests import forked
from workflows.run import children
from workflows.run import training as run_training

ROOT = Path(__file__).resolve().parents[2]
STEPS = 11


class Runs:
    """Runs an arm once per set of options and keeps its record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[tuple[str, ...], dict[str, Any]] = {}
        self.shared_buffers: list[SharedBuffers] = []

    def record(self, system: str, arm: str, *options: str) -> dict[str, Any]:
        key = (system, arm, *options)
        if key not in self._records:
            out = self._folder / f"run{len(self._records)}.json"
            arguments = self._arguments(system, arm, "--out", str(out), *options)
            forking = mock.patch.object(children, "subprocess", forked.FORKING)
            with contextlib.chdir(ROOT), forking, watched(self.shared_buffers):
                assert run_training.run(run_training.parse(arguments)) == 0
            self._records[key] = json.loads(out.read_text())
        return self._records[key]

    def command(self, system: str, arm: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the program itself, in its own process."""
        command = [sys.executable, "-m", "workflows.run.training", *self._arguments(system, arm, *options)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)

    def _arguments(self, system: str, arm: str, *options: str) -> list[str]:
        return [
            *("--system", system, "--arm", arm),
            *("--model", "qwen2.5-7b", "--k", "64", "--steps", str(STEPS)),
            *("--run-id", f"test-{system}-{arm}"),
            # memory is sampled only if a test reads it, which saves half the time
            *("--time-limit", "240", "--mode", "time"),
            *("--nvme", str(self._folder / "nvme")),
            *("--out", str(self._folder / "refused.json")),
            *options,
        ]


@dataclasses.dataclass(frozen=True)
class SharedBuffers:
    """Files of one run in /dev/shm: what its processes left there, and what remained after the cleanup."""

    made: list[str]
    left: list[str]


@contextlib.contextmanager
def watched(seen: list[SharedBuffers]) -> Iterator[None]:
    """Record what the runs inside leave in /dev/shm; their rendezvous port
    tells it apart from files of other processes."""
    stock = processes.remove_shared_buffers

    def files(port: int) -> list[str]:
        return [path.name for path in Path("/dev/shm").iterdir() if str(port) in path.name.split("_")]

    def remove(port: int) -> None:
        made = files(port)
        stock(port)
        seen.append(SharedBuffers(made, files(port)))

    with mock.patch.object(processes, "remove_shared_buffers", remove):
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))

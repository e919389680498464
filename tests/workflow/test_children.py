"""Scratch folders of measurements are removed at the end, and collected if their owner was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

from workflows.experiments import FORKED
from workflows.run import children

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys, time
from pathlib import Path
from workflows.run.children import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "job0.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(600)
"""


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )
    folder = Path(process.stdout.readline().strip())
    process.stdout.close()
    return process, folder


def make_old(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_scratch_folder_is_removed_at_the_end_of_its_block(tmp_path: Path) -> None:
    with children.scratch_folder(tmp_path) as folder:
        (folder / "log").write_text("x")
    assert not folder.exists()


def test_killed_runs_scratch_is_collected_at_the_next_start(tmp_path: Path) -> None:
    process, folder = owner(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert folder.exists()
    make_old(folder)
    with children.scratch_folder(tmp_path):
        assert not folder.exists()


def test_scratch_folder_of_a_running_process_is_kept(tmp_path: Path) -> None:
    process, folder = owner(tmp_path)
    try:
        make_old(folder)
        assert children.collect_scratch(tmp_path) == []
        assert (folder / "job0.json").exists()
    finally:
        process.kill()
        process.wait()


def test_new_folder_without_a_lock_is_not_collected(tmp_path: Path) -> None:
    young = tmp_path / f"{children.SCRATCH}young"
    young.mkdir()
    assert children.collect_scratch(tmp_path) == []
    make_old(young)
    assert children.collect_scratch(tmp_path) == [young]


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
def use(nbytes):
    address = libc.malloc(nbytes)
    libc.memset(address, 1, nbytes)
    libc.free(address)
use(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_time_mode_retains_freed_memory_and_memory_mode_returns_it() -> None:
    def faults(mode: str) -> int:
        env = children.environment(0, 1, 1, 1, mode=mode)
        return int(subprocess.run([sys.executable, "-c", FAULTS], env=env, stdout=subprocess.PIPE, check=True).stdout)

    assert faults("time") < 100
    assert faults("memory") >= 10 * (8 << 20) // (2 << 20)  # at least one per huge page


def test_settings_of_another_mode_are_not_inherited(monkeypatch) -> None:
    for name, value in children.settings("memory").items():
        monkeypatch.setenv(name, value)
    environment = children.environment(0, 1, 1, 1, mode="time")
    assert "MKL_DISABLE_FAST_MM" not in environment
    assert children.settings("time").items() <= environment.items()


def test_server_forks_only_the_runs_that_the_rules_expect(tmp_path: Path, monkeypatch) -> None:
    """They are not children of their job, so its benchmark would count nothing of them (workflows/rules/runs.smk)."""
    monkeypatch.setenv(children.SOCKET, "a socket")
    monkeypatch.setattr(children, "ForkedRun", lambda *request: "forked")
    monkeypatch.setattr(children.subprocess, "Popen", lambda *command, **how: "spawned")
    forked = []
    for case in product(("memory", "time"), (1, 2), ("cpu", "cuda"), (None, "deepspeed_016")):
        job = dict(zip(("mode", "ranks", "device"), case, strict=False))
        python = f".cache/envs/{case[3]}/bin/python" if case[3] else sys.executable
        if children.start(job, tmp_path, "", {}, python=python) == "forked":
            forked.append(case)
    assert forked == [FORKED]

"""The processes of a measurement: their job files, environment and scratch folder, and how they end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workflows.run.fork_server import SOCKET, ForkedRun

# One C library setting for every arm. Where memory is measured, freed memory is returned to the system at once, and
# MKL's fast memory manager is off: it would keep the workspace of its largest product (8 MiB for 2048 tokens of a small
# twin), which stands for GPU memory and is not a host buffer. Where time is measured, freed memory is kept, as torch's
# caching allocator keeps a GPU's: memory returned at once would be mapped and cleared again for each activation, and
# how often that happens depends on the last block in the heap (43,000 page faults in the forward pass of one arm of the
# 8B twin, 27,000 in that of another, which was 0.2 s shorter as a result).
_OF_MODE = {
    "memory": {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "MKL_DISABLE_FAST_MM": "1",
    },
    "time": {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"},
}
# Torch compiles nothing in these runs, but DeepSpeed's Muon, imported for its list of optimizers, would load the
# compiler (3 s).
_COMMON = {"MALLOC_ARENA_MAX": "2", "TORCHDYNAMO_DISABLE": "1"}
SCRATCH = "memascend-run-"
LOCK = "in-use"
YOUNG_S = 60  # a younger folder may not have its lock yet


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that is removed at the end; folders left by killed runs are collected first.

    The owner holds a lock on a file in the folder, which the kernel releases however the owner ends.
    """
    parent = parent or Path(tempfile.gettempdir())
    collect_scratch(parent)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent) as name, Path(name, LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def collect_scratch(parent: Path) -> list[Path]:
    """Remove this user's scratch folders whose lock is free, and return them."""
    gone = []
    for folder in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            state = folder.stat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > YOUNG_S and not _held(folder):
                shutil.rmtree(folder)
                gone.append(folder)
    return gone


def _held(folder: Path) -> bool:
    """Return whether a scratch folder is in use by a process that is alive."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # made by a run killed before it took its lock, or older than the locks
    except BlockingIOError:
        return True
    return False


def settings(mode: str) -> dict[str, str]:
    """Return the settings of the C library, MKL and torch for measurements of ``memory`` or of ``time``."""
    return _COMMON | _OF_MODE[mode]


def environment(
    rank: int, ranks: int, port: int, threads: int, device: str = "cpu", mode: str = "memory"
) -> dict[str, str]:
    """Return the environment that every rank of every arm runs in: same C library settings and threads, no network."""
    others = {name for names in _OF_MODE.values() for name in names}
    return {
        **{name: value for name, value in os.environ.items() if name not in others},
        **settings(mode),
        "DS_ACCELERATOR": device,
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }


def require_device(device: str) -> None:
    """Raise ValueError if the device is cuda and this machine has no NVIDIA device."""
    if device == "cuda" and not Path("/dev/nvidiactl").exists():
        raise ValueError("--device cuda: no NVIDIA device on this machine; leave --device out, or take another profile")


Run = subprocess.Popen | ForkedRun


def start(
    job: dict[str, Any],
    work: Path,
    name: str,
    env: dict[str, str],
    descriptors: tuple[str, ...] = (),
    python: str = sys.executable,
) -> Run:
    """Start one `workflows.run.child` with ``job``; its job, result and log files are in ``work``, each with ``name``.

    ``descriptors`` names the fields of the job that are file descriptors. The child is forked if a fork server runs.
    Two kinds of runs are not: several ranks, whose memory is read in proportional shares and would be shared with the
    server's imports, and time measurements, since the server's C library is set up for memory measurements.
    """
    job_file, result_file, log_file = work / f"job{name}.json", work / f"result{name}.json", work / f"log{name}.txt"
    job_file.write_text(json.dumps(job))
    address, open_ones = os.environ.get(SOCKET), tuple(job[field] for field in descriptors)
    if address and python == sys.executable and (job["mode"], job["ranks"], job["device"]) == ("memory", 1, "cpu"):
        request = {"job": str(job_file), "result": str(result_file), "log": str(log_file), "folder": os.getcwd()}
        request |= {"environment": env, "fds": descriptors}
        with contextlib.suppress(OSError):
            return ForkedRun(address, request, open_ones)
    command = [python, "-m", "workflows.run.child", "--job", str(job_file), "--result", str(result_file)]
    with log_file.open("w") as log:
        return subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=open_ones
        )

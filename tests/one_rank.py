"""Programs that torchrun's environment variables make a rank, and those that are the only rank of a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from memascend.training.processes import free_port, remove_shared_buffers
from tests import forked


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "default",
    }


def run(
    arguments: Iterable[object], *, cwd: Path | None = None, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments as the only rank; a status other than 0 fails the test with the end of stderr."""
    port = free_port()
    command = [sys.executable, *map(str, arguments)]
    try:
        done = forked.run(command, cwd=cwd, env=environment(0, 1, port) | variables, timeout=timeout)
    finally:
        remove_shared_buffers(port)
    assert done.returncode == 0, done.stderr[-3000:]
    return done

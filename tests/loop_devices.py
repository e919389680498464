"""Raw devices for tests: loop devices on formatted files. Skipped where there can be none."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend import _C


def store(folder: Path, size_bytes: int = 64 << 20) -> str:
    """A file with an empty store of the owner `tests`."""
    path = folder / "store"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    _C.storage_format([str(path)], "tests", [], 4096, 1 << 20)
    return str(path)


@contextlib.contextmanager
def loop_device(folder: Path, size_bytes: int = 64 << 20) -> Iterator[str]:
    """With an empty store on it."""
    if os.geteuid() != 0 or not shutil.which("losetup"):
        pytest.skip("a loop device needs root and losetup")
    path = store(folder, size_bytes)
    made = subprocess.run(["losetup", "--find", "--show", path], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    try:
        yield made.stdout.strip()
    finally:
        subprocess.run(["losetup", "-d", made.stdout.strip()], check=False)

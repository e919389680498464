"""Raw devices and small file systems for tests: loop devices on files.
Tests are skipped where these are unavailable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend.storage.native import _C


def store(folder: Path, size_bytes: int = 64 << 20) -> str:
    """Make a file with an empty store of the owner `tests`."""
    path = folder / "store"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    _C.storage_format([str(path)], "tests", [], 4096, 1 << 20)
    return str(path)


@contextlib.contextmanager
def small_file_system(folder: Path, size_bytes: int = 32 << 20) -> Iterator[Path]:
    """Mount an ext4 file system on a loop device in the new `folder`."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("a file system on a loop device needs root and mkfs.ext4")
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    folder.mkdir()
    for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"no file system on a loop device: {command[0]}: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)
        image.unlink()


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Freeze the file system mounted in `folder`: a process that writes to it then waits, and ignores SIGKILL."""
    made = subprocess.run(["fsfreeze", "--freeze", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"the file system cannot be frozen: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)


@contextlib.contextmanager
def loop_device(folder: Path, size_bytes: int = 64 << 20) -> Iterator[str]:
    """Yield a loop device with an empty store on it."""
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

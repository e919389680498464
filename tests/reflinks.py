"""A small file system with reflinks for tests, which are skipped where it is unavailable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_IMAGE_BYTES = 512 << 20  # sparse; XFS needs 300 MiB
_MAKE = {"xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"), "btrfs": ("mkfs.btrfs", "-q")}
KINDS = tuple(_MAKE)


@contextlib.contextmanager
def file_system_with_reflinks(folder: Path, kind: str) -> Iterator[Path]:
    """Mount a file system of one of KINDS on a loop device, in a new folder in `folder`."""
    make = _MAKE[kind]
    if not shutil.which(make[0]) or os.geteuid() != 0:
        pytest.skip(f"a file system with reflinks needs root and {make[0]}, which make setup installs as root")
    image, mounted = folder / "reflinks.img", folder / "reflinks"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    mounted.mkdir()
    for command in ([*make, str(image)], ["mount", "-o", "loop", str(image), str(mounted)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system with reflinks: {command[0]}: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=False)
        image.unlink()

"""A small file system with reflinks for tests, which are skipped where there can be none."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_IMAGE_BYTES = 512 << 20  # sparse; XFS wants 300 MiB
_MAKE = (("mkfs.xfs", "-q", "-m", "reflink=1"), ("mkfs.btrfs", "-q"))


@contextlib.contextmanager
def file_system_with_reflinks(folder: Path) -> Iterator[Path]:
    """XFS or Btrfs on a loop device, mounted in a new folder in `folder`."""
    make = next((command for command in _MAKE if shutil.which(command[0])), None)
    if make is None or os.geteuid() != 0:
        pytest.skip("a file system with reflinks needs root and xfsprogs or btrfs-progs")
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

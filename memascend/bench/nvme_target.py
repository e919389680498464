"""The target of `memascend bench nvme`, a preallocated file or a loop device on it, and the disk's counters."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memascend.storage.commands import preallocate


@contextlib.contextmanager
def target(folder: Path, kind: str, size: int, written: bool = True) -> Iterator[str]:
    """Create a file, or a loop device on it, and yield its path; remove both afterwards.

    With `auto`, a loop device is used if one can be created (as root). With `written`, all blocks are written once, so
    that no later write has to convert an extent. A loop device must use direct I/O, otherwise the page cache would be
    measured. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=folder) as made:
        path = str(Path(made).resolve() / "device")
        preallocate(path, size, written)
        device = "" if kind == "file" else _loop_device(path, required=kind == "loop")
        try:
            yield device or path
        finally:
            if device:
                subprocess.run(["losetup", "-d", device], check=True)


def _loop_device(path: str, required: bool) -> str:
    """Return the path of a new loop device with direct I/O; an empty string if none can be made and none is
    required."""
    try:
        if shutil.which("losetup") is None:
            raise OSError("a loop device needs losetup (util-linux): use --target file")
        device = output(["losetup", "--find", "--show", "--direct-io=on", path])
    except OSError:
        if required:
            raise
        return ""
    if Path(f"/sys/block/{Path(device).name}/loop/dio").read_text().strip() != "1":
        subprocess.run(["losetup", "-d", device], check=True)
        if not required:
            return ""
        raise OSError(f"{device}: the kernel refuses direct I/O on {path}: a cache would be measured")
    return device


def output(command: list[str]) -> str:
    """Run a command and return its output. Raises OSError with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def file_below(path: str) -> str:
    """Return the file behind a loop device, which DeepNVMe needs in place of the device; any other path unchanged."""
    backing = Path(f"/sys/block/{Path(path).name}/loop/backing_file")
    return backing.read_text().strip() if backing.exists() else path


def sectors(path: str) -> int:
    """Return the sectors that the underlying disk has read and written for all users.

    The result is 0 if the kernel has no counter for it (tmpfs, overlay).
    """
    status = os.stat(file_below(path))
    node = Path(f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}")
    fields = (node / "stat").read_text().split() if (node / "stat").exists() else ["0"] * 8
    return int(fields[2]) + int(fields[6])

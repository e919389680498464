"""Paths of known speed: file systems on loop devices that the kernel's own block I/O controller slows down (cgroup v1).

The ratio of two paths is then enforced outside our code, for direct I/O. Reads and writes are limited each by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROLLER = Path("/sys/fs/cgroup/blkio")
SIZE_BYTES = 512 << 20


@dataclass(frozen=True)
class ThrottledPath:
    """A mounted folder, its device as major:minor, and the group whose processes are held to its rate."""

    folder: Path
    number: str
    group: Path

    def limit(self, bytes_per_s: int) -> None:
        for direction in ("read", "write"):
            (self.group / f"blkio.throttle.{direction}_bps_device").write_text(f"{self.number} {bytes_per_s}")

    @property
    def direct_bytes(self) -> int:
        """Bytes that the group's processes moved on the device: only direct I/O is theirs."""
        lines = (self.group / "blkio.throttle.io_service_bytes").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines if line.startswith(f"{self.number} Total"))


@contextlib.contextmanager
def throttled_paths(folder: Path, rates: Sequence[int]) -> Iterator[list[ThrottledPath]]:
    """A path for each rate (bytes a second); this process, and what it starts, is held to them. Skips without root."""
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing or not (CONTROLLER / "blkio.throttle.read_bps_device").exists():
        pytest.skip("throttled paths need root, loop devices and the block I/O controller of cgroup v1")
    with contextlib.ExitStack() as stack:
        group = CONTROLLER / f"memascend-test-{os.getpid()}"
        group.mkdir()
        stack.callback(group.rmdir)
        paths = [stack.enter_context(_mounted(folder / f"path{n}", group)) for n in range(len(rates))]
        for path, rate in zip(paths, rates, strict=True):
            path.limit(rate)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        stack.callback((CONTROLLER / "cgroup.procs").write_text, str(os.getpid()))
        yield paths


@contextlib.contextmanager
def _mounted(folder: Path, group: Path) -> Iterator[ThrottledPath]:
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    made = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
    device = made.stdout.strip()
    try:
        _run("mkfs.ext4", "-q", "-O", "^has_journal", device)
        folder.mkdir()
        _run("mount", device, str(folder))
        try:
            number = os.stat(device).st_rdev
            yield ThrottledPath(folder, f"{os.major(number)}:{os.minor(number)}", group)
        finally:
            _run("umount", "--lazy", str(folder))
    finally:
        _run("losetup", "-d", device)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no throttled paths: {' '.join(command)}: {done.stderr.strip()}")
    return done

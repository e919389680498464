"""Paths of known speed: file systems on loop devices that the kernel's own block I/O controller slows down (cgroup v1);
and processes that get a share of a CPU.

What a path can do is then enforced outside our code, for direct I/O. Reads and writes are limited each by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/blkio")
CPU_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_CPU_PERIOD_US = 10_000
LEAST_CPU_SHARE = 1_000 / _CPU_PERIOD_US  # the kernel takes no quota below a millisecond


class CannotThrottleError(OSError):
    """This machine, or this user, cannot have throttled paths; the message says why."""


@dataclass(frozen=True)
class ThrottledPath:
    """A mounted folder, its device as major:minor, and the group whose processes are held to its rates."""

    folder: Path
    number: str
    group: Path

    def limit(self, read_bytes_per_s: float, write_bytes_per_s: float | None = None) -> None:
        """From now on; the same for writes where nothing else is said. 0: no limit."""
        rates = {
            "read": read_bytes_per_s,
            "write": read_bytes_per_s if write_bytes_per_s is None else write_bytes_per_s,
        }
        for direction, rate in rates.items():
            (self.group / f"blkio.throttle.{direction}_bps_device").write_text(f"{self.number} {int(rate)}")

    @property
    def direct_bytes(self) -> int:
        """Bytes that the group's processes moved on the device: only direct I/O is theirs."""
        lines = (self.group / "blkio.throttle.io_service_bytes").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines if line.startswith(f"{self.number} Total"))


@contextlib.contextmanager
def throttled_paths(folder: Path, rates: Sequence[int], size_bytes: int = 512 << 20) -> Iterator[list[ThrottledPath]]:
    """A path in `folder` for each rate (bytes per second, 0 without limit); this process and those that it starts are
    held to them. Raises CannotThrottleError."""
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing or not (CONTROLLER / "blkio.throttle.read_bps_device").exists():
        raise CannotThrottleError(
            "throttled paths need root, loop devices and the block I/O controller of cgroup v1 in " + str(CONTROLLER)
        )
    with contextlib.ExitStack() as stack:
        group = CONTROLLER / f"memascend-{os.getpid()}"
        group.mkdir()
        stack.callback(_dissolve, group)
        paths = [stack.enter_context(_mounted(folder / f"path{n}", group, size_bytes)) for n in range(len(rates))]
        for path, rate in zip(paths, rates, strict=True):
            path.limit(rate)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield paths


def require_cpu_share(share: float) -> None:
    """ValueError for a share of a CPU that the kernel does not give; 0 is no limit."""
    if share and share < LEAST_CPU_SHARE:
        least = f"the kernel gives {LEAST_CPU_SHARE:g} or more; 0 sets no limit"
        raise ValueError(f"a share of {share:g} of a CPU: {least}")


@contextlib.contextmanager
def limited_cpu() -> Iterator[Callable[[float], None]]:
    """A function that limits this process, and those that it started in here, to so many CPU seconds per second
    (0: no limit). Raises CannotThrottleError."""
    if os.geteuid() != 0 or not (CPU_CONTROLLER / "cpu.cfs_quota_us").exists():
        raise CannotThrottleError(f"a share of a CPU needs root and cgroup v1's controller in {CPU_CONTROLLER}")
    group = CPU_CONTROLLER / f"memascend-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield lambda share: _write_quota(group, share)
    finally:
        _dissolve(group)


def _dissolve(group: Path) -> None:
    """Its processes, of which some may outlive us (an interrupted run's children), go on without limits."""
    while members := (group / "cgroup.procs").read_text().split():
        for member in members:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                (group.parent / "cgroup.procs").write_text(member)
    group.rmdir()


def _write_quota(group: Path, share: float) -> None:
    require_cpu_share(share)
    (group / "cpu.cfs_quota_us").write_text(str(int(share * _CPU_PERIOD_US) if share else -1))


@contextlib.contextmanager
def _mounted(folder: Path, group: Path, size_bytes: int) -> Iterator[ThrottledPath]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    try:
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).stdout.strip()
        try:
            _run("mkfs.ext4", "-q", "-O", "^has_journal", device)
            folder.mkdir()
            _run("mount", device, str(folder))
            try:
                number = os.stat(device).st_rdev
                yield ThrottledPath(folder, f"{os.major(number)}:{os.minor(number)}", group)
            finally:
                _run("umount", "--lazy", str(folder))
                folder.rmdir()
        finally:
            _run("losetup", "-d", device)
    finally:
        image.unlink()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotThrottleError(f"no throttled paths: {' '.join(command)}: {done.stderr.strip()}")
    return done

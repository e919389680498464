"""Paths of known speed, and limits on CPU time, by control groups of version 1 or 2.

A path is a file system on a loop device that the kernel's block I/O controller throttles, so its rates are enforced
outside our code, for direct I/O. Reads and writes are limited separately. The controller counts in slices of a tenth of
a second, and a direction that was idle may use a whole slice at once; therefore a chain of alternating reads and writes
runs faster than the rates (the drives of `memascend.bench.rate_limit` avoid this).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware.control_groups import (
    CannotThrottleError,
    Controller,
    find_controller,
    group_of,
    io_bytes,
    limit_cpu,
    limit_io,
)


@dataclass(frozen=True)
class ThrottledPath:
    """A mounted folder, its device as major:minor, and the group whose processes are limited to its rates."""

    folder: Path
    number: str
    group: Path
    controller: Controller

    def limit(self, read_bytes_per_s: float, write_bytes_per_s: float | None = None) -> None:
        """Change the rates from now on; writes default to the read rate, and 0 means no limit."""
        write = read_bytes_per_s if write_bytes_per_s is None else write_bytes_per_s
        limit_io(self.controller, self.group, self.number, read_bytes_per_s, write)

    @property
    def direct_bytes(self) -> int:
        """Bytes that the group's processes have moved on the device; `io_bytes` says what version 2 adds."""
        return io_bytes(self.controller, self.group, self.number)


@contextlib.contextmanager
def throttled_paths(folder: Path, rates: Sequence[int], size_bytes: int = 512 << 20) -> Iterator[list[ThrottledPath]]:
    """Create a path in `folder` for each rate (bytes per second; 0: no limit), and remove the paths at the end.

    The rates apply to this process and those that it starts. Raises CannotThrottleError.
    """
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if not shutil.which(tool)]
    if missing:
        raise CannotThrottleError(f"throttled paths need loop devices: {', '.join(missing)} not found")
    controller = find_controller("io")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(group_of(controller))
        made = (_mounted(folder / f"path{n}", group, controller, size_bytes) for n in range(len(rates)))
        paths = [stack.enter_context(path) for path in made]
        for path, rate in zip(paths, rates, strict=True):
            path.limit(rate)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield paths


@contextlib.contextmanager
def limited_cpu() -> Iterator[Callable[[float], None]]:
    """Yield a function that limits the CPU seconds per second (0: no limit) of this process and its new children.

    Raises CannotThrottleError.
    """
    controller = find_controller("cpu")
    with group_of(controller) as group:
        limit_cpu(controller, group, 0)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield lambda share: limit_cpu(controller, group, share)
        finally:
            limit_cpu(controller, group, 0)  # another limit may use the same group


@contextlib.contextmanager
def _mounted(folder: Path, group: Path, controller: Controller, size_bytes: int) -> Iterator[ThrottledPath]:
    """Create a file system on a loop device, yield it mounted on `folder`, and remove everything at the end."""
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
                yield ThrottledPath(folder, f"{os.major(number)}:{os.minor(number)}", group, controller)
            finally:
                _run("umount", "--lazy", str(folder))
                folder.rmdir()
        finally:
            _run("losetup", "-d", device)
    finally:
        image.unlink()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises CannotThrottleError, with its errors, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotThrottleError(f"no throttled paths: {' '.join(command)}: {done.stderr.strip()}")
    return done

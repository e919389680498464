"""Control groups of the kernel, version 1 or 2, that limit this process and its children.

Most machines have version 2 only. There a process is in one group for all controllers, so limits of several kinds are
set on the same group; with version 1 it is in one group per controller.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

V1_ROOTS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mounts")
MINE = Path("/proc/self/cgroup")
# Controller -> its folder with version 1, and a file that exists if the controller can set limits.
_V1 = {"io": ("blkio", "blkio.throttle.read_bps_device"), "cpu": ("cpu", "cpu.cfs_quota_us")}
_V1["memory"] = ("memory", "memory.limit_in_bytes")
_CPU_PERIOD_US = 10_000
LEAST_CPU_SHARE = 1_000 / _CPU_PERIOD_US  # the kernel accepts no quota below a millisecond


class CannotThrottleError(OSError):
    """The requested limits cannot be set on this machine or by this user; the message says why."""


@dataclass(frozen=True)
class Controller:
    """The controller ``io``, ``cpu`` or ``memory``: the root of its hierarchy, and the version of control groups."""

    name: str
    root: Path
    version: int


def find_controller(name: str) -> Controller:
    """Return the controller called `name`.

    Raises CannotThrottleError if neither version of control groups offers it, or if this process is not root.
    """
    folder, needed = _V1[name]
    first, second = V1_ROOTS / folder, _v2_root()
    if os.geteuid() != 0:
        raise CannotThrottleError(f"limits on {name} need root")
    if (first / needed).exists():
        return Controller(name, first, 1)
    if second is not None and name in (second / "cgroup.controllers").read_text().split():
        return Controller(name, second, 2)
    places = f"neither {first} (cgroup v1) nor {second or 'a mounted cgroup2 file system'} (v2) has it"
    raise CannotThrottleError(f"limits on {name} need the kernel's {name} controller: {places}")


@contextlib.contextmanager
def group_of(controller: Controller) -> Iterator[Path]:
    """Create a group for this process and yield its folder; remove the group at the end.

    The process is not yet in the group: write its id to ``cgroup.procs`` once limits are set. With version 2, nested
    contexts yield the same group. At the end, the processes in the group, which may outlive this one (children of an
    interrupted run), are moved to the group in which this process was before. Raises CannotThrottleError.
    """
    group, before = controller.root / f"memascend-{os.getpid()}", _before(controller)
    inner = before == group
    try:
        if controller.version == 2:
            enable(controller)
        if not inner:
            with contextlib.suppress(FileNotFoundError):
                group.rmdir()  # left by a killed process with the same id
            group.mkdir()
    except OSError as error:
        raise CannotThrottleError(f"cannot make the control group {group}: {error.strerror}") from None
    try:
        yield group
    finally:
        if not inner:
            _dissolve(group, before)


def limit_io(
    controller: Controller, group: Path, number: str, read_bytes_per_s: float, write_bytes_per_s: float
) -> None:
    """Limit the group's I/O on the device ``number`` (major:minor) from now on; a rate of 0 means no limit."""
    read, write = int(read_bytes_per_s), int(write_bytes_per_s)
    if controller.version == 2:
        (group / "io.max").write_text(f"{number} rbps={read or 'max'} wbps={write or 'max'}")
        return
    for direction, rate in (("read", read), ("write", write)):
        (group / f"blkio.throttle.{direction}_bps_device").write_text(f"{number} {rate}")


def io_bytes(controller: Controller, group: Path, number: str) -> int:
    """Return the bytes that the group's processes have moved on the device ``number``.

    Version 1 counts only direct I/O; version 2 also counts what the kernel writes back for the processes.
    """
    if controller.version == 2:
        for line in (group / "io.stat").read_text().splitlines():
            device, *counts = line.split()
            if device == number:
                fields = dict(count.split("=") for count in counts)
                return int(fields.get("rbytes", 0)) + int(fields.get("wbytes", 0))
        return 0
    lines = (group / "blkio.throttle.io_service_bytes").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines if line.startswith(f"{number} Total"))


def require_cpu_share(share: float) -> None:
    """Raise ValueError for a share of a CPU that is too small for the kernel; 0 means no limit."""
    if share and share < LEAST_CPU_SHARE:
        least = f"the kernel gives {LEAST_CPU_SHARE:g} or more; 0 sets no limit"
        raise ValueError(f"a share of {share:g} of a CPU: {least}")


def limit_cpu(controller: Controller, group: Path, share: float) -> None:
    """Limit the group to `share` CPU seconds per second from now on; 0 means no limit."""
    require_cpu_share(share)
    quota = int(share * _CPU_PERIOD_US)
    if controller.version == 2:
        (group / "cpu.max").write_text(f"{quota or 'max'} {_CPU_PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota or -1))


def _v2_root() -> Path | None:
    """Return the mount point of version 2, or None if it is not mounted."""
    for line in MOUNTS.read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    return None


def _before(controller: Controller) -> Path:
    """Return the group to which the processes return at the end: this process's current one, or v1's root."""
    if controller.version == 2:
        for line in MINE.read_text().splitlines():
            if line.startswith("0::"):
                place = controller.root / line.removeprefix("0::").lstrip("/")
                return place if place.is_dir() else controller.root
    return controller.root


def enable(controller: Controller) -> None:
    """Enable a version 2 controller for groups below the root, which not every init system does."""
    enabled = controller.root / "cgroup.subtree_control"
    if controller.name not in enabled.read_text().split():
        enabled.write_text(f"+{controller.name}")


def _dissolve(group: Path, home: Path) -> None:
    """Move the group's processes to `home` and remove it; repeated, since they may start children meanwhile."""
    while members := (group / "cgroup.procs").read_text().split():
        for member in members:
            with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                (home / "cgroup.procs").write_text(member)
    group.rmdir()

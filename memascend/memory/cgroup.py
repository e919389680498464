"""Host memory available to this process: RAM, and the limits of its control groups. No torch, no root, read-only.

Slurm, systemd and containers put a process into a memory control group. Beyond the limit of that group or of an
ancestor, the kernel kills processes where an allocation should have been refused. All functions take a root folder,
for tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest number of pages
_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A control group with a memory limit. `file` sets the limit; `available_bytes` is what remains of it now.

    Page cache charged to the group counts as available: the kernel drops it before it kills.
    """

    version: int
    limit_bytes: int
    available_bytes: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory: `limit_bytes` is the RAM or the tightest group's limit; `available_bytes` may be allocated now.

    `limited_by` and `scarce_in` are the groups that determine them; None if it is the machine itself.
    """

    limit_bytes: int
    available_bytes: int
    limited_by: MemoryGroup | None = None
    scarce_in: MemoryGroup | None = None


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return this process's memory limit and what is left of it. Raises ValueError if /proc/meminfo is unreadable."""
    total, available = ram_bytes(root)
    groups = memory_groups(root)
    tightest = min(groups, key=lambda group: group.limit_bytes, default=None)
    fullest = min(groups, key=lambda group: group.available_bytes, default=None)
    limited_by = tightest if tightest is not None and tightest.limit_bytes < total else None
    scarce_in = fullest if fullest is not None and fullest.available_bytes < available else None
    return HostMemory(
        limit_bytes=limited_by.limit_bytes if limited_by else total,
        available_bytes=scarce_in.available_bytes if scarce_in else available,
        limited_by=limited_by,
        scarce_in=scarce_in,
    )


def ram_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """Return (MemTotal, MemAvailable) in bytes. Raises ValueError if /proc/meminfo has no MemTotal (no Linux)."""
    text = _read(root / "proc/meminfo")
    total = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    free = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if not total:
        raise ValueError(f"cannot read MemTotal from {root / 'proc/meminfo'}: this needs Linux with /proc mounted")
    return int(total[1]) * 1024, int((free or total)[1]) * 1024


def memory_groups(root: Path = _ROOT) -> list[MemoryGroup]:
    """Return the groups with a limit, from this process's own up to the root, of versions 2 and 1; may be empty."""
    mounts = _mounts(root)
    own = _read(root / "proc/self/cgroup") or "0::/\n1:memory:/\n"  # if unreadable, look at the roots of both versions
    found = []
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        top, place = mounts[version]
        inside = _relative(path, top)
        for folder in (inside, *inside.parents):
            group = _read_group(place / folder, version)
            if group is not None:
                found.append(group)
    return found


_STANDARD_MOUNTS = {2: "/sys/fs/cgroup", 1: "/sys/fs/cgroup/memory"}
_LIMIT = {2: "memory.max", 1: "memory.limit_in_bytes"}
_USED = {2: "memory.current", 1: "memory.usage_in_bytes"}
_RECLAIMABLE = {
    2: ("inactive_file", "active_file", "slab_reclaimable"),
    1: ("total_inactive_file", "total_active_file"),
}


def _mounts(root: Path) -> dict[int, tuple[str, Path]]:
    """Return by version: the mounted group, as /proc/self/cgroup names it, and its mount point."""
    found = {version: ("/", root / place.lstrip("/")) for version, place in _STANDARD_MOUNTS.items()}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(kind[0])
        if version == 2 or (version == 1 and "memory" in kind[2].split(",")):
            found[version] = (fields[3], root / fields[4].lstrip("/"))
    return found


def _relative(path: str, top: str) -> Path:
    """Return the group's path below the mounted group, or the mounted group itself if the group is outside of it."""
    inside = Path(path)
    if not inside.is_relative_to(top) or ".." in inside.parts:
        return Path()
    return inside.relative_to(top)


def _read_group(folder: Path, version: int) -> MemoryGroup | None:
    """Return the group in a folder, or None if it has no limit."""
    limit, used = _number(folder / _LIMIT[version]), _number(folder / _USED[version])
    if limit is None or limit >= _NO_LIMIT:
        return None
    cache = sum(size for name, size in _stat(folder / "memory.stat") if name in _RECLAIMABLE[version])
    available = min(limit, max(0, limit - (used or 0) + cache))
    return MemoryGroup(version=version, limit_bytes=limit, available_bytes=available, file=folder / _LIMIT[version])


def _stat(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, number) of each line of a group's statistics."""
    for line in _read(file).splitlines():
        name, _, number = line.partition(" ")
        if number.isdecimal():
            yield name, int(number)


def _number(file: Path) -> int | None:
    """Return the number in a file, or None if there is none."""
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""Host memory that this process may use: RAM, and what its control groups leave of it. No torch, no root, no write.

Slurm, systemd and containers put a process into a memory control group; beyond the limit of that group or of one above
it the kernel kills, where an allocation should have been refused. All readers take a root folder, for tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest number of pages
_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A control group with a memory limit. `file` sets the limit; `available_bytes` are what it leaves now.

    The page cache that is charged to the group counts as available: the kernel drops it before it kills.
    """

    version: int
    limit_bytes: int
    available_bytes: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """`limit_bytes`: RAM, or the tightest group's limit. `available_bytes`: what may still be taken now.

    `limited_by`, `scarce_in`: the group that sets the one or the other; None where it is the machine itself.
    """

    limit_bytes: int
    available_bytes: int
    limited_by: MemoryGroup | None = None
    scarce_in: MemoryGroup | None = None


def host_memory(root: Path = _ROOT) -> HostMemory:
    """What this process may use, and what is left of that now. Raises ValueError where /proc/meminfo tells nothing."""
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
    """(MemTotal, MemAvailable). ValueError where /proc/meminfo has neither: then this is no Linux that we know."""
    text = _read(root / "proc/meminfo")
    total = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    free = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if not total:
        raise ValueError(f"cannot read MemTotal from {root / 'proc/meminfo'}: this needs Linux with /proc mounted")
    return int(total[1]) * 1024, int((free or total)[1]) * 1024


def memory_groups(root: Path = _ROOT) -> list[MemoryGroup]:
    """Groups with a limit, from this process's own one up to the top, of version 2 and 1; empty where none is set."""
    mounts = _mounts(root)
    own = _read(root / "proc/self/cgroup") or "0::/\n1:memory:/\n"  # nothing said: look at the top of both
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
    """By version: the group that is mounted, as /proc/self/cgroup names it, and where."""
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
    """The group's folder below the mounted one; the mounted one itself where the group lies outside of it."""
    inside = Path(path)
    if not inside.is_relative_to(top) or ".." in inside.parts:
        return Path()
    return inside.relative_to(top)


def _read_group(folder: Path, version: int) -> MemoryGroup | None:
    limit, used = _number(folder / _LIMIT[version]), _number(folder / _USED[version])
    if limit is None or limit >= _NO_LIMIT:
        return None
    cache = sum(size for name, size in _stat(folder / "memory.stat") if name in _RECLAIMABLE[version])
    available = min(limit, max(0, limit - (used or 0) + cache))
    return MemoryGroup(version=version, limit_bytes=limit, available_bytes=available, file=folder / _LIMIT[version])


def _stat(file: Path) -> Iterator[tuple[str, int]]:
    for line in _read(file).splitlines():
        name, _, number = line.partition(" ")
        if number.isdecimal():
            yield name, int(number)


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""Resident memory of processes, and bytes that this one wrote, as the kernel counts them. No torch here."""

from __future__ import annotations

from pathlib import Path

# Lines of /proc/PID/status; and of smaps_rollup, where pages shared by several processes count in shares.
STATUS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck")
PROPORTIONAL = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Locked")


def lines_of(pid: int | str, file: str, names: tuple[str, ...]) -> dict[str, int]:
    """The named lines of a file of a process, in bytes, whether they count these or "kB". OSError where it is gone."""
    found = {}
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        name, colon, rest = line.partition(":")
        if colon and name in names:
            number, *unit = rest.split()
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def resident(pids: list[int]) -> tuple[int, ...] | None:
    """(rss, anon, file, shmem, locked) in bytes, summed over processes, of several in shares; None when one is gone."""
    file, names = ("smaps_rollup", PROPORTIONAL) if len(pids) > 1 else ("status", STATUS)
    try:
        found = [lines_of(pid, file, names) for pid in pids]
        return tuple(sum(each[name] for each in found) for name in names)
    except (OSError, KeyError):
        return None


def resident_bytes(name: str) -> int:
    """`VmHWM` (peak since the process began, or since it was reset) or `VmRSS` (now) of this process."""
    return lines_of("self", "status", (name,))[name]


def written_bytes() -> int:
    """By this process, to any disk."""
    return lines_of("self", "io", ("write_bytes",))["write_bytes"]


def read_status() -> dict[str, int]:
    """The memory lines of this process's ``/proc/self/status``, in bytes."""
    return lines_of("self", "status", ("VmHWM", *STATUS))


def read_proportional() -> dict[str, int]:
    """``/proc/self/smaps_rollup`` under the names of :func:`read_status`: pages shared by several ranks count once."""
    found = lines_of("self", "smaps_rollup", PROPORTIONAL)
    return {name: found[share] for name, share in zip(STATUS, PROPORTIONAL, strict=True)}

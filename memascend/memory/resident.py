"""Resident memory of processes, and bytes that this process wrote, from the kernel's counters. Imports no torch."""

from __future__ import annotations

from pathlib import Path

# Line names in /proc/PID/status and, below, in smaps_rollup, which divides shared pages among their processes.
STATUS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck")
PROPORTIONAL = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Locked")


def lines_of(pid: int | str, file: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the named lines of a file in /proc/PID in bytes, converted from kB. Raises OSError if it is gone."""
    found = {}
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        name, colon, rest = line.partition(":")
        if colon and name in names:
            number, *unit = rest.split()
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def resident(pids: list[int]) -> tuple[int, ...] | None:
    """Return (rss, anon, file, shmem, locked) in bytes, summed over `pids`; None if a process has ended.

    For several processes, shared pages are counted proportionally.
    """
    file, names = ("smaps_rollup", PROPORTIONAL) if len(pids) > 1 else ("status", STATUS)
    try:
        found = [lines_of(pid, file, names) for pid in pids]
        return tuple(sum(each[name] for each in found) for name in names)
    except (OSError, KeyError):
        return None


def resident_bytes(name: str) -> int:
    """Return `VmHWM` (peak since process start or since the last reset) or `VmRSS` (now) of this process, in bytes."""
    return lines_of("self", "status", (name,))[name]


def written_bytes() -> int:
    """Return the bytes that this process has written to disks."""
    return lines_of("self", "io", ("write_bytes",))["write_bytes"]


def read_status() -> dict[str, int]:
    """Return the memory lines of this process's ``/proc/self/status``, in bytes."""
    return lines_of("self", "status", ("VmHWM", *STATUS))


def read_proportional() -> dict[str, int]:
    """Return ``/proc/self/smaps_rollup`` with the keys of :func:`read_status`: pages shared by ranks count once."""
    found = lines_of("self", "smaps_rollup", PROPORTIONAL)
    return {name: found[share] for name, share in zip(STATUS, PROPORTIONAL, strict=True)}

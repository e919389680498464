"""Marks of the kernel boot and the host, for files on file systems that several hosts share.

File locks may be local to a host: the marks show whether this kernel knows the locks of a file's owner.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def marks() -> tuple[str, str]:
    """Return a mark of this kernel boot, which is the same in all containers, and a mark of the host name."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return _mark(f"boot {boot or platform.node()}"), _mark(f"host {platform.node()}")


def is_of_another_host(found: Collection[str]) -> bool:
    """Return whether two marks match neither this boot nor this host's name; False for any other number of marks."""
    return len(found) == 2 and not set(found) & set(marks())


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

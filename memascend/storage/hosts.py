"""Whose locks this kernel knows: marks of its boot and of the host, for what lies on file systems that hosts share."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def marks() -> tuple[str, str]:
    """Of this boot of the kernel, which tells whose locks it knows, in any container; and of the host's name."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return _mark(f"boot {boot or platform.node()}"), _mark(f"host {platform.node()}")


def is_of_another_host(found: Collection[str]) -> bool:
    """Whether two marks are neither of this boot nor of an earlier one of this host; False of anything else."""
    return len(found) == 2 and not set(found) & set(marks())


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""Crash-safe file operations: sync, and atomic replacement. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Call fsync on a file or a folder by its path. Raises OSError if the disk reports an error."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` such that it is the old or the new text at any time, even after a power cut."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link that someone put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)

"""Renamed names: the old name works as before, with one warning (docs/reference/versions.md)."""

from __future__ import annotations

import warnings

REMOVED_IN = "2.0"


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Issue a FutureWarning that `old` is now `new`, attributed by default to the caller of the calling function."""
    text = f"{old} is now {new}: the old name will be removed in {REMOVED_IN}"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)

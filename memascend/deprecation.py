"""Names that have changed: the old one works as before, with one warning (docs/reference/versions.md)."""

from __future__ import annotations

import warnings

REMOVED_IN = "2.0"


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """FutureWarning at the caller of whoever calls this: `old` is now `new`."""
    text = f"{old} is now {new}: the old name will be removed in {REMOVED_IN}"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)

"""Hints for error messages about unknown words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' (did you mean X?)' with the known word most similar to `word`, or '' if none reaches `cutoff`."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""

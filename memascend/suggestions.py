"""The hint at the end of an error about an unknown word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """' (did you mean X?)' with the known word nearest to `word`, or '' where none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""

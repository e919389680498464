"""Hints for error messages about unknown words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# "memasend", "mem_ascend" and "Memascend" are above; "ascend", an accelerator of DeepSpeed's, is 0.8.
_MISSPELLED = 0.85


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' (did you mean X?)' with the known word most similar to `word`, or '' if none reaches `cutoff`."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


def refuse_misspelled(keys: Iterable[object], key: str) -> None:
    """Raise ValueError, in one line, if one of `keys`, of a section in which unknown keys are ignored, is a misspelled
    `key`.

    Words that only resemble it, and keys that are commented out by a sign in front of them, are not meant.
    """
    for given in keys:
        word = str(given).strip().lower()
        if given != key and word[:1].isalnum() and difflib.SequenceMatcher(None, word, key).ratio() > _MISSPELLED:
            raise ValueError(
                f"{given!r} in the DeepSpeed configuration would be ignored (did you mean {key}?): correct the name, "
                "or remove the section"
            )

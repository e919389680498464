"""Safe printing of names and texts from outside the program."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with unprintable characters escaped, since a name in a file can hold terminal control sequences."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)

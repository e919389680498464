"""What is printed of names and texts that others chose."""

from __future__ import annotations


def printable(text: str) -> str:
    """With escapes in place of what a terminal would obey: a name in a file can hold its control sequences."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)

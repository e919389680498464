"""Shared helpers of the parts of `memascend bench`: parsing options and formatting spreads."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

Count = Callable[[str], int]


LARGEST_AMOUNT = 2**63  # sizes in the kernel are signed 64-bit integers


def counts(option: str, text: str, count: Count) -> list[int]:
    """Parse comma-separated counts. Raises ValueError, naming `option`, for an invalid one."""
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option}: {error}") from None


def amounts_of(option: str, text: str, unit: str, other: str = "") -> list[int]:
    """Parse comma-separated numbers of elements or bytes; 3e7 means 30000000.

    Unlike counts, they may be as large as tensors are. Raises ValueError, naming `option`, for an invalid number.
    """
    amounts = []
    for part in text.split(","):
        amount = float(part) if re.fullmatch(r"\d+(\.\d+)?e\d+", part) else int(part) if part.isdecimal() else 0
        if not 0 < amount < LARGEST_AMOUNT or amount != int(amount):
            raise ValueError(
                f"{option}: {part!r} is not a number of {unit}: use comma-separated numbers above zero, such as "
                f"1e6{other}"
            )
        amounts.append(int(amount))
    return amounts


def show(ratio: dict[str, float]) -> str:
    """Return a spread of ratios (see `rounds.Spread`) as text: median and quartiles."""
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def require_folder(folder: Path, option: str = "--folder") -> None:
    """Raise ValueError, naming `option`, unless `folder` is a folder that can be written."""
    if not folder.is_dir():
        raise ValueError(f"{option} {folder} is not a folder: create it first, on the drive to measure")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {folder} cannot be written: make it writable, or name another on that drive")


def in_memory_note(folder: Path) -> list[str]:
    """Return a one-line note if the folder's file system is in memory, otherwise an empty list."""
    from memascend.doctor.checks import IN_MEMORY, file_system

    kind = file_system(folder.resolve())
    return [f"{folder} ({kind}) is in memory: these are not a drive's rates"] if kind in IN_MEMORY else []

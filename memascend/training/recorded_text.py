"""Sizes and checksums of a run's token files, recorded once, so that a run is never resumed with a different text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memascend.storage.atomic_write import write_atomically
from memascend.training.checkpoint import file_checksum
from memascend.training.folder import TOKEN_BYTES, RunFolder

TOKEN_FILES = ("train.tokens", "eval.tokens")
Fingerprints = dict[str, dict[str, int]]


def fingerprints(data: Path) -> Fingerprints:
    """Return the size in bytes and crc32 of each token file in the folder `data`."""
    files = [data / name for name in TOKEN_FILES]
    return {path.name: {"size": path.stat().st_size, "crc32": file_checksum(path)} for path in files}


def recorded(folder: RunFolder) -> Fingerprints | None:
    """Return the fingerprints that the run began with, or None if none were recorded.

    Raises ValueError if the record is damaged.
    """
    try:
        found = json.loads(folder.text.read_text()) if folder.text.is_file() else None
        if found is not None and not _is_whole(found):
            raise ValueError("it is not the size and crc32 of both token files")
        return found
    except ValueError as error:
        raise ValueError(
            f"{folder.text} is damaged ({error}): restore it, or remove it so that --resume uses {folder.data} as it is"
        ) from error


def _is_whole(found: Any) -> bool:
    """Return whether a record has the form of `Fingerprints` for exactly the expected files."""
    if not isinstance(found, dict) or set(found) != set(TOKEN_FILES):
        return False
    return all(
        isinstance(each, dict) and set(each) == {"size", "crc32"} and all(type(value) is int for value in each.values())
        for each in found.values()
    )


def record(folder: RunFolder) -> None:
    """Record the fingerprints of the token files, unless that was done before."""
    if not folder.text.exists():
        write_atomically(folder.text, json.dumps(fingerprints(folder.data), indent=1))


def require_recorded(folder: RunFolder, data: Path) -> None:
    """Raise ValueError if the newly prepared token files in `data` differ from those that the run began with."""
    before = recorded(folder)
    if before is None or (found := fingerprints(data)) == before:
        return
    count, was = (files["train.tokens"]["size"] // TOKEN_BYTES for files in (found, before))
    raise ValueError(
        f"the text is not the one that this run was trained on ({count} training tokens, {was} before; checksums in "
        f"{folder.text}): restore the files of --data and the tokenizer, or start a run on the new text (--model "
        f"{folder.model} --output another)"
    )

"""Preparation of a run's model and text in a separate process; a resumed run checks and reuses the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memascend.training import checkpoint, recorded_text
from memascend.training.children import Stopping, Stuck, kill, last_line, say, stuck, wait
from memascend.training.folder import (
    TOKEN_BYTES,
    RunFolder,
)
from memascend.training.processes import (
    PARENT,
)

PREPARED = {"train_tokens", "eval_tokens"}


def prepare(folder: RunFolder, stopping: Stopping) -> dict[str, Any]:
    """Prepare the run in a child process, or check and reuse what an earlier call prepared; return its facts. Empty if
    a signal came first. Raises a one-line ValueError if the preparation fails, and Stuck if its process cannot be
    killed."""
    prepared = read_prepared(folder)
    if prepared is None:
        say("reading model and text ...")
        folder.logs.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="memascend-train-") as work:
            result, log = Path(work) / "result.json", folder.logs / "prepare.log"
            command = [sys.executable, "-m", "memascend.training.prepare", str(folder.root), str(result)]
            with log.open("wb") as output:
                child = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, PARENT: str(os.getpid())},
                )
                stopping.children = [child]
                wait(stopping)
                if remaining := kill({"the preparation": child}):
                    raise Stuck(stuck(remaining))
            if result.is_file():
                log.unlink()
                raise ValueError(json.loads(result.read_text())["error"])
            prepared = read_prepared(folder)
            if prepared is None and not stopping.asked:
                raise ValueError(f"the preparation failed (exit {child.returncode}): {last_line(log)}; see {log}")
            if not log.stat().st_size:
                log.unlink()
            prepared = prepared or {}
        for note in prepared.get("notes", []):
            say(f"note: {note}")
    else:
        _require_as_prepared(folder, prepared)
    return prepared


def read_prepared(folder: RunFolder) -> dict[str, Any] | None:
    """Return the result of the preparation, or None if it has not finished. Raises ValueError if it is damaged."""
    try:
        found = json.loads(folder.prepared.read_text()) if folder.prepared.is_file() else None
        if found is not None and not (isinstance(found, dict) and found.keys() >= PREPARED):
            raise ValueError("it lacks what the preparation writes")
        return found
    except ValueError as error:
        raise ValueError(f"{folder.prepared} is damaged ({error}): {_prepares_again(folder)}") from error


def _require_as_prepared(folder: RunFolder, prepared: dict[str, Any]) -> None:
    """Raise ValueError unless the prepared files exist and are unchanged.

    With different text, a resumed run would arrive at different weights.
    """
    for name in ("train", "eval"):
        path, wanted = folder.data / f"{name}.tokens", prepared[f"{name}_tokens"] * TOKEN_BYTES
        if not path.is_file():
            raise ValueError(f"{path} is missing: restore it, or {_prepares_again(folder)}")
        if (size := path.stat().st_size) != wanted:
            raise ValueError(
                f"{path} has {size} bytes, {wanted} were prepared: restore it, or {_prepares_again(folder)}"
            )
    recorded = recorded_text.recorded(folder)
    if recorded is None:
        say(f"note: {folder.text} is missing: whether the text is as it was is not checked")
    for name, was in (recorded or {}).items():
        if checkpoint.file_checksum(folder.data / name) != was["crc32"]:
            raise ValueError(
                f"{folder.data / name} has changed since it was prepared (checksum mismatch): restore it, or "
                f"{_prepares_again(folder)}"
            )
    if not folder.tokenizer.is_dir():
        raise ValueError(f"{folder.tokenizer} is missing: restore it, or {_prepares_again(folder)}")
    for path in sorted(folder.tokenizer.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): restore it, or {_prepares_again(folder)}") from error


def _prepares_again(folder: RunFolder) -> str:
    return f"remove {folder.prepared}, and --resume prepares the run's text again"

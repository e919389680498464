"""End a program with one clear line when the configuration, or a folder that it is to write to, is wrong."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from memascend.suggestions import did_you_mean


def fail(message: str) -> NoReturn:
    """End the program with one clear line and no stack trace."""
    sys.exit(message)


def ready(folder: Path, option: str) -> None:
    """Create the folder that the option `option` names, before the minutes of work whose results go into it.

    Raises ValueError with a one-line message if the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: the name contains a null byte
        reason = "is not a folder" if isinstance(error, FileExistsError) else f"cannot be written: {_reason(error)}"
        raise ValueError(f"{option} {str(folder)!r} {reason}; name a folder that this user can write to") from None


def _reason(error: Exception) -> str:
    """Return an error's message without the path, which the caller names."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def checked(document: Any, schema_name: str, where: str) -> Any:
    """Return the document if it fits the JSON schema; otherwise end with one line that names the place and the fix."""
    schema = json.loads(Path("workflows/schemas", schema_name).read_text())
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(document))
    if error is None:
        return document
    place = "/".join(str(part) for part in error.absolute_path) or "top level"
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        hint = did_you_mean(unknown, known) or f"; known keys: {', '.join(known)}"
        fail(f"{where}: {place}: unknown key {unknown!r}{hint}")
    if error.instance is None and error.validator == "type":
        fail(f"{where}: {place}: it has no value; give it one, or leave it out")
    fail(f"{where}: {place}: {error.message}")

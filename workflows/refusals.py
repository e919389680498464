"""What is wrong with the configuration ends with one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from memascend.suggestions import did_you_mean


def fail(message: str) -> NoReturn:
    """End with one clear line and no stack trace."""
    sys.exit(message)


def checked(document: Any, schema_name: str, where: str) -> Any:
    """The document, after it passed the JSON schema; otherwise one line that names the place and the fix."""
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
    fail(f"{where}: {place}: {error.message}")

"""Reading of a DeepSpeed configuration in every form that DeepSpeed accepts, in the way that DeepSpeed reads it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from memascend.integrations.conventions import CONFIG_KEY


def read_configuration(given: Any) -> dict[str, Any] | None:
    """Return the configuration: the dict itself, or the parsed (H)JSON of a file or of base64 text.

    Returns None for anything else, which is left for DeepSpeed to handle. Raises ValueError, in one line with the
    position, for text that contains memascend's key but cannot be parsed. DeepSpeed must be installed.
    """
    if isinstance(given, dict):
        return given
    if not isinstance(given, str | Path):
        return None
    try:
        text = Path(given).read_text() if _is_file(given) else base64.urlsafe_b64decode(str(given)).decode()
    except (OSError, ValueError):
        return None
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        found = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ValueError as error:
        if f'"{CONFIG_KEY}"' not in text:
            return None
        raise ValueError(_mistake(given, text, error)) from None
    return found if isinstance(found, dict) else None


def _is_file(name: str | Path) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a file name, as base64 JSON usually is
        return False


def _mistake(given: str | Path, text: str, error: Any) -> str:
    """Return one line that says where `text` cannot be parsed; `error` is the parser's."""
    what = str(given) if _is_file(given) else "the DeepSpeed configuration in base64"
    line = getattr(error, "lineno", None)
    if line is None:  # a duplicate key
        return f"{what}: {' '.join(str(error).split())}; remove one of the two"
    message = error.msg.split(" (check your syntax")[0]
    lines = text.splitlines()
    if line > len(lines):
        return f"{what} ends too early: {message}; a bracket or a quote is not closed"
    shown = lines[line - 1].strip()[:60]
    return f"{what}, line {line}, column {error.colno}: {message}, in {shown!r}; a comma or a bracket is wrong there"

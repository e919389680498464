"""Deprecated: the documented names of this module are in `memascend.engine.errors`."""

from __future__ import annotations

from typing import Any

from memascend.deprecation import warn_renamed
from memascend.engine import errors


def __getattr__(name: str) -> Any:
    if name != "NotStreamable":
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: it is memascend.engine.unit_weights or model_units now"
        )
    warn_renamed(f"{__name__}.{name}", "memascend.engine.errors.NotStreamable")
    return errors.NotStreamable

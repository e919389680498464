"""Notes of a user's loop as JSON, such that tuples and dict keys other than strings are restored as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PAIRS, _TUPLE = "memascend: pairs", "memascend: tuple"


def to_json(value: Any) -> Any:
    """Return what `from_json` turns into an equal value again. JSON alone turns the keys of a dict, such as the epochs
    of a scheduler, into strings, and tuples into lists."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(each) for key, each in value.items()}
        return {_PAIRS: [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(each) for each in value]}
    return [to_json(each) for each in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """Return the value from which `to_json` has made this one."""
    if isinstance(value, dict):
        if set(value) == {_PAIRS}:
            return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
        if set(value) == {_TUPLE}:
            return tuple(map(from_json, value[_TUPLE]))
        return {key: from_json(each) for key, each in value.items()}
    return list(map(from_json, value)) if isinstance(value, list) else value

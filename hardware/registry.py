"""Loads and validates the descriptions of the papers' testbeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(__file__).parent / "testbeds"
SCHEMA = Path(__file__).parent / "testbeds.schema.json"


def known_testbeds() -> list[str]:
    """Return the ids of all described machines."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_testbed(testbed_id: str) -> dict[str, Any]:
    """Return one machine. Raises a one-line ValueError for an unknown id or a file that violates the schema."""
    if testbed_id not in known_testbeds():
        raise ValueError(f"unknown testbed '{testbed_id}'. Known: {', '.join(known_testbeds())}")
    testbed = yaml.safe_load((FOLDER / f"{testbed_id}.yaml").read_text(encoding="utf-8"))
    check(testbed, f"{testbed_id}.yaml")
    return testbed


def check(testbed: Any, where: str) -> None:
    """Raise a ValueError that names the file and the key if a testbed violates the schema."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    error = jsonschema.exceptions.best_match(validator.iter_errors(testbed))
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path) or "top level"
        raise ValueError(f"{where}: {place}: {error.message}")

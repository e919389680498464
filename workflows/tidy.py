"""The tidy table between data and pictures: its columns, reading and writing it, and names that scripts share."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pandas as pd
from referencing import Registry, Resource

from memascend.planner import model_spec
from workflows.run.provenance import atomically as atomically

COLUMNS = [
    *("exhibit_id", "subfigure", "series", "model", "x_name", "x_value", "metric", "value", "unit", "lane"),
    *("testbed", "source"),
]
LANES = ("published", "author", "modelled", "measured")
GIB = 2**30
OF_REFERENCE = re.compile(r" \[([^\]]+)\]$")  # end of the name of a series measured on another machine: host and date
SCALED = " (x k^2)"  # suffix of a metric: a twin's bytes times k^2, which is the original's size
NO_RESULT = "run without a result: "  # prefix of the metric of a row that stands for all rows of a run
SCHEMAS = Path(__file__).resolve().parent / "schemas"

DENSE_NAMES = ("llama3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
_OTHERS = ("llama3.2-1b", "llama3.2-3b", "qwen2.5-0.5b", "qwen3-30b-a3b", "mistral-nemo-12b")
DISPLAY = {name: model_spec(name).display for name in (*DENSE_NAMES, *_OTHERS)}
# The four models of MemAscend Figs. 4, 11, 13, 15 and 21.
DENSE = tuple(DISPLAY[name] for name in DENSE_NAMES)

AS_PUBLISHED = "ZeRO-Infinity (as published)"
MEMASCEND = "MemAscend"
ZERO_OFFLOAD = "ZeRO-Offload"
ALL_IN_GPU = "All in GPU"
MINIMUM = "theoretical minimum"


class TableError(ValueError):
    """Error in an input; the message is one line and names the file."""


def read_table(path: Path) -> pd.DataFrame:
    """Return a tidy table with every cell a string; empty cells are empty strings."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    missing = [column for column in COLUMNS if column not in table.columns]
    if missing:
        raise TableError(f"{path}: columns {', '.join(missing)} are missing")
    strange = sorted(set(table["lane"]) - set(LANES))
    if strange:
        raise TableError(f"{path}: unknown lane {strange[0]!r}; lanes are {', '.join(LANES)}")
    return table[COLUMNS]


def write_table(rows: pd.DataFrame | Iterable[dict[str, Any]], path: Path, columns: list[str] = COLUMNS) -> None:
    """Write the rows atomically; columns that a row lacks are left empty."""
    table = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    table = table.reindex(columns=columns).astype(object)
    table = table.where(table.notna(), "")
    atomically(path, lambda temporary: table.to_csv(temporary, index=False, lineterminator="\n"))


def is_reference(table: pd.DataFrame) -> pd.Series:
    """Return which rows come from committed records of another machine."""
    return table["series"].map(lambda name: bool(OF_REFERENCE.search(name))).astype(bool)


def numeric(value: str) -> float | None:
    """Return the number in a cell, or None for text such as ``N/A (VRAM OOM)``."""
    try:
        return float(value)
    except ValueError:
        return None


@cache
def validator(schema_name: str) -> jsonschema.protocols.Validator:
    """Return the validator for one of our schemas; references between schemas resolve by file name."""
    schemas = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.schema.json")}
    registry = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in schemas.items())
    return jsonschema.Draft202012Validator(schemas[schema_name], registry=registry)


def check(document: Any, schema_name: str, where: str) -> None:
    """Raise TableError with one line that names the place where ``document`` breaks the schema."""
    error = jsonschema.exceptions.best_match(validator(schema_name).iter_errors(document))
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path)
        message = error.message if len(error.message) < 200 else error.message[:200] + " ..."
        raise TableError(f"{where}: {place or 'top level'}: {message} ({schema_name})")


def fail(error: Exception) -> NoReturn:
    """End the program with one clear line."""
    sys.exit(f"error: {' '.join(str(error).split())}")

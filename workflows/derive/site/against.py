"""Another claims.csv that the claims page compares its own with: read and checked in Python, compared by compare.js."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from markupsafe import Markup

from workflows import tidy
from workflows.derive.claims import LANES
from workflows.derive.site.judged import VERDICTS

# Columns that are compared; all other columns of claims.csv are optional.
COLUMNS = ("claim_id", "lane", "verdict", "value", "expected", "unit")


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a claims.csv with COLUMNS of each; raise a one-line TableError if the file is not one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise tidy.TableError(f"{path}: no claims.csv: column {missing[0]!r} is missing")
            lines = [{name: line[name] or "" for name in COLUMNS} for line in reader]
    except OSError as error:
        raise tidy.TableError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise tidy.TableError(f"{path}: no claims.csv: it is not a table of comma-separated text") from None
    if not lines:
        raise tidy.TableError(f"{path}: a claims.csv without a claim")
    seen = set()
    for number, line in enumerate(lines, 1):
        wrong = fault(line, seen)
        if wrong:
            raise tidy.TableError(f"{path}: claim {number}: {wrong}")
        seen.add((line["claim_id"], line["lane"]))
    return lines


def fault(line: dict[str, str], seen: set[tuple[str, str]]) -> str:
    """Return what is wrong with a line that follows those in `seen`; empty if nothing is."""
    value = tidy.numeric(line["value"])
    if not line["claim_id"]:
        return "it has no id"
    if line["lane"] not in LANES:
        return f"unknown lane {line['lane']!r}; lanes are {', '.join(LANES)}"
    if line["verdict"] not in VERDICTS:
        return f"unknown verdict {line['verdict']!r}; verdicts are {', '.join(VERDICTS)}"
    if line["value"] and (value is None or not math.isfinite(value)):
        return f"value {line['value']!r} is no number"
    if (line["claim_id"], line["lane"]) in seen:
        return f"{line['claim_id']} stands twice in lane {line['lane']}"
    return ""


def embedded(path: Path) -> Markup:
    """Return a claims.csv as JSON for a script element: its name (folder and file) and its lines."""
    name = "/".join(path.resolve().parts[-2:])
    text = json.dumps({"name": name, "lines": read(path)}, ensure_ascii=False, separators=(",", ":"))
    return script_safe(text)


def script_safe(text: str) -> Markup:
    """Return JSON that is safe in a script element, whatever its strings contain."""
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))

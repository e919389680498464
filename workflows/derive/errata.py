"""Write docs/errata.md from the errata that each paper's folder keeps (workflows/papers/<paper>/errata.yaml)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workflows import registry, tidy

INTRODUCTION = """# Errata

Whoever reproduces a paper reads every number twice, and some of them do not go together. This page lists those, with
the place, the computation, and how this repository reads them. They are offered with thanks to the authors, whose work
this repository builds on: none of them touches an idea, most are slips of the pen, and where we are wrong, an issue is
welcome.

Grade A follows from the printed numbers alone, B needs one outside fact, C is plausible and not proven. Written by
`python -m workflows.derive.errata` from `workflows/papers/*/errata.yaml`; edit those.
"""


def errata_of(paper: str) -> dict[str, Any] | None:
    """Return a paper's errata, or None if it has no such file; raise TableError if an entry lacks a field."""
    path = registry.file_of(paper, "errata.yaml")
    found = registry.read(path)
    for entry in found["errata"] if found else ():
        missing = {"id", "grade", "place", "quote", "statement", "computation", "reading"} - entry.keys()
        if missing:
            raise tidy.TableError(f"{path}: {entry.get('id', 'an entry')} lacks {', '.join(sorted(missing))}")
    return found


def as_markdown(found: dict[str, Any]) -> str:
    """Return a paper's errata as Markdown, one section each."""
    parts = [f"## {found['paper']}\n"]
    for entry in found["errata"]:
        lines = [f"### {entry['id']} · {entry['place']} · grade {entry['grade']}\n", f"> {entry['quote']}\n"]
        lines += [f"- **It says**: {entry['statement']}", f"- **The numbers give**: {entry['computation']}"]
        lines.append(f"- **Read here as**: {entry['reading']}")
        if entry.get("claims"):
            lines.append(f"- **Claims**: {', '.join(f'`{claim}`' for claim in entry['claims'])}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def page() -> str:
    """Return the whole text of docs/errata.md."""
    every = (errata_of(paper) for paper in sorted(registry.PAPERS))
    return "\n".join([INTRODUCTION, *(as_markdown(found) for found in every if found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=registry.ROOT / "docs/errata.md")
    args = parser.parse_args()
    try:
        args.out.write_text(page())
    except (tidy.TableError, OSError, ValueError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

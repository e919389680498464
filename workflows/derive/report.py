"""One page with every exhibit that is drawn: picture, caption, data, claims with verdicts; then what is not built."""

from __future__ import annotations

import argparse
import html
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from workflows import registry, tidy
from workflows.derive import pages
from workflows.derive.claims import Verdict, by_exhibit, coarse_twins


def markdown(text: str) -> Markup:
    """HTML of a caption: paragraphs, one list, bold. Captions hold nothing else."""
    out = []
    for block in text.strip().split("\n\n"):
        lines = [re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(line)) for line in block.splitlines()]
        if all(line.startswith("- ") for line in lines):
            out.append("<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>")
        else:
            out.append(f"<p>{' '.join(lines)}</p>")
    return Markup("".join(out))


def read_verdicts(path: Path) -> list[Verdict]:
    """The lines of claims.csv."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [Verdict(**{f.name: line[f.name] for f in fields(Verdict)}) for line in table.to_dict("records")]


def page(entries: list[dict[str, Any]], figures: Path, verdicts: list[Verdict]) -> str:
    """The whole page; it needs nothing but the files beside it."""
    built = [entry for entry in entries if entry["status"] == "built"]
    missing = [entry["id"] for entry in built if not (figures / f"{entry['id']}.md").exists()]
    if missing:
        raise tidy.TableError(f"{missing[0]} is not drawn yet; draw it with: snakemake --cores all {missing[0]}")
    return pages.page(
        "report",
        "Exhibits",
        coarse=coarse_twins(verdicts),
        papers=registry.PAPERS,
        built=built,
        captions={entry["id"]: markdown((figures / f"{entry['id']}.md").read_text()) for entry in built},
        verdicts=by_exhibit(verdicts),
        planned=[entry for entry in entries if entry["status"] == "planned"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=Path, required=True, help="claims.csv")
    parser.add_argument("--figures", type=Path, required=True, help="folder of the drawn exhibits")
    parser.add_argument("--out", type=Path, required=True, help="index.html, in the same folder")
    args = parser.parse_args()
    try:
        text = page(registry.exhibits(), args.figures, read_verdicts(args.claims))
        tidy.atomically(args.out, lambda path: path.write_text(text))
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

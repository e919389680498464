"""One page with every exhibit that is drawn: picture, caption, data, claims with verdicts; then what is not built."""

from __future__ import annotations

import argparse
import html
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from workflows import registry, tidy
from workflows.derive.claims import Verdict, coarse_twins, filled, verdict_rows


def markdown(text: str) -> str:
    """HTML of a caption: paragraphs, one list, bold. Captions hold nothing else."""
    out = []
    for block in text.strip().split("\n\n"):
        lines = [re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(line)) for line in block.splitlines()]
        if all(line.startswith("- ") for line in lines):
            out.append("<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>")
        else:
            out.append(f"<p>{' '.join(lines)}</p>")
    return "".join(out)


def section(entry: dict[str, Any], figures: Path, verdicts: list[Verdict]) -> str:
    """Picture, caption, links and claims of one exhibit."""
    name = entry["id"]
    files = ", ".join(f"<a href='{name}.{end}'>{end.upper()}</a>" for end in ("csv", "svg", "pdf", "png"))
    mine = [v for v in verdicts if v.exhibit_id == name]
    claims = f"<details><summary>{len(mine)} verdicts</summary>{verdict_rows(mine)}</details>" if mine else ""
    return (
        f"<section id='{name}'><h2>{name}</h2><figure>"
        f"<a href='{name}.svg'><img src='{name}.svg' alt='{html.escape(entry['title'], quote=True)}'></a>"
        f"<figcaption>{markdown((figures / f'{name}.md').read_text())}</figcaption></figure>"
        f"<p>{files}</p>{claims}</section>"
    )


def contents(entries: list[dict[str, Any]]) -> str:
    """A line of links for each paper; there they are named by their kind and number alone."""
    lines = []
    for paper, name in registry.PAPERS.items():
        mine = [entry["id"] for entry in entries if entry["paper"] == paper]
        links = " ".join(f"<a href='#{one}'>{one.rpartition('-')[2]}</a>" for one in mine)
        lines.append(f"<p><b>{name}</b> {links}</p>" if mine else "")
    return "".join(lines)


def planned_list(entries: list[dict[str, Any]]) -> str:
    """What is not built, by the part that it waits for."""
    parts = dict.fromkeys(entry["waits_for"] for entry in entries)
    ids = {part: " ".join(entry["id"] for entry in entries if entry["waits_for"] == part) for part in parts}
    items = (f"<li>{html.escape(part)}: {html.escape(names)}</li>" for part, names in ids.items())
    return f"<ul>{''.join(items)}</ul>"


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
    return filled(
        "report",
        "Exhibits",
        coarse=coarse_twins(verdicts),
        contents=contents(built),
        sections="\n".join(section(entry, figures, verdicts) for entry in built),
        planned=planned_list([entry for entry in entries if entry["status"] == "planned"]),
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

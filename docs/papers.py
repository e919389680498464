"""Draw one figure of each paper for docs/explanation/five-papers.md: published and modelled numbers, nothing measured.

usage: python docs/papers.py     (make diagrams; some minutes)
Writes docs/img/papers/<exhibit>.svg.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from workflows import registry, tidy
from workflows.derive import figure, table
from workflows.panels import style

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/img/papers"
# Exhibit: how many of its panels are drawn; the others show measurements alone.
SHOWN = {"lohan-fig06a": None, "mlpoffload-fig15": 1, "cxl-fig13": None, "ssdtrain-fig06": None}


def rows_of(exhibit: str) -> pd.DataFrame:
    """The published and the modelled rows of an exhibit."""
    made = [row for row in table.rows_of(table.paper_of(exhibit)).modelled() if row["exhibit_id"] == exhibit]
    modelled = pd.DataFrame([dict.fromkeys(tidy.COLUMNS, "") | row for row in made], columns=tidy.COLUMNS)
    published = table.published_rows(ROOT / "results/published", exhibit)
    return pd.concat([published, modelled.astype(str)], ignore_index=True)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for exhibit, panels in SHOWN.items():
        spec = dict(registry.figures(table.paper_of(exhibit))[exhibit])
        if panels is not None:
            spec |= {"panels": spec["panels"][:panels], "widths": None, "size": (8.0, 4.0)}
        rows = rows_of(exhibit)
        foot = figure.footer(figure.provenance(rows, pd.DataFrame()))
        drawn = figure.draw(spec, rows, foot)
        drawn.savefig(IMAGES / f"{exhibit}.svg", metadata={"Date": None})
        text = style.titled((IMAGES / f"{exhibit}.svg").read_text())
        (IMAGES / f"{exhibit}.svg").write_text(text)
        print((IMAGES / f"{exhibit}.svg").relative_to(ROOT))


if __name__ == "__main__":
    main()

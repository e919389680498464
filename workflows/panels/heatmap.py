"""A number for each pair: series down, x across.

metric, where, derive   what is drawn;   order   series from above;   columns   x values;   form   of a cell
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from workflows.panels import data as of
from workflows.panels import style


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Cells shaded by their number; (series, lane) of what was drawn."""
    mine = of.shown(table, panel)
    names = of.ordered(mine["series"], panel.get("order", []))
    columns = [str(x) for x in panel.get("columns", [])] or list(dict.fromkeys(mine["x_value"]))
    cells = mine.pivot_table(index="series", columns="x_value", values="number", aggfunc="first")
    cells = cells.reindex(index=names, columns=columns)
    axis.imshow(cells.to_numpy(dtype=float), cmap="Blues", aspect="auto", alpha=0.75)
    axis.grid(visible=False)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(names)), names)
    for y, name in enumerate(names):
        for x, column in enumerate(columns):
            number = cells.loc[name, column]
            text = "not stated" if pd.isna(number) else panel.get("form", "{:g}").format(number)
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=style.INK)
    return sorted({(row.series, row.lane) for row in mine.itertuples()})

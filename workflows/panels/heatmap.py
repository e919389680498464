"""A number for each pair: series down, x across.

metric, where, derive   what is drawn;   order   series from above;   columns   x values;   form   of a cell
down   the column that stands in place of the series;   empty   words where no number is;   limits   of the shades
ticks   {name: words beside its line}
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
    down = panel.get("down", "series")
    names = of.ordered(mine[down], panel.get("order", []))
    columns = [str(x) for x in panel.get("columns", [])] or list(dict.fromkeys(mine["x_value"]))
    cells = mine.pivot_table(index=down, columns="x_value", values="number", aggfunc="first")
    cells = cells.reindex(index=names, columns=columns)
    low, high = panel.get("limits", (None, None))
    axis.imshow(cells.to_numpy(dtype=float), cmap="Blues", aspect="auto", alpha=0.75, vmin=low, vmax=high)
    axis.grid(visible=False)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(names)), [panel.get("ticks", {}).get(name, name) for name in names])
    for y, name in enumerate(names):
        for x, column in enumerate(columns):
            number = cells.loc[name, column]
            text = panel.get("empty", "not stated") if pd.isna(number) else panel.get("form", "{:g}").format(number)
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=style.INK)
    return sorted({(row.series, row.lane) for row in mine.itertuples()})

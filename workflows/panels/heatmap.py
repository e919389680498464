"""A number for each pair: series down, x across.

metric, where, derive   what is drawn;   order   series from above;   columns   x values;   form   format of a cell
down   the column used in place of the series;   empty   text of a cell without a number;   limits   of the colour scale
ticks   {name: label next to its line}
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import seaborn
from matplotlib.axes import Axes

from workflows.panels import data as panel_data
from workflows.panels import style


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw cells shaded by their number, and return (series, lane) of what was drawn."""
    mine = panel_data.shown(table, panel)
    down = panel.get("down", "series")
    names = panel_data.ordered(mine[down], panel.get("order", []))
    columns = [str(x) for x in panel.get("columns", [])] or list(dict.fromkeys(mine["x_value"]))
    cells = mine.pivot_table(index=down, columns="x_value", values="number", aggfunc="first")
    cells = cells.reindex(index=names, columns=columns)
    low, high = panel.get("limits", (None, None))
    words = cells.map(panel.get("form", "{:g}").format)
    look = {"cmap": "Blues", "alpha": 0.75, "vmin": low, "vmax": high, "cbar": False}
    seaborn.heatmap(cells, ax=axis, annot=words, fmt="", annot_kws={"fontsize": 8, "color": style.INK}, **look)
    for y, x in zip(*cells.isna().to_numpy().nonzero()):
        empty = panel.get("empty", "not stated")
        axis.text(x + 0.5, y + 0.5, empty, ha="center", va="center", fontsize=8, color=style.INK)
    axis.grid(visible=False)
    axis.set(xlabel="", ylabel="")
    axis.tick_params(rotation=0)
    axis.set_yticks(axis.get_yticks(), [panel.get("ticks", {}).get(name, name) for name in names])
    return sorted({(row.series, row.lane) for row in mine.itertuples()})

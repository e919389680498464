"""Tasks on their resources over time: rows with x_name "begin (s)"; x_value is the begin, value the duration.

metrics name the tasks;   order   the lines from above;   parts   {metric: colour}
form   of a label;   least   seconds of the shortest bar with a label
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from workflows.panels import data as panel_data
from workflows.panels import style

BEGIN = "begin (s)"


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw a bar per task, with a line per series, and return (task, lane) of each."""
    table = panel_data.select(table, panel.get("where"))
    table = table[table["number"].notna() & table["x_name"].eq(BEGIN)]
    rows = [
        (lane, series)
        for lane in panel_data.lanes_of(table)
        for series in panel_data.ordered(table["series"], panel["order"])
    ]
    rows = [row for row in rows if ((table["lane"] == row[0]) & (table["series"] == row[1])).any()]
    drawn = []
    for line, (lane, series) in enumerate(rows):
        for task in table[(table["lane"] == lane) & (table["series"] == series)].itertuples():
            fill = style.colour(task.metric, panel["parts"])
            bar = axis.barh([line], [task.number], 0.7, left=[task.at], **style.surface(lane, fill))
            if task.number >= panel.get("least", 0.0):
                text = panel.get("form", "{} {:g} s").format(task.metric, task.number)
                axis.bar_label(bar, [text], label_type="center", fontsize=7, bbox=BOX)
            drawn.append((task.metric, lane))
    axis.set_yticks(range(len(rows)), [f"{series}\n{lane}" for lane, series in rows])
    axis.invert_yaxis()
    axis.grid(visible=True, axis="x")
    axis.set_xlim(left=0)
    return drawn


BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}

"""MemAscend Fig. 19: training and evaluation loss of both systems."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import curves, style
from workflows.scripts.tidy import AS_PUBLISHED, MEMASCEND, numeric

LOOKS = {AS_PUBLISHED: {"linewidth": 4.5, "alpha": 0.45}, MEMASCEND: {"linewidth": 1.3}}
HEAD_INCHES = 0.3


def draw(table: pd.DataFrame) -> Figure:
    """The one curve lies on the other: the wide one below is ZeRO-Infinity's."""
    figure, (left, right) = style.canvas(2, width=9.6, height=3.9)
    data = curves.prepared(table)
    differences = table.assign(number=table["value"].map(numeric)).set_index("metric")["number"]
    for axis, what in ((left, "training loss"), (right, "evaluation loss")):
        for series, look in LOOKS.items():
            mine = data[(data["metric"] == what) & (data["series"] == series) & (data["lane"] == "measured")]
            mine = mine.sort_values("at")
            marker = {} if what == "training loss" else {"marker": "o", "markersize": 3 + 2 * look["linewidth"] / 1.3}
            axis.plot(mine["at"], mine["number"], color=style.colour(series), **look, **marker)
        axis.set(xlabel="training step", ylabel=f"{what} (nats a token)")
        axis.grid(visible=True, axis="both")
        metric = f"largest difference in {what}"
        if metric in differences.index:
            worst = differences[[metric]].max()
            axis.set_title(f"largest difference over all steps: {worst:g}", fontsize=8, loc="right")
    handles = [Line2D([], [], color=style.colour(s), label=f"{s}, measured", **look) for s, look in LOOKS.items()]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.01, 1.0), ncols=2, frameon=False)
    return figure

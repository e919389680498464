"""MemAscend Fig. 9: peak system memory of Qwen2.5-7B against the context, two GPUs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import curves, style

HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """Both systems, the cap, and the contexts that the paper says they reach under it."""
    figure, (axis,) = style.canvas(1, width=8.4, height=4.4)
    data = curves.prepared(table)
    curves.curves(axis, data, curves.PEAK, curves.AT_CONTEXT)
    curves.caps(axis)
    curves.tokens_axis(axis)
    axis.set_ylabel(curves.MEMORY_LABEL)
    reached(axis, data, "largest context", 1024, "K tokens")
    curves.legend(figure, data)
    return figure


def reached(
    axis, data: pd.DataFrame, metric: str, divisor: int, unit: str, offset: tuple[float, float] = (6, 6)
) -> None:
    """What each system reaches under the cap, by the paper, as a mark on the cap; `offset` of its words, in points."""
    printed = data[(data["lane"] == "published") & (data["metric"] == metric)].drop_duplicates("series")
    for each in printed.itertuples():
        axis.plot([each.number], [128], zorder=5, **curves.look(each.series, "published"))
        axis.annotate(
            f"paper: {each.number / divisor:g}{unit}",
            (each.number, 128),
            xytext=offset if each.number < 60 * divisor else (-6, 6),
            textcoords="offset points",
            ha="left" if each.number < 60 * divisor else "right",
            fontsize=7.5,
            color=style.colour(each.series),
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.5},
        )

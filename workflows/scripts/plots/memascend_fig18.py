"""MemAscend Fig. 18: Qwen3-30B-A3B, memory and throughput against context and batch."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import curves, style

HYPOTHESIS = "peak system memory, hypothesis H1"
HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """Left against the context, right against the batch; memory above, throughput below."""
    figure, axes = style.canvas(2, width=9.6, height=6.4, lines=2)
    data = curves.prepared(table)
    for column, (letter, x_name) in enumerate((("a", curves.AT_CONTEXT), ("b", curves.AT_BATCH))):
        mine = data[data["subfigure"] == letter]
        above, below = axes[column], axes[2 + column]
        curves.curves(above, mine, curves.PEAK, x_name)
        hypothesis(above, mine, x_name)
        curves.curves(below, mine, "throughput", x_name)
        above.set_title(f"({letter})", fontsize=9)
        for axis in (above, below):
            if x_name == curves.AT_CONTEXT:
                curves.tokens_axis(axis)
            else:
                axis.set_xlim(left=0)
                axis.set_xlabel("batch (sequences of 4096 tokens a GPU)")
    axes[0].set_ylabel(curves.MEMORY_LABEL)
    axes[2].set_ylabel("throughput (tokens/s)")
    text = "modelled, hypothesis H1: experts stay in memory"
    dotted = Line2D([], [], color=style.GREY, linestyle=":", linewidth=1.6, label=text)
    curves.legend(figure, data, more=(dotted,))
    return figure


def hypothesis(axis, data: pd.DataFrame, x_name: str) -> None:
    for series in curves.SYSTEMS:
        mine = data[(data["metric"] == HYPOTHESIS) & (data["series"] == series) & (data["x_name"] == x_name)]
        mine = mine.sort_values("at")
        axis.plot(mine["at"], mine["number"], color=style.colour(series), linestyle=":", linewidth=1.6)
    curves.from_zero(axis)

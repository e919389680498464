"""MemAscend Fig. 16: peak system memory against the context, four models, two GPUs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import curves, style
from workflows.scripts.tidy import DENSE

HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each model."""
    figure, axes = style.canvas(4, width=13.2, height=3.9)
    data = curves.prepared(table)
    for axis, model, letter in zip(axes, DENSE, "abcd", strict=True):
        mine = data[data["model"] == model]
        curves.curves(axis, mine, curves.PEAK, curves.AT_CONTEXT)
        curves.tokens_axis(axis)
        axis.set_title(f"({letter}) {model}", fontsize=9)
    axes[0].set_ylabel(curves.MEMORY_LABEL)
    curves.legend(figure, data)
    return figure

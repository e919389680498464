"""MemAscend Fig. 17: system memory and throughput against the batch, four models, two GPUs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import curves, style
from workflows.scripts.tidy import DENSE

HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """A column for each model: memory above, throughput below."""
    figure, axes = style.canvas(4, width=13.2, height=6.2, lines=2)
    data = curves.prepared(table)
    for column, (model, letter) in enumerate(zip(DENSE, "abcd", strict=True)):
        mine = data[data["model"] == model]
        above, below = axes[column], axes[4 + column]
        curves.curves(above, mine, curves.PEAK, curves.AT_BATCH)
        curves.curves(below, mine, "throughput", curves.AT_BATCH)
        above.set_title(f"({letter}) {model}", fontsize=9)
        below.set_xlabel("batch (sequences a GPU)")
        for axis in (above, below):
            axis.set_xlim(left=0)
    axes[0].set_ylabel(curves.MEMORY_LABEL)
    axes[4].set_ylabel("throughput (tokens/s)")
    curves.legend(figure, data)
    return figure

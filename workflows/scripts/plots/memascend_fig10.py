"""MemAscend Fig. 10: peak system memory and throughput of Qwen2.5-7B against the batch, two GPUs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import curves, style
from workflows.scripts.plots.memascend_fig09 import reached

HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """Left memory with the cap, right tokens a second."""
    figure, (left, right) = style.canvas(2, width=10.6, height=4.3)
    data = curves.prepared(table)
    curves.curves(left, data, curves.PEAK, curves.AT_BATCH)
    curves.caps(left, at=0.39)
    reached(left, data, "largest batch", 1, " sequences", offset=(-4, 18))
    left.set_ylabel(curves.MEMORY_LABEL)
    curves.curves(right, data, "throughput", curves.AT_BATCH)
    right.set_ylabel("throughput (tokens/s)")
    for axis in (left, right):
        axis.set_xlabel("batch (sequences of 4096 tokens a GPU)")
        axis.set_xlim(left=0)
    boost(right, data)
    curves.legend(figure, data)
    return figure


def boost(axis, data: pd.DataFrame) -> None:
    """The modelled factor from batch 4 to 32, beside the paper's."""
    mine = data[(data["metric"] == "throughput") & (data["lane"] == "modelled") & (data["series"] == curves.SYSTEMS[1])]
    at = mine.set_index("at")["number"]
    if {4, 32} <= set(at.index):
        text = f"batch 4 to 32: {at[32] / at[4]:.1f} x modelled,\n8 x printed (the ratio of the batches)"
        axis.annotate(text, (0.97, 0.08), xycoords="axes fraction", ha="right", fontsize=8)
        axis.plot([4, 32], [at[4], at[32]], marker="o", linestyle="none", color=style.BLACK, markersize=4)

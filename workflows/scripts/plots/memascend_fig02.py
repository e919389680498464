"""MemAscend Fig. 2: GPU memory of an 8B model as techniques are added, short and long context."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from workflows.scripts.plots import curves, style

STACKS = ("ZeRO-Infinity", "+GC", "+Liger/Flash", "+Offloaded-GC")
METRIC = "peak device memory"
COLOURS = dict(zip(STACKS, (style.VERMILION, style.ORANGE, style.SKY, style.BLUE), strict=True))
HEAD_INCHES = 0.5


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each context; logarithmic, as the paper's."""
    figure, axes = style.canvas(2, width=9.6, height=4.2)
    data = curves.prepared(table.assign(series=table["series"].replace({"ZeRO-Infinity (as published)": STACKS[0]})))
    data["series"] = data["series"].replace({"ZeRO-Infinity (as published)": STACKS[0]})
    mine = data[data["metric"] == METRIC]
    lanes = [lane for lane in style.LANE_ORDER if lane in set(mine["lane"])]
    for axis, context, letter in zip(axes, (512, 32_768), "ab", strict=True):
        bars(axis, mine[mine["at"] == context], lanes)
        here = (data["metric"] == "batch size") & (data["lane"] == "measured") & (data["at"] == context)
        batch = data.loc[here, "number"]
        sequences = f"; measured with a batch of {batch.iloc[0]:g}" if len(batch) and batch.iloc[0] != 4 else ""
        axis.set_title(f"({letter}) context {context}, batch 4{sequences}", fontsize=9)
    axes[0].set_ylabel("GPU memory (GiB; measured × k²)")
    style.legend(figure, COLOURS, lanes)
    return figure


def bars(axis: Axes, data: pd.DataFrame, lanes: list[str]) -> None:
    width = 0.8 / max(1, len(lanes))
    for i, lane in enumerate(lanes):
        for position, series in enumerate(STACKS):
            found = data[(data["lane"] == lane) & (data["series"] == series)]["number"]
            if len(found):
                at = position + (i - (len(lanes) - 1) / 2) * width
                drawn = axis.bar([at], [found.iloc[0]], 0.86 * width, **style.surface(lane, COLOURS[series]))
                height = found.iloc[0]
                style.label_bars(axis, drawn, [f"{height:,.{1 if height < 100 else 0}f}"])
    axis.set_yscale("log")
    heights = [bar.get_height() for bar in axis.patches]
    close = heights and max(heights) / min(heights) < 30
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.margins(y=0.2)
    axis.set_xticks(range(len(STACKS)), STACKS)

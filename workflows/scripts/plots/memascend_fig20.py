"""MemAscend Fig. 20: SSD traffic of one iteration, fp32 states against bf16 states."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflows.scripts.plots import bars, rows, style

VOLUME, AN_ELEMENT = "I/O volume per iteration", "I/O per parameter"
SERIES = ("MemAscend", "MemAscend + bf16 optimizer")


def draw(table: pd.DataFrame) -> Figure:
    """Left the volume of each model, right bytes a parameter and what remains of them."""
    figure, (left, right) = style.canvas(2, width=10.4, height=4.2, ratios=[1.7, 1])
    data = rows.comparable(table[table["metric"].str.startswith((VOLUME, AN_ELEMENT))])
    bars.grouped(left, data, VOLUME, decimals=0)
    left.set_ylabel("I/O volume of an iteration (GiB; measured × k²)")
    remaining(right, data)
    lanes = [lane for lane in style.LANE_ORDER if lane in set(data["lane"])]
    style.legend(figure, {series: style.colour(series) for series in SERIES}, lanes)
    return figure


def remaining(axis: Axes, data: pd.DataFrame) -> None:
    """What bf16 states leave of the volume; the printed 58 % is a dashed line, right if it is what remains."""
    models = [m for m in rows.models_of(data) if m in set(data["model"])]
    lanes = [lane for lane in style.LANE_ORDER if lane in set(data["lane"])]
    width = 0.8 / max(1, len(lanes))
    for i, lane in enumerate(lanes):
        for position, model in enumerate(models):
            whole, left = (rows.value(data, lane=lane, model=model, series=s, metric=AN_ELEMENT) for s in SERIES)
            if whole and left:
                at = position + (i - (len(lanes) - 1) / 2) * width
                look = style.surface(lane, style.colour(SERIES[1]))
                drawn = axis.bar([at], [100 * left / whole], 0.86 * width, **look)
                style.label_inside(axis, drawn, [f"{left:.1f} of {whole:.1f} B"])
    axis.axhline(58, color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
    axis.set_title("dashed: 58 %, printed as the reduction", fontsize=8, loc="right")
    axis.set_xticks(range(len(models)), [m.replace("-", "-\n", 1) for m in models])
    axis.tick_params(axis="x", labelsize=7.5)
    axis.set_ylabel("remains with bf16 states (%)")
    axis.set_ylim(0, 70)

"""MemAscend Fig. 13: memory that the overflow check takes beside the gradient buffer."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflows.scripts.plots import bars, rows, style
from workflows.scripts.tidy import AS_PUBLISHED

FACTOR = "extra memory relative to the buffer"


def draw(table: pd.DataFrame) -> Figure:
    """Left for each model in training, right each way of checking one buffer."""
    factors = table[table["metric"] == FACTOR]
    figure, axes = (
        style.canvas(2, width=10.0, height=4.2, ratios=[2.4, 1])
        if len(factors)
        else style.canvas(1, width=7.6, height=4.2)
    )
    data = rows.comparable(table)
    bars.grouped(axes[0], data, "overflow check overhead")
    axes[0].set_ylabel("extra memory of the check (GiB; measured × k²)")
    shown = data[(data["metric"] == "overflow check overhead") & data["model"].isin(rows.ORDER)]
    series = rows.series_of(shown)
    lanes = set(shown["lane"])
    if len(factors):
        ways(axes[1], rows.comparable(factors), rows.value(data, lane="published", metric="overflow check headroom"))
        lanes |= {"measured", "published"}
        series += [s for s in rows.series_of(factors) if s not in series]
    style.legend(figure, {s: style.colour(s) for s in series}, list(lanes))
    return figure


def ways(axis: Axes, factors: pd.DataFrame, printed: float | None) -> None:
    """Extra memory of each way to check the same buffer, as a multiple of it."""
    names = rows.series_of(factors)
    heights = [rows.value(factors, series=name) or 0.0 for name in names]
    for i, (name, height) in enumerate(zip(names, heights, strict=True)):
        drawn = axis.bar([i], [height], 0.6, **style.surface("measured", style.colour(name)))
        axis.bar_label(drawn, [f"{height:.2f}" if height else "0"], padding=3, fontsize=7.5)
    if printed is not None:
        drawn = axis.bar(
            [names.index(AS_PUBLISHED)] if AS_PUBLISHED in names else [0],
            [printed],
            0.76,
            **{**style.surface("published", style.VERMILION), "facecolor": "none"},
        )
    short = {AS_PUBLISHED: "isinf/isnan\nchain", "torch.aminmax": "torch.\naminmax", "MemAscend": "fused"}
    axis.set_xticks(range(len(names)), [short.get(name, name) for name in names])
    axis.set_ylabel("extra memory / buffer (×)")
    axis.margins(y=0.15)
    axis.set_ylim(bottom=0)

"""MemAscend Fig. 4: what of ZeRO-Infinity's system memory is required, and what is wasted."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflows.scripts.plots import bars, rows, style
from workflows.scripts.tidy import AS_PUBLISHED

PARTS = {"required": style.BLUE, "overhead": style.VERMILION}


def draw(table: pd.DataFrame) -> Figure:
    """Stacked amounts on the left, the wasted share on the right."""
    figure, (left, right) = style.canvas(2, width=9.4, height=4.2, ratios=[1.9, 1])
    data = rows.comparable(table)
    parts = data[(data["series"] == AS_PUBLISHED) & data["metric"].isin(PARTS) & data["model"].isin(rows.ORDER)]
    lanes = [lane for lane in style.LANE_ORDER if lane in set(parts["lane"])]
    stacked(left, parts, lanes)
    shares(right, parts, lanes)
    bars.average_line(right, rows.value(data, lane="published", metric="average system memory wasted"))
    named = {"required (MemAscend's peak)": style.BLUE, "overhead (wasted)": style.VERMILION}
    style.legend(figure, named, lanes)
    return figure


def stacked(axis: Axes, parts: pd.DataFrame, lanes: list[str]) -> None:
    models = rows.models_of(parts)
    width = 0.72 / max(1, len(lanes))
    for i, lane in enumerate(lanes):
        for position, model in enumerate(models):
            required, overhead = (rows.value(parts, lane=lane, model=model, metric=m) for m in PARTS)
            if required is None or overhead is None:
                continue
            at = position + (i - (len(lanes) - 1) / 2) * width
            axis.bar([at], [required], 0.86 * width, **style.surface(lane, PARTS["required"]))
            top = axis.bar([at], [overhead], 0.86 * width, bottom=[required], **style.surface(lane, PARTS["overhead"]))
            style.label_bars(axis, top, [f"{required + overhead:.1f}"])
    axis.set_xticks(range(len(models)), models)
    axis.set_xlim(-0.55, len(models) - 0.45)
    axis.set_ylabel("peak of ZeRO-Infinity (GiB; measured × k²)")
    axis.margins(y=0.16)
    axis.set_ylim(bottom=0)


def shares(axis: Axes, parts: pd.DataFrame, lanes: list[str]) -> None:
    models = rows.models_of(parts)
    width = 0.72 / max(1, len(lanes))
    for i, lane in enumerate(lanes):
        at, heights = [], []
        for position, model in enumerate(models):
            required, overhead = (rows.value(parts, lane=lane, model=model, metric=m) for m in PARTS)
            if required is not None and overhead is not None:
                at.append(position + (i - (len(lanes) - 1) / 2) * width)
                heights.append(100 * overhead / (required + overhead))
        drawn = axis.bar(at, heights, 0.86 * width, **style.surface(lane, PARTS["overhead"]))
        style.label_inside(axis, drawn, [f"{h:.1f}" for h in heights])
    axis.set_xticks(range(len(models)), [m.replace("-", "-\n", 1) for m in models])
    axis.set_xlim(-0.55, len(models) - 0.45)
    axis.set_ylabel("wasted share (%)")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.margins(y=0.08)
    axis.set_ylim(bottom=0)

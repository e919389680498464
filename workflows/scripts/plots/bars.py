"""Panels of bars that several exhibits share."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflows.scripts.plots import rows, style
from workflows.scripts.tidy import AS_PUBLISHED, MEMASCEND


def grouped(axis: Axes, table: pd.DataFrame, metric: str, decimals: int = 1) -> None:
    """A group for each model; in it a bar for each series and lane that any model has."""
    table = table[(table["metric"] == metric) & table["model"].isin(rows.ORDER)]
    models, pairs = rows.models_of(table), bars_of(table)
    heights = {(m, s, lane): rows.value(table, series=s, lane=lane, model=m) for m in models for s, lane in pairs}
    present = {m: [pair for pair in pairs if heights[m, *pair] is not None] for m in models}
    width = 0.84 / max(1, *map(len, present.values()))
    for position, model in enumerate(models):
        for i, (series, lane) in enumerate(present[model]):
            at, height = position + (i - (len(present[model]) - 1) / 2) * width, heights[model, series, lane]
            fill = style.colour(series)
            drawn = axis.bar([at], [height], 0.86 * width, **style.surface(lane, fill))
            style.label_bars(axis, drawn, [f"{height:.{decimals}f}" if height else "0"], fill)
    axis.set_xticks(range(len(models)), models)
    axis.set_xlim(-0.55, len(models) - 0.45)
    axis.margins(y=0.16)
    axis.set_ylim(bottom=0)


def bars_of(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(series, lane) pairs in drawing order."""
    present = set(zip(table["series"], table["lane"], strict=True))
    return [(s, lane) for s in rows.series_of(table) for lane in style.LANE_ORDER if (s, lane) in present]


def reductions(axis: Axes, table: pd.DataFrame, metric: str, printed_average: float | None) -> None:
    """Reduction from as published to MemAscend, for each model and lane; the paper's average as a dashed line."""
    table = table[table["metric"] == metric]
    models = [m for m in rows.models_of(table) if m in set(table["model"])]
    percent = {m: percents(table, m) for m in models}
    width = 0.8 / max(1, *map(len, percent.values()))
    for position, model in enumerate(models):
        for i, (lane, height) in enumerate(percent[model].items()):
            at = position + (i - (len(percent[model]) - 1) / 2) * width
            drawn = axis.bar([at], [height], 0.86 * width, **style.surface(lane, style.colour(MEMASCEND)))
            style.label_inside(axis, drawn, [f"{height:.1f}"])
    average_line(axis, printed_average)
    axis.set_xticks(range(len(models)), [m.replace("-", "-\n", 1) for m in models])
    axis.set_xlim(-0.55, len(models) - 0.45)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.margins(y=0.08)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("reduction (%)")


def percents(table: pd.DataFrame, model: str) -> dict[str, float]:
    """Lane -> reduction in percent, for the lanes that have both systems."""
    out = {}
    for lane in style.LANE_ORDER:
        before, after = (rows.value(table, series=s, lane=lane, model=model) for s in (AS_PUBLISHED, MEMASCEND))
        if before and after is not None:
            out[lane] = 100 * (1 - after / before)
    return out


def average_line(axis: Axes, value: float | None) -> None:
    """The average that the paper prints."""
    if value is not None:
        axis.axhline(value, color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
        axis.set_title(f"dashed: the paper's average, {value:g} %", fontsize=8, loc="right")


def amount_and_reduction(
    table: pd.DataFrame, metric: str, unit_label: str, average_metric: str, decimals: int = 1
) -> Figure:
    """Left the amounts for each model, right the reduction."""
    figure, (left, right) = style.canvas(2, width=10.4, height=4.3, ratios=[2.6, 1])
    data = rows.comparable(table)
    grouped(left, data, metric, decimals)
    left.set_ylabel(unit_label)
    average = rows.value(data, lane="published", metric=average_metric)
    reductions(right, data, metric, average)
    shown = data[data["metric"] == metric]
    style.legend(figure, {s: style.colour(s) for s in rows.series_of(shown)}, list(shown["lane"]))
    return figure

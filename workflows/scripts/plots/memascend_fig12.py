"""MemAscend Fig. 12: latency of the overflow check by size; measured sizes, and lines to the models' gradients."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import rows, style
from workflows.scripts.tidy import MEMASCEND, numeric

LATENCY, LOW, HIGH = (
    "overflow check latency" + end for end in ("", ", lower quartile over rounds", ", upper quartile over rounds")
)
REDUCTION, AVERAGE = "overflow check latency reduction", "average overflow check latency reduction"
SHORT = {"Llama3.2-1B": "1B", "Llama3.2-3B": "3B", "Llama3.1-8B": "8B", "Qwen2.5-7B": "7B"}
SHORT |= {"Qwen2.5-14B": "14B", "Qwen2.5-32B": "32B"}
NOT_DRAWN = ("native read loop",)

HEAD_INCHES = 0.62


def draw(table: pd.DataFrame) -> Figure:
    """Left the latencies, right how much shorter the fused check is than ZeRO-Infinity's chain."""
    figure, (left, right) = style.canvas(2, width=10.6, height=4.6, ratios=[1.55, 1])
    table = table.assign(number=table["value"].map(numeric), at=table["x_value"].map(numeric))
    table = table[~table["series"].isin(NOT_DRAWN)]
    latencies(left, table)
    reductions(right, table)
    shown = rows.series_of(table[(table["metric"] == LATENCY) & table["number"].notna()])
    legend(figure, shown)
    return figure


def line(series: str) -> dict[str, Any]:
    """Today's DeepSpeed runs the paper's chain: dashed, so that both are seen. What is no system is dotted."""
    if series.startswith("ZeRO-Infinity (DeepSpeed"):
        return {"color": style.colour(series), "linestyle": (0, (2.5, 1.5)), "linewidth": 1.8}
    if series.startswith(("ZeRO-Infinity", MEMASCEND)):
        return {"color": style.colour(series), "linestyle": "-", "linewidth": 1.8}
    return {"color": style.colour(series), "linestyle": ":", "linewidth": 1.3}


def latencies(axis: Axes, table: pd.DataFrame) -> None:
    drawn = table[table["metric"].isin((LATENCY, LOW, HIGH)) & table["number"].notna() & table["at"].notna()]
    measured, modelled = (drawn[drawn["lane"] == lane] for lane in ("measured", "modelled"))
    for series in rows.series_of(drawn):
        parts = (measured[(measured["series"] == series) & (measured["metric"] == m)] for m in (LATENCY, LOW, HIGH))
        middle, low, high = (part.set_index("at")["number"].sort_index() for part in parts)
        look = line(series)
        if len(middle):
            axis.plot(middle.index, middle, marker="o", markersize=4, **look)
            axis.fill_between(middle.index, low, high, color=look["color"], alpha=0.18, linewidth=0)
        mine = modelled[(modelled["series"] == series) & (modelled["metric"] == LATENCY)].sort_values("at")
        if len(mine):
            start = pd.DataFrame({"at": middle.index[-1:], "number": middle.iloc[-1:]})
            whole = pd.concat([start, mine[["at", "number"]]])
            axis.plot(whole["at"], whole["number"], color=look["color"], linewidth=0.8, alpha=0.7)
            axis.plot(mine["at"], mine["number"], **hollow(look["color"]))
    axis.set(xscale="log", yscale="log", xlabel="gradient elements (fp32)", ylabel="time of one check (ms)")
    axis.grid(visible=True, axis="both", which="major")
    name_models(axis, modelled)


def name_models(axis: Axes, modelled: pd.DataFrame) -> None:
    """The models' sizes above the axes, where their gradient counts are."""
    places = modelled.drop_duplicates("model").sort_values("at")
    at = places["at"].tolist()
    names = [SHORT.get(m, m) for m in places["model"]]
    for i in range(len(at) - 1, 0, -1):  # two of nearly one size share a label
        if at[i] < 1.25 * at[i - 1]:
            names[i - 1 : i + 1], at[i - 1 : i + 1] = [f"{names[i - 1]}, {names[i]}"], [(at[i - 1] * at[i]) ** 0.5]
    for x, name in zip(at, names, strict=True):
        axis.annotate(
            name,
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


def reductions(axis: Axes, table: pd.DataFrame) -> None:
    percent = table[(table["metric"] == REDUCTION) & table["number"].notna() & table["at"].notna()]
    blue = style.colour(MEMASCEND)
    printed = table.loc[(table["metric"] == AVERAGE) & (table["lane"] == "published"), "number"]
    for lane, look in (("modelled", hollow(blue)), ("measured", {"color": blue, "marker": "o", "markersize": 5})):
        mine = percent[percent["lane"] == lane].sort_values("at")
        axis.plot(mine["at"], mine["number"], **{"linestyle": "-" if lane == "measured" else "none", **look})
        if lane == "measured":
            mark_all(axis, list(zip(mine["at"], mine["number"], strict=True)), min([*printed, 100.0]))
    average = table.loc[(table["metric"] == AVERAGE) & (table["lane"] == "modelled"), ["model", "number"]]
    far = percent[percent["lane"] == "modelled"]
    if len(average) and len(far):
        text = f"{average['model'].iloc[0]}: {average['number'].iloc[0]:.1f} on average"
        mark(axis, (far["at"].min() * far["at"].max()) ** 0.5, far["number"].max(), text)
    if len(printed):
        axis.axhline(printed.iloc[0], color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        axis.set_title(f"dashed: the paper's average, {printed.iloc[0]:g} %", fontsize=8, loc="right")
    lowest = min([*percent["number"], *printed, 95.0])
    axis.set(xscale="log", xlabel="gradient elements (fp32)", ylabel="shorter than ZeRO-Infinity, as published (%)")
    axis.set_ylim(max(0, 5 * (lowest // 5)), 100.5)
    axis.grid(visible=True, axis="both", which="major")


def mark_all(axis: Axes, points: list[tuple[float, float]], printed: float) -> None:
    """Values away from the dashed line at `printed`; of two close together the second stands higher."""
    before, raised = 0.0, False
    for x, y in points:
        above = y >= printed
        raised = above and x < 3 * before and not raised
        mark(axis, x, y, f"{y:.1f}", (17 if raised else 7) if above else -14)
        before = x if above else 0.0


def mark(axis: Axes, x: float, y: float, text: str, points_above: float = 7) -> None:
    """A value above or below its point, legible on a line."""
    place = {"xytext": (0, points_above), "textcoords": "offset points", "ha": "center"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    axis.annotate(text, (x, y), fontsize=7, color="#222222", bbox=box, **place)


def hollow(colour: str) -> dict[str, Any]:
    """Marks of what was not run but read off a line."""
    look = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": colour}
    return {**look, "linestyle": "none"}


def legend(figure: Figure, shown: list[str]) -> None:
    handles = [Line2D([], [], label=series, marker="o", markersize=4, **line(series)) for series in shown]
    lanes = [
        Line2D([], [], color="#555555", marker="o", markersize=4, label="measured: median, quartiles shaded"),
        Line2D([], [], label="modelled: straight line through the measured sizes", **hollow("#555555")),
    ]
    common = {"loc": "upper left", "frameon": False, "handlelength": 2.0, "columnspacing": 1.2}
    figure.legend(handles=handles, bbox_to_anchor=(0.01, 1.0), ncols=3, **common)
    rows_above = -(-len(handles) // 3)
    top = 1.0 - 0.19 * rows_above / figure.get_figheight()
    figure.legend(handles=lanes, bbox_to_anchor=(0.01, top), ncols=2, **common)

"""MemAscend Fig. 3: memory through ZeRO-Infinity's gradient overflow check, and how long the check takes."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import rows, style
from workflows.scripts.tidy import AS_PUBLISHED, GIB, numeric

LIVE, RESIDENT = "live tensors relative to the flat buffer", "resident memory relative to the flat buffer"

HEAD_INCHES = 0.1


def draw(table: pd.DataFrame) -> Figure:
    """The check inside a training step, the planner's account of its steps, and its time against the elements."""
    figure, (left, middle, right) = style.canvas(3, width=12.4, height=4.3, ratios=[1.5, 1, 1])
    table = table.assign(number=table["value"].map(numeric), at=table["x_value"].map(numeric))
    timeline(left, table)
    steps(middle, table)
    latency(right, table)
    return figure


def timeline(axis: Axes, table: pd.DataFrame) -> None:
    live, resident = (table[(table["metric"] == m) & table["number"].notna()] for m in (LIVE, RESIDENT))
    for series in rows.series_of(pd.concat([live, resident])):
        fill = style.colour(series)
        mine = live[live["series"] == series].sort_values("at", kind="stable")
        seen = resident[resident["series"] == series].sort_values("at")
        axis.plot(seen["at"], seen["number"], color=fill, linewidth=0.9, marker=".", markersize=3, alpha=0.75)
        if len(mine):
            axis.step(mine["at"], mine["number"], where="post", **line(series))
    for name, kind in (("isinf", "peak relative to tensor"), ("isnan", "further memory peak")):
        printed = table[(table["lane"] == "published") & (table["metric"] == kind) & (table["x_value"] == name)]
        if len(printed):
            level = printed["number"].iloc[0]
            modelled = table[(table["lane"] == "modelled") & (table["metric"] == "peak relative to tensor")]
            modelled = modelled.loc[modelled["x_value"] == name, "number"]
            text = f"{name}: paper {level:g}×" + (f", planner {modelled.iloc[0]:.3g}×" if len(modelled) else "")
            axis.axhline(level, color=style.BLACK, linewidth=0.9, linestyle=(0, (4, 3)))
            axis.annotate(
                text,
                (0.995, level),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="right",
                fontsize=7,
            )
    handles = [Line2D([], [], label=s, **line(s)) for s in rows.series_of(pd.concat([live, resident]))]
    handles += [
        Line2D([], [], color="#555555", linewidth=2, label="live tensors (allocation events)"),
        Line2D([], [], color="#555555", linewidth=0.9, marker=".", markersize=4, label="host resident (sampled)"),
    ]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.01), ncols=2, frameon=False, fontsize=7.5)
    axis.set_xlabel("time since the check began (ms)")
    axis.set_ylabel("memory / gradient flat buffer (×)")
    axis.set_ylim(0.9, 2.5)


def line(series: str) -> dict[str, Any]:
    """Today's DeepSpeed allocates as the paper's baseline does: drawn in dashes, so that both are seen."""
    dashes = {"linestyle": (0, (2, 1.5))} if series.startswith("ZeRO-Infinity (DeepSpeed") else {}
    return {"color": style.colour(series), "linewidth": 2.0, **dashes}


def steps(axis: Axes, table: pd.DataFrame) -> None:
    """Live tensors after each step of the check, by the planner, relative to the flat buffer."""
    modelled = table[(table["lane"] == "modelled") & (table["series"] == AS_PUBLISHED)]
    live = modelled[modelled["metric"] == "live tensors"]
    flat = modelled.loc[modelled["metric"] == "gradient flat buffer", "number"]
    axis.set_ylim(0, 2.5)
    axis.set_ylabel("live tensors / gradient flat buffer (×)")
    if live.empty or flat.empty:
        axis.annotate("no row in the modelled lane", (0.5, 0.5), xycoords="axes fraction", ha="center", color="#888888")
        return
    heights = (live["number"] / flat.iloc[0]).tolist()
    drawn = axis.bar(range(len(heights)), heights, 0.7, **style.surface("modelled", style.colour(AS_PUBLISHED)))
    axis.bar_label(drawn, [f"{h:.2f}" for h in heights], padding=2, fontsize=7)
    axis.set_xticks(range(len(heights)), live["x_value"].tolist(), rotation=35, ha="right", fontsize=7.5)
    axis.set_title(f"modelled (planner): {live['model'].iloc[0]}, as published", fontsize=8)


def latency(axis: Axes, table: pd.DataFrame) -> None:
    mine = table[
        (table["metric"] == "overflow check latency") & (table["lane"] == "measured") & (table["x_name"] == "elements")
    ]
    names = {AS_PUBLISHED: "isinf/isnan chain", "MemAscend": "fused check"}
    for series in rows.series_of(mine):
        line = mine[mine["series"] == series].sort_values("at")
        axis.plot(
            line["at"],
            line["number"],
            marker="o",
            markersize=4,
            color=style.colour(series),
            label=names.get(series, series),
            linestyle=":" if series.startswith("tensor.sum") else "-",
        )
    printed = table[(table["lane"] == "published") & (table["metric"] == "overflow check latency")]
    flat = table[(table["lane"] == "published") & (table["metric"] == "gradient flat buffer")]
    if len(printed) and len(flat):
        elements = flat["number"].iloc[0] * GIB / 4
        axis.plot(
            [elements],
            [printed["number"].iloc[0]],
            marker="o",
            markersize=6,
            markerfacecolor="white",
            markeredgecolor=style.VERMILION,
            linestyle="none",
            label="paper, 8B on C1",
        )
    axis.set(xscale="log", yscale="log", xlabel="gradient elements (fp32)", ylabel="time of one check (ms)")
    axis.grid(visible=True, axis="both", which="major")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.01), ncols=2, frameon=False, fontsize=7.5)

"""MemAscend Fig. 14: latency and bandwidth of one tensor written and read, file system against direct engine."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import style
from workflows.scripts.tidy import MEMASCEND, numeric

ZERO_INFINITY = "ZeRO-Infinity"
LOW, HIGH = ", lower quartile over rounds", ", upper quartile over rounds"
PANELS = (("write", "latency"), ("write", "bandwidth"), ("read", "latency"), ("read", "bandwidth"))
LABELS = {ZERO_INFINITY: "ZeRO-Infinity: DeepNVMe, a file a tensor", MEMASCEND: "MemAscend: direct engine"}
# Erratum: the paper calls all four microseconds. Three are nanoseconds, as no disk takes 305 s for 3.1 GB; the one with
# a fraction is right.
IN_US = {"988222": 988.222, "219418": 219.418, "304604779": 304604.779, "266212.637": 266212.637}

HEAD_INCHES = 0.62


def draw(table: pd.DataFrame) -> Figure:
    """Four panels, as in the paper: writing above, reading below."""
    figure, axes = style.canvas(2, width=10.2, height=6.2, lines=2)
    table = table.assign(number=table["value"].map(numeric), at=table["x_value"].map(numeric))
    measured = table[(table["lane"] == "measured") & table["number"].notna() & table["at"].notna()]
    for letter, (op, what), axis in zip("abcd", PANELS, axes, strict=True):
        lines(axis, measured, f"{op} {what}")
        printed(axis, table[table["lane"] == "published"], op, what)
        unit = "time of one tensor (us)" if what == "latency" else "bandwidth (GB/s)"
        axis.set(xscale="log", yscale="log" if what == "latency" else "linear", ylabel=unit)
        axis.set_title(f"({letter}) {op} {what}", loc="left")
        axis.grid(visible=True, axis="both", which="major")
        axis.set_xlim(1.4e6, 4.6e9)
        if what == "bandwidth":
            axis.set_ylim(bottom=0)
    for axis in axes[2:]:
        axis.set_xlabel("tensor size (bytes)")
    gains(axes[1], table)
    legend(figure, [name for name in (ZERO_INFINITY, MEMASCEND) if name in set(measured["series"])], measured)
    return figure


def look(series: str) -> dict[str, Any]:
    if series in LABELS:
        return {"color": style.colour(series), "linestyle": "-", "linewidth": 1.8}
    if series.startswith(MEMASCEND):
        return {"color": style.SKY, "linestyle": (0, (4, 2)), "linewidth": 1.4}
    return {"color": style.GREY, "linestyle": ":", "linewidth": 1.4}


def lines(axis: Axes, measured: pd.DataFrame, metric: str) -> None:
    for series in sorted(set(measured["series"]), reverse=True):
        mine = measured[measured["series"] == series]
        middle, low, high = (
            mine[mine["metric"] == metric + end].set_index("at")["number"].sort_index() for end in ("", LOW, HIGH)
        )
        axis.plot(middle.index, middle, marker="o", markersize=4, **look(series))
        axis.fill_between(middle.index, low, high, color=look(series)["color"], alpha=0.18, linewidth=0)


def printed(axis: Axes, published: pd.DataFrame, op: str, what: str) -> None:
    """The paper prints latencies of writing alone; its bandwidths follow from them."""
    for _, row in published[published["metric"] == f"{op} latency"].iterrows():
        microseconds, size = IN_US[row["value"]], float(row["x_value"])
        height = microseconds if what == "latency" else size / microseconds / 1e3
        axis.plot([size], [height], **hollow(style.colour(row["series"])))


def gains(axis: Axes, table: pd.DataFrame) -> None:
    """The average gain, measured beside printed."""
    found = table[table["metric"] == "write bandwidth improvement, average"].set_index("lane")["number"]
    words = [f"{lane} {found[lane]:+.0f} %" for lane in ("measured", "published") if lane in found.index]
    axis.set_title(f"MemAscend on average:\n{', '.join(words)}", loc="right", fontsize=7.5)


def hollow(colour: str) -> dict[str, Any]:
    rim = {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.4}
    return {"marker": "s", "markersize": 6, "linestyle": "none", "zorder": 4, **rim}


def legend(figure: Figure, shown: list[str], measured: pd.DataFrame) -> None:
    others = sorted(set(measured["series"]) - set(LABELS))
    names = {**{name: LABELS[name] for name in shown}, **{name: name for name in others}}
    handles = [Line2D([], [], label=label, marker="o", markersize=4, **look(name)) for name, label in names.items()]
    lanes = [
        Line2D([], [], color="#555555", marker="o", markersize=4, label="measured: median, quartiles shaded"),
        Line2D([], [], label="published (units corrected; bandwidth from latency)", **hollow("#555555")),
    ]
    common = {"loc": "upper left", "frameon": False, "handlelength": 2.0, "columnspacing": 1.2}
    figure.legend(handles=handles, bbox_to_anchor=(0.01, 1.0), ncols=4, **common)
    figure.legend(handles=lanes, bbox_to_anchor=(0.01, 1.0 - 0.19 / figure.get_figheight()), ncols=2, **common)

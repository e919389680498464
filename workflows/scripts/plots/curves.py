"""Panels of lines that several exhibits share: modelled a line, measured filled marks, published outlined ones."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows.scripts.plots import rows, style
from workflows.scripts.tidy import AS_PUBLISHED, MEMASCEND, SCALED, numeric

PEAK = "peak system memory"
SYSTEMS = (AS_PUBLISHED, MEMASCEND)
AT_CONTEXT, AT_BATCH = "context (tokens)", "batch"
MEMORY_LABEL = "peak system memory (GiB)"


def prepared(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with a number and an x, in the names of one lane: measured bytes at the original's size, largest twin.

    Adds ``number``, ``at`` and ``ranks``. Measured with as many ranks as the paper's GPUs and with one stay apart.
    """
    table = table.assign(number=table["value"].map(numeric), at=table["x_value"].map(numeric))
    table = table[table["number"].notna() & table["at"].notna()].copy()
    found = table["testbed"].str.extract(rows.TWIN)
    table["k"] = found[0].fillna("1").astype(int)
    table["ranks"] = found[1].fillna("-r1").str.removeprefix("-r").astype(int)
    scaled = table["metric"].str.endswith(SCALED)
    own = table["metric"].isin(set(table.loc[scaled, "metric"].str.removesuffix(SCALED)))
    table = table[~(table["lane"].eq("measured") & own)].copy()
    table["metric"] = table["metric"].str.removesuffix(SCALED).replace({"system memory": PEAK})
    table["series"] = table["series"].replace({"ZeRO-Infinity": AS_PUBLISHED})
    least = table.groupby(["series", "model", "metric", "lane", "ranks", "x_name", "at"])["k"].transform("min")
    return table[table["k"] == least]


def look(series: str, lane: str, ranks: int = 1) -> dict[str, Any]:
    """Marks and lines of a lane."""
    fill = style.colour(series)
    if lane == "modelled":
        return {"color": fill, "linewidth": 1.3}
    if lane == "measured":
        marker = {"marker": "o" if ranks == 1 else "s", "markersize": 6.5}
        return {"color": fill, "linestyle": "none", "markeredgecolor": "white", "markeredgewidth": 0.6, **marker}
    outlined = {"marker": "D", "markersize": 8, "markerfacecolor": "none", "markeredgewidth": 1.4, "clip_on": False}
    return {"linestyle": "none", "markeredgecolor": fill, **outlined}


def curves(axis: Axes, table: pd.DataFrame, metric: str, x_name: str, systems: tuple[str, ...] = SYSTEMS) -> None:
    """Every system and lane of one metric."""
    mine = table[(table["metric"] == metric) & (table["x_name"] == x_name)]
    for series in systems:
        for lane in ("modelled", "published", "measured"):
            for ranks in sorted(set(mine["ranks"])):
                where = (mine["series"] == series) & (mine["lane"] == lane) & (mine["ranks"] == ranks)
                line = mine[where].sort_values("at")
                if len(line):
                    axis.plot(line["at"], line["number"], **look(series, lane, ranks))
    axis.grid(visible=True, axis="both")
    from_zero(axis)


def from_zero(axis: Axes) -> None:
    """The y axis from zero, with room above the highest mark."""
    heights = [y for line in axis.lines for y in line.get_ydata()]
    axis.set_ylim(0, 1.07 * max(heights, default=1.0))


def tokens_axis(axis: Axes) -> None:
    """Contexts in Ki tokens, every 32."""
    ticks = [4096, *range(32_768, 131_073, 32_768)]
    axis.set_xticks(ticks, [f"{t // 1024}K" for t in ticks])
    axis.set_xlim(0, 135_168)
    axis.set_xlabel("context (tokens)")


def caps(axis: Axes, at: float = 0.76) -> None:
    """128 GiB, and 128 GB, between which the paper's limit lies (erratum M7)."""
    for level, name in ((128.0, "128 GiB"), (128e9 / 2**30, "128 GB")):
        axis.axhline(level, color=style.BLACK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        place = {"xytext": (0, 2 if name == "128 GiB" else -9), "textcoords": "offset points", "ha": "center"}
        axis.annotate(name, (at, level), xycoords=("axes fraction", "data"), fontsize=7, **place)


def legend(figure: Figure, table: pd.DataFrame, more: tuple[Line2D, ...] = ()) -> None:
    """Systems in one row above the axes, lanes in the next."""
    handles = [Line2D([], [], color=style.colour(s), linewidth=3, label=s) for s in SYSTEMS]
    names = {"modelled": "modelled (planner)", "measured": "measured (twin, × k², without the processes)"}
    names["published"] = "published (the paper's text)"
    grey = "of no system"
    shown = [lane for lane in names if lane in set(table["lane"])]
    lanes = [Line2D([], [], label=names[lane], **look(grey, lane)) for lane in shown]
    if (table["ranks"] > 1).any():
        lanes.append(Line2D([], [], label="measured with two ranks", **look(grey, "measured", 2)))
    common = {"loc": "upper left", "frameon": False, "handlelength": 1.8, "columnspacing": 1.2}
    figure.legend(handles=[*handles, *more], bbox_to_anchor=(0.01, 1.0), ncols=4, **common)
    figure.legend(handles=lanes, bbox_to_anchor=(0.01, 1.0 - 0.2 / figure.get_figheight()), ncols=4, **common)

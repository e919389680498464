"""One look for all exhibits: a colour for each system, a surface for each lane, the line under the axes."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, told apart by colour-blind readers and in grey print.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY = "#8C8C8C"
LANE_ORDER = ("published", "author", "modelled", "measured")
LANE_TEXT = {
    "published": "published (the paper's text)",
    "author": "author (the authors' repository)",
    "modelled": "modelled (planner)",
    "measured": "measured",
}


def colour(series: str) -> str:
    """Colour of a system, the same in every figure."""
    if series.startswith("ZeRO-Infinity (DeepSpeed"):
        return YELLOW if "0.16" in series else ORANGE
    if "aminmax" in series:
        return PURPLE
    if "isfinite" in series:
        return BLACK
    if series.startswith(("MemAscend + bf16", "MemAscend+bf16")):
        return GREEN
    for start, value in (
        ("ZeRO-Infinity", VERMILION),
        ("MemAscend", BLUE),
        ("ZeRO-Offload", GREEN),
        ("All in GPU", SKY),
        ("theoretical minimum", GREY),
    ):
        if series.startswith(start):
            return value
    return GREY


def surface(lane: str, fill: str) -> dict[str, Any]:
    """Bar arguments of a lane: measured solid, modelled hatched, published outlined."""
    if lane == "measured":
        return {"facecolor": fill, "edgecolor": fill, "linewidth": 1.0}
    if lane == "modelled":
        return {"facecolor": "white", "edgecolor": fill, "hatch": "//////", "linewidth": 1.0}
    return {"facecolor": "white", "edgecolor": fill, "linewidth": 1.6}


def canvas(
    panels: int = 1, width: float = 7.6, height: float = 4.0, ratios: list[float] | None = None, lines: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, in one line or several (axes line by line); sizes in inches."""
    sns.set_theme(
        context="paper",
        style="whitegrid",
        rc={
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.labelsize": 9,
            "xtick.labelsize": 8.5,
            "ytick.labelsize": 8.5,
            "legend.fontsize": 8,
            "axes.titlesize": 9.5,
            "hatch.linewidth": 0.8,
            "axes.edgecolor": "#444444",
            "grid.color": "#E3E3E3",
            "svg.hashsalt": "memascend",
            "svg.fonttype": "none",
            "pdf.fonttype": 42,
            "figure.constrained_layout.use": False,
        },
    )
    widths = {"width_ratios": ratios or [1] * panels}
    figure, axes = plt.subplots(lines, panels, figsize=(width, height), gridspec_kw=widths, squeeze=False)
    for axis in axes.flat:
        axis.set_axisbelow(True)
        axis.grid(visible=False, axis="x")
        sns.despine(ax=axis)
    return figure, list(axes.flat)


def legend(figure: Figure, series: dict[str, str], lanes: list[str], columns: int | None = None) -> None:
    """Above the axes: colours in one row, surfaces in the next."""
    colours = [Patch(facecolor=fill, edgecolor=fill, label=name) for name, fill in series.items()]
    surfaces = [Patch(label=LANE_TEXT[lane], **surface(lane, "#555555")) for lane in LANE_ORDER if lane in lanes]
    figure.legend(
        handles=colours,
        loc="upper left",
        bbox_to_anchor=(0.01, 1.0),
        ncols=columns or len(colours),
        frameon=False,
        handlelength=1.4,
        columnspacing=1.2,
    )
    rows = -(-len(colours) // (columns or len(colours)))
    top = 1.0 - 0.2 * rows / figure.get_figheight()
    figure.legend(
        handles=surfaces,
        loc="upper left",
        bbox_to_anchor=(0.01, top),
        ncols=len(surfaces),
        frameon=False,
        handlelength=1.4,
        columnspacing=1.2,
    )


def finish(figure: Figure, footer: str, head_inches: float = 0.5) -> None:
    """Fit the axes between legend and footer, and write the footer."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(footer, int(width * 19.5))
    foot = 0.14 * len(lines) + 0.1
    figure.tight_layout(rect=(0, foot / height, 1, 1 - head_inches / height), w_pad=2.0)
    figure.text(0.012, 0.06 / height, "\n".join(lines), fontsize=6.8, color="#555555", va="bottom", linespacing=1.35)


def label_bars(axis: Axes, bars: Any, texts: list[str], zero_colour: str = "#222222") -> None:
    """Values above bars, upright so that neighbours do not meet; a bar of no height shows its colour in the text."""
    labels = axis.bar_label(bars, texts, rotation=90, padding=3, fontsize=7, color="#222222")
    for label, text in zip(labels, texts, strict=True):
        if text == "0":
            label.set_color(zero_colour)
            label.set_fontweight("bold")


def label_inside(axis: Axes, bars: Any, texts: list[str]) -> None:
    """Values in the middle of bars, where a line crosses their tops."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
    axis.bar_label(bars, texts, label_type="center", rotation=90, fontsize=7, color="#222222", bbox=box)

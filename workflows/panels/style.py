"""The common look of all exhibits: a colour per system, a surface per lane, the footer under the axes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memascend import systems

# Okabe and Ito's colours, distinguishable by colour-blind readers and in grey print; specifications use these names.
PALETTE = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#8C8C8C",
    "light": "#D9D9D9",
}
INK, FAINT = "#222222", "#888888"
VALUE = "value: "  # prefix of the id of an artist that has a tooltip
REFERENCE = "reference"  # committed records of another machine, drawn as a separate lane
LANES = ("published", "author", "modelled", "measured", REFERENCE)
LANE_TEXT = {
    "published": "published (the paper's text)",
    "author": "author (the authors' repository)",
    "modelled": "modelled",
    "measured": "measured",
    REFERENCE: "reference (measured elsewhere, see below)",
}
LOOK = matplotlib.rc_params_from_file(Path(__file__).with_name("look.mplstyle"), use_default_template=False)


@cache
def _of_systems() -> dict[str, str]:
    """Return label of an arm -> colour, as the systems' folders define it."""
    found = {}
    for system in map(systems.load, systems.names()):
        own = system.describe().get("colours", {}) if hasattr(system, "describe") else {}
        for arm, arrangement in system.arms.items():
            found.setdefault(arrangement.label, own.get(arm, system.colour))
        found[system.label] = system.colour
    return found


def colour(series: str, named: dict[str, str] | None = None) -> str:
    """Return the colour of a series: from the specification, else its arm's or system's; grey without a system."""
    named = named or {}
    if series in named:
        return PALETTE.get(named[series], named[series])
    labels = _of_systems()
    starts = [label for label in labels if series.startswith((f"{label} ", label.removesuffix(")"))) or series == label]
    return labels[max(starts, key=len)] if starts else PALETTE["grey"]


def surface(lane: str, fill: str) -> dict[str, Any]:
    """Return the bar arguments of a lane: measured solid, modelled hatched, published outlined, a reference dotted."""
    if lane == "measured":
        return {"facecolor": fill, "edgecolor": fill, "linewidth": 1.0}
    hatch = {"modelled": "//////", REFERENCE: "..."}.get(lane)
    more = {"hatch": hatch, "linewidth": 1.0} if hatch else {"linewidth": 1.6}
    return {"facecolor": "white", "edgecolor": fill, **more}


def tell(artist: Artist, words: str) -> None:
    """Give the artist a tooltip with `words`, for the SVG in a page."""
    artist.set_gid(VALUE + words)


def tell_points(axis: Axes, xs: Iterable[float], ys: Iterable[float], words: Iterable[str]) -> None:
    """Give each point a tooltip by an invisible mark, since matplotlib draws a whole line as one artist."""
    for x, y, text in zip(xs, ys, words, strict=True):
        tell(axis.plot([x], [y], linestyle="none", marker="o", markersize=9, alpha=0)[0], text)


def titled(svg: str) -> str:
    """Return the SVG with a title element in place of the id of each artist that has a tooltip."""
    return re.sub(f'<g id="{VALUE}([^"]*)">', r'<g class="value"><title>\1</title>', svg)


def canvas(
    columns: int, lines: int, size: tuple[float, float], widths: list[float] | None
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `size` inches and its panels, line by line."""
    plt.rcdefaults()
    plt.rcParams.update(LOOK)
    ratios = {"width_ratios": widths or [1] * columns}
    figure, axes = plt.subplots(lines, columns, figsize=size, gridspec_kw=ratios, squeeze=False)
    return figure, list(axes.flat)


def colour_patch(fill: str, label: str) -> Patch:
    """Return the legend entry of a colour."""
    return Patch(facecolor=fill, edgecolor=fill, label=label)


def lane_patch(lane: str) -> Patch:
    """Return the legend entry of a lane."""
    return Patch(label=LANE_TEXT[lane], **surface(lane, "#555555"))


def legend(figure: Figure, rows: list[list[Any]], columns: int = 4) -> float:
    """Draw rows of handles above the axes, one below the other, and return their height in inches."""
    top, height = 1.0, figure.get_figheight()
    for handles in filter(None, rows):
        common = {"loc": "upper left", "frameon": False, "handlelength": 1.8, "columnspacing": 1.2}
        figure.legend(handles=handles, bbox_to_anchor=(0.01, top), ncols=min(columns, len(handles)), **common)
        top -= 0.2 * -(-len(handles) // columns) / height
    return (1.0 - top) * height + 0.1


def finish(figure: Figure, footer: str, head_inches: float) -> None:
    """Fit the axes between legend and footer, and draw the footer."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(footer, int(width * 19.5))
    foot = 0.14 * len(lines) + 0.1
    figure.tight_layout(rect=(0, foot / height, 1, 1 - head_inches / height), w_pad=2.0)
    figure.set_layout_engine(None)  # otherwise every file would be drawn twice
    figure.text(0.012, 0.06 / height, "\n".join(lines), fontsize=6.8, color="#555555", va="bottom", linespacing=1.35)


def label_bars(axis: Axes, bars: Any, texts: list[str], zero_colour: str = INK) -> None:
    """Write values above bars, vertically so that neighbours do not overlap; the text of a bar of height 0 has its
    colour."""
    for label in axis.bar_label(bars, texts, rotation=90, padding=3, fontsize=7, color=INK):
        if label.get_text() == "0":
            label.set(color=zero_colour, fontweight="bold")


def label_inside(axis: Axes, bars: Any, texts: list[str]) -> None:
    """Write values in the middle of bars, for panels where a line crosses their tops."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
    axis.bar_label(bars, texts, label_type="center", rotation=90, fontsize=7, color=INK, bbox=box)


def dashed(axis: Axes, level: float, text: str = "") -> None:
    """Draw a dashed line at a level that the paper states."""
    axis.axhline(level, color=PALETTE["black"], linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
    if text:
        axis.set_title(text, fontsize=8, loc="right")


def note(axis: Axes, text: str, at: tuple[float, float], align: str = "left") -> None:
    """Write text at a place in the axes, from (0, 0) to (1, 1)."""
    axis.annotate(text, at, xycoords="axes fraction", va="top", ha=align, fontsize=8)

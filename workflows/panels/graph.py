"""Boxes and arrows, placed on a grid by the specification: architectures and workflows.

nodes   {name: {at: [column, line], text, colour, size: [w, h], values}};   groups   [{text, at, size}]: frames behind
values are selectors whose numbers fill the {} of the text;   edges   [[from, to] or [from, to, words]]
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from workflows.panels import data as panel_data
from workflows.panels import style

WIDTH, HEIGHT = 0.8, 0.55


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw frames, boxes and arrows; return an empty list, since none of them has a lane."""
    axis.axis("off")
    for group in panel.get("groups", []):
        (x, y), (w, h) = group["at"], group["size"]
        axis.add_patch(FancyBboxPatch((x, y), w, h, **ROUND, facecolor="#F6F6F6", edgecolor="#BBBBBB", zorder=0))
        axis.text(x + 0.02, y - 0.02, group["text"], fontsize=9, fontweight="bold", va="top", ha="left")
    places, corners = {}, []
    for name, node in panel["nodes"].items():
        (x, y), (w, h) = node["at"], node.get("size", (WIDTH, HEIGHT))
        fill = style.colour(name, {name: node.get("colour", "light")})
        patch = FancyBboxPatch((x - w / 2, y - h / 2), w, h, **ROUND, facecolor=f"{fill}30", edgecolor=fill, zorder=2)
        axis.add_patch(patch)
        values = [panel_data.first(table, where) for where in node.get("values", [])]
        words = node.get("text", name).format(*values)
        axis.text(x, y, words, ha="center", va="center", fontsize=node.get("fontsize", 8), zorder=3)
        places[name] = (x, y, patch)
        corners += [(x - w / 2, y - h / 2), (x + w / 2, y + h / 2)]
    for begin, end, *words in panel.get("edges", []):
        (ax, ay, one), (bx, by, other) = places[begin], places[end]
        arrow = {"arrowstyle": "-|>", "mutation_scale": 10, "color": "#555555", "linewidth": 1.1, "zorder": 1}
        axis.add_patch(FancyArrowPatch((ax, ay), (bx, by), patchA=one, patchB=other, **arrow))
        if words:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.9}
            middle = {"ha": "center", "va": "center", "fontsize": 7, "color": "#555555", "bbox": box, "zorder": 4}
            axis.text((ax + bx) / 2, (ay + by) / 2, words[0], **middle)
    for (x, y), (w, h) in ((group["at"], group["size"]) for group in panel.get("groups", [])):
        corners += [(x, y), (x + w, y + h)]
    xs, ys = zip(*corners, strict=True)
    axis.set(xlim=(min(xs) - 0.1, max(xs) + 0.1), ylim=(max(ys) + 0.1, min(ys) - 0.1))
    return []


ROUND = {"boxstyle": "round,pad=0.02,rounding_size=0.06"}

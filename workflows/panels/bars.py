"""Bars in groups, and stacks of parts.

groups   column of the groups: model (default), series, x_value;   order   its values in order (only these are drawn)
bars     column that, with the lane, distinguishes bars of a group (default: series; null: lanes only)
metric, where, derive   what is drawn (panels.data);   decimals   of the values above;   form   their format string
inside   values in the bars;   log   logarithmic axis;   ticks   {group: label under it}
unnamed   no series in the legend;   narrow, turned   group names on two lines, or slanted
  ranks   add a note on what was measured with several ranks
dashed   {level: number} or {where: ..., text: ...}: a printed value;   over   {where: ..., at: group}: outlined bar
stacked: parts   {metric: colour} from below;   total   metric of the whole;   by   model (lanes side by side) or lane
  part   column that names a part, in place of the metric
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from workflows.panels import data as panel_data
from workflows.panels import style
from workflows.tidy import AS_PUBLISHED, MEMASCEND

THIN = 0.002  # fraction of the tallest stack; thinner slices would be invisible


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw bars, and return (series, lane) of each."""
    table = panel_data.shown(table, panel)
    table = table[table["ranks"] == 1]
    groups, within = panel.get("groups", "model"), panel.get("bars", "series")
    names = [name for name in panel.get("order", []) if name in set(table[groups])] or list(
        dict.fromkeys(table[groups])
    )
    if "prefix" in panel:
        names = panel_data.ordered([n for n in table[groups] if not panel.get("order") or n in names], panel["prefix"])
    width = 0.84 / max([1, *(len(bars_of(table[table[groups] == name], within, panel)) for name in names)])
    drawn = []
    for position, name in enumerate(names):
        present = bars_of(table[table[groups] == name], within, panel)
        for i, row in enumerate(present):
            series, lane, height = row["series"], row["lane"], row["number"]
            at = position + (i - (len(present) - 1) / 2) * width
            fill = style.colour(series, panel.get("colours"))
            bar = axis.bar([at], [height], 0.86 * width, **style.surface(lane, fill))
            style.tell(bar[0], panel_data.words(row, panel))
            text = value_text(height, panel)
            style.label_inside(axis, bar, [text]) if panel.get("inside") else style.label_bars(axis, bar, [text], fill)
            drawn.append((series, lane))
    drawn += outlined(axis, panel, names)
    if panel.get("ranks"):
        style.note(axis, "\n".join(several_ranks(panel)), (0.02, 0.97))
    scale(axis, panel)
    name_groups(axis, names, panel)
    return drawn


def several_ranks(panel: dict[str, Any]) -> list[str]:
    """Return a line per model measured with more than one rank, with the sum over the ranks."""
    table = panel_data.select(panel["_whole"], {"metric": panel["metric"], "lane": "measured"})
    lines = []
    for (model, k, ranks), group in table[table["ranks"] > 1].groupby(["model", "k", "ranks"]):
        peaks = group.dropna(subset="number").set_index("series")["number"]
        if {AS_PUBLISHED, MEMASCEND} <= set(peaks.index):
            before, after = peaks[AS_PUBLISHED], peaks[MEMASCEND]
            percent = 100 * (1 - after / before)
            lines.append(f"{model}, {ranks} ranks (k = {k}): {before:.1f} to {after:.1f} GiB, {percent:.1f} % less")
    return lines


def bars_of(table: pd.DataFrame, within: str | None, panel: dict[str, Any]) -> list[pd.Series]:
    """Return the table's row for each bar, in drawing order."""
    out = []
    for series in panel_data.ordered(table["series"], panel.get("series", panel_data.SERIES)) if within else [None]:
        for lane in panel_data.lanes_of(table):
            found = table[(table["lane"] == lane) & (table["series"].eq(series) if series else True)]
            if len(found):
                out.append(found.iloc[0])
    return out


def value_text(height: float, panel: dict[str, Any]) -> str:
    """Return the number above a bar, by the panel's format or with its decimals."""
    if "form" in panel:
        return panel["form"].format(height)
    decimals = panel.get("decimals", 1) if height < 100 or not panel.get("log") else 0
    return f"{height:,.{decimals}f}" if height else "0"


def outlined(axis: Axes, panel: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
    """Draw the printed value as an outline around one bar, and a dashed line at another."""
    whole, drawn = panel["_whole"], []
    if (
        "over" in panel
        and (level := panel_data.first(whole, panel["over"]["where"])) is not None
        and panel["over"]["at"] in names
    ):
        fill = style.colour(panel["over"]["at"], panel.get("colours"))
        look = {**style.surface("published", fill), "facecolor": "none"}
        axis.bar([names.index(panel["over"]["at"])], [level], 0.95, **look)
        drawn.append((panel["over"]["at"], "published"))
    if "dashed" in panel:
        level = panel["dashed"].get("level") or panel_data.first(whole, panel["dashed"]["where"])
        if level is not None:
            style.dashed(axis, level, panel["dashed"].get("text", "").format(level))
    return drawn


def scale(axis: Axes, panel: dict[str, Any]) -> None:
    """Set the value axis: logarithmic with few labels, or from zero with space above the bars."""
    if panel.get("log"):
        axis.set_yscale("log")
        heights = [bar.get_height() for bar in axis.patches]
        close = heights and max(heights) / min(heights) < 30
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.margins(y=0.2)
    else:
        axis.margins(y=0.08 if panel.get("inside") else 0.18)
        axis.set_ylim(bottom=0)


def name_groups(axis: Axes, names: list[str], panel: dict[str, Any]) -> None:
    """Write the names under the groups; in a narrow panel on two lines."""
    words = panel.get("ticks", {})
    if panel.get("narrow"):
        words = {name: name.replace("-", "-\n", 1) for name in names} | words
        axis.tick_params(axis="x", labelsize=7.5)
    turned = {"rotation": 35, "ha": "right", "fontsize": 7.5} if panel.get("turned") else {}
    axis.set_xticks(range(len(names)), [words.get(name, name) for name in names], **turned)
    axis.set_xlim(-0.55, max(len(names), 1) - 0.45)


def stacked(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw stacks of parts, and return (part, lane) of each.

    With `by: model`, lanes are side by side; with `by: lane`, series are grouped by lane.
    """
    parts, total = panel["parts"], panel.get("total", "")
    table = panel_data.select(table, panel.get("where"))
    table = table.assign(metric=table[panel.get("part", "metric")])
    for sums in panel.get("sums", []):  # a stack that sums parts of another
        own = panel_data.select(table, {"series": sums["of"], "lane": sums["lane"], "metric": sums["parts"]})
        table = pd.concat([table, own.assign(series=sums["series"])])
    table = table[table["number"].notna() & (table["ranks"] == 1) & table["metric"].isin([*parts, total])]
    outer, inner = ("model", "lane") if panel.get("by", "model") == "model" else ("lane", "series")
    kinds = {
        "model": panel.get("order", []),
        "lane": list(style.LANES),
        "series": panel.get("series", panel_data.SERIES),
    }
    counted = table[table["metric"].isin(parts)].groupby([outer, inner])["metric"].nunique()
    stacks = [
        (a, b)
        for a in panel_data.ordered(table[outer], kinds[outer])
        for b in panel_data.ordered(table[inner], kinds[inner])
    ]
    stacks = [stack for stack in stacks if counted.get(stack, 0) >= 2 and (stack[0] in kinds[outer] or outer == "lane")]
    tallest = max((r["number"] for _, r in table.iterrows()), default=1.0)
    drawn, ticks, middles, position = [], [], {}, 0.0
    for number, (a, b) in enumerate(stacks):
        position += 0 if not number else 1.0 if a == stacks[number - 1][0] else 1.6
        mine = table[(table[outer] == a) & (table[inner] == b)]
        heights = {part: panel_data.first(mine, {"metric": part}) or 0.0 for part in parts}
        heights = {part: h for part, h in heights.items() if h > THIN * tallest}
        who = mine.iloc[0].copy()
        if panel.get("part") == "x_value":
            who[["x_name", "x_value"]] = ""  # these cells describe only its first part
        drawn += one_stack(axis, position, who, heights, {**panel, "_tallest": tallest})
        stated, top = panel_data.first(mine, {"metric": total}) if total else None, sum(heights.values())
        whole = top if stated is None else stated
        above = f"\n({top - whole:.1f} less than its ledger)" if top > whole + THIN * tallest else ""
        place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 7 if above else 8}
        axis.annotate(f"{whole:.1f}{above}", (position, max(top, whole)), **place)
        ticks.append((position, panel.get("ticks", {}).get(b, b) if outer == "lane" else ""))
        middles.setdefault(a, []).append(position)
    head_groups(axis, ticks, middles, outer, panel)
    axis.margins(y=0.1)
    axis.set_ylim(bottom=0)
    return drawn


def one_stack(
    axis: Axes, at: float, who: pd.Series, heights: dict[str, float], panel: dict[str, Any]
) -> list[tuple[str, str]]:
    """Draw one stack; `who` is any of its rows, since its parts share system, model and lane."""
    bottom, lane = 0.0, who["lane"]
    for part, height in heights.items():
        bar = axis.bar([at], [height], 0.8, bottom=[bottom], **style.surface(lane, style.colour(part, panel["parts"])))
        style.tell(bar[0], f"{part}, {panel_data.words(who, panel, height)}")
        if panel.get("values") and height > 0.055 * panel["_tallest"]:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            axis.bar_label(bar, [f"{height:.1f}"], label_type="center", fontsize=7, bbox=box)
        bottom += height
    return [(part, lane) for part in heights]


def head_groups(
    axis: Axes, ticks: list[tuple[float, str]], middles: dict[str, list[float]], outer: str, panel: dict[str, Any]
) -> None:
    """Write model names under the groups, or lanes above their stacks with each stack's name under it."""
    centres = {name: sum(places) / len(places) for name, places in middles.items()}
    if outer == "model":
        axis.set_xticks(list(centres.values()), [panel.get("ticks", {}).get(name, name) for name in centres])
        return
    axis.set_xticks([at for at, _ in ticks], [name.replace(" (", "\n(") for _, name in ticks], fontsize=7.5)
    for lane, middle in centres.items() if "title" not in panel else ():
        words = {"measured": panel.get("measured", "measured"), style.REFERENCE: "measured (reference)"}.get(lane, lane)
        place = {"xycoords": ("data", "axes fraction"), "ha": "center", "fontsize": 8.5, "fontweight": "bold"}
        axis.annotate(words, (middle, 1.02), **place)

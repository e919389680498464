"""Lines and points over a number: modelled as a line, measured as filled marks, published as outlined marks.

metric, where, derive, x   what is drawn (panels.data), and the x_name of its rows
joined   connect measured points, with a band between their quartiles (", lower/upper quartile over rounds")
hollow   modelled values are hollow marks (they were not run);   beyond   and a thin line leads to them
step     values are constant until the next;   log   "x", "y" or "xy";   looks   {beginning of a series: line arguments}
levels   [{at, text, place}];   dashed   {where, text};   reached   {metric, level, divisor, unit, offset, turn}
series   those drawn, in order;   without   those left out
points   [{where, at, label}]: single printed values;   values   write the values of measured points next to them
more     [{metric, looks}]: further metrics of the same rows;   named   write models' names above their sizes
notes    [{text, at, where: [...]}]: text with the numbers that each `where` selects
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workflows.panels import data as panel_data
from workflows.panels import style

LOW, HIGH = (f", {end} quartile over rounds" for end in ("lower", "upper"))


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw every series and lane, and return (series, lane) of what was drawn."""
    whole = panel["_whole"]
    if "x" in panel:
        table = table[table["x_name"] == panel["x"]]
    mine = panel_data.shown(table, panel)
    mine, drawn = mine[mine["at"].notna()], []  # text in place of a number is not drawn
    for series in panel_data.ordered(mine["series"], panel.get("series", panel_data.SERIES)):
        if series not in panel.get("series", [series]) or series in panel.get("without", []):
            continue
        for lane in panel_data.lanes_of(mine):
            for ranks in sorted(set(mine["ranks"])):
                line = mine[(mine["series"] == series) & (mine["lane"] == lane) & (mine["ranks"] == ranks)]
                if len(line):
                    one_line(axis, line.sort_values("at", kind="stable"), (series, lane, ranks), panel, whole)
                    drawn.append((series, lane if ranks == 1 else "several ranks"))
    for further in panel.get("more", []):
        more = panel_data.select(whole, {"metric": further["metric"]} | further.get("where", {}))
        for series in panel_data.ordered(more["series"], panel_data.SERIES):
            line = more[(more["series"] == series) & more["at"].notna() & more["x_name"].eq(panel.get("x", ""))]
            axis.plot(line["at"], line["number"], color=style.colour(series, panel.get("colours")), **further["looks"])
    decorate(axis, table, mine, panel)
    return drawn


def look(series: str, lane: str, panel: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Return the plot arguments of a series in a lane: marks and line."""
    fill = style.colour(series, panel.get("colours"))
    looks = panel.get("looks", {})
    own = next((dict(looks[start]) for start in sorted(looks, key=len, reverse=True) if series.startswith(start)), {})
    if "linestyle" in own and isinstance(own["linestyle"], list):
        own["linestyle"] = (own["linestyle"][0], tuple(own["linestyle"][1]))
    if lane == "modelled":
        hollow = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "linestyle": "none"}
        return {"color": fill, "linewidth": 1.3, **(hollow if panel.get("hollow") else own)}
    if lane in ("published", "author"):
        marker = {
            "marker": "D" if lane == "published" else "^",
            "markersize": 7,
            "markeredgewidth": 1.4,
            "clip_on": False,
        }
        return {"linestyle": "none", "markeredgecolor": fill, "markerfacecolor": "white", "zorder": 4, **marker}
    marker = {"marker": "s" if ranks > 1 else "v" if lane == style.REFERENCE else "o", "markersize": 6}
    if lane == style.REFERENCE:
        return {"color": fill, "linestyle": "none", "alpha": 0.55, **marker}
    if panel.get("joined") or panel.get("step"):
        plain = {} if panel.get("step") else {"marker": "o", "markersize": 4}
        return {"color": fill, "linewidth": 1.8, **plain, **own}
    return {"color": fill, "linestyle": "none", "markeredgecolor": "white", "markeredgewidth": 0.6, **marker, **own}


def one_line(
    axis: Axes, line: pd.DataFrame, who: tuple[str, str, int], panel: dict[str, Any], whole: pd.DataFrame
) -> None:
    """Draw one series in one lane, with what the panel adds: a band between quartiles, values, or a line to measured
    points."""
    series, lane, ranks = who
    kind = look(series, lane, panel, ranks)
    if panel.get("step"):
        axis.step(line["at"], line["number"], where="post", **kind)
        return
    axis.plot(line["at"], line["number"], **kind)
    style.tell_points(axis, line["at"], line["number"], (panel_data.words(row, panel) for _, row in line.iterrows()))
    if lane == "measured" and panel.get("joined"):
        band = panel_data.select(whole, {"series": series, "lane": lane, "x_name": line["x_name"].iloc[0]})
        ends = [band[band["metric"] == panel.get("metric", "") + end].set_index("at")["number"] for end in (LOW, HIGH)]
        if all(len(end) for end in ends):
            low, high = (end.sort_index() for end in ends)
            axis.fill_between(low.index, low, high, color=kind["color"], alpha=0.18, linewidth=0)
        if panel.get("values"):
            level = panel_data.first(whole, panel["dashed"]["where"]) if "dashed" in panel else None
            mark_all(axis, list(zip(line["at"], line["number"], strict=True)), level or float("inf"))
    if lane == "modelled" and panel.get("beyond"):
        last = panel_data.select(whole, {"series": series, "lane": "measured", "metric": panel["metric"]}).sort_values(
            "at"
        )
        both = pd.concat([last.tail(1), line])
        axis.plot(both["at"], both["number"], color=kind["color"], linewidth=0.8, alpha=0.7)


def decorate(axis: Axes, table: pd.DataFrame, mine: pd.DataFrame, panel: dict[str, Any]) -> None:
    """Draw scales, levels, printed values and notes."""
    whole, log = panel["_whole"], panel.get("log", "")
    axis.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    axis.grid(visible=True, axis="both", which="major")
    for each in panel.get("points", []):
        printed = panel_data.select(whole, each["where"])
        for _, row in printed[printed["number"].notna()].iterrows():
            mark = axis.plot([each.get("at", row["at"])], [row["number"]], **look(row["series"], "published", panel))
            style.tell(mark[0], panel_data.words(row, {}))  # as printed, regardless of what the panel derives
    for level in panel.get("levels", []):
        axis.axhline(level["at"], color=style.PALETTE["black"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        place = {"xytext": (0, level.get("above", 2)), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        values = [panel_data.first(whole, where) for where in level.get("where", [])]
        if None not in values:
            axis.annotate(level["text"].format(*values), (level["place"], level["at"]), **place, **AT_LEVEL)
    if "dashed" in panel and (level := panel_data.first(whole, panel["dashed"]["where"])) is not None:
        style.dashed(axis, level, panel["dashed"]["text"].format(level))
    if "reached" in panel:
        reached(axis, whole, panel["reached"])
    for note in panel.get("notes", []):
        values = [panel_data.first(whole, where) for where in note.get("where", [])]
        if None not in values:
            style.note(axis, note["text"].format(*values), tuple(note["at"]), note.get("align", "left"))
    if panel.get("named"):
        name_models(axis, mine[mine["lane"] == "modelled"], panel["named"])
    if "y" not in log and "ylim" not in panel:
        axis.set_ylim(0, 1.07 * max([y for line in axis.lines for y in line.get_ydata()], default=1.0))


AT_LEVEL = {"xycoords": ("axes fraction", "data")}


def reached(axis: Axes, table: pd.DataFrame, how: dict[str, Any]) -> None:
    """Mark on the cap's level what each system reaches under it according to the paper."""
    printed = panel_data.select(table, {"lane": "published", "metric": how["metric"]})
    for each in printed[printed["number"].notna()].drop_duplicates("series").itertuples():
        axis.plot([each.number], [how["level"]], **look(each.series, "published", {}))
        left = each.number < how["turn"]
        words = f"paper: {each.number / how['divisor']:g}{how['unit']}"
        place = {"xytext": how["offset"] if left else (-6, 6), "textcoords": "offset points", "fontsize": 7.5}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.5}
        place |= {"ha": "left" if left else "right", "color": style.colour(each.series), "bbox": box}
        axis.annotate(words, (each.number, how["level"]), **place)


def mark_all(axis: Axes, points: list[tuple[float, float]], printed: float) -> None:
    """Write values away from the dashed line at `printed`; the second of two close ones is placed higher."""
    before, raised = 0.0, False
    for x, y in points:
        above = y >= printed
        raised = above and x < 3 * before and not raised
        place = {"xytext": (0, (17 if raised else 7) if above else -14), "textcoords": "offset points", "ha": "center"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        axis.annotate(f"{y:.1f}", (x, y), fontsize=7, color=style.INK, bbox=box, **place)
        before = x if above else 0.0


def name_models(axis: Axes, modelled: pd.DataFrame, short: dict[str, str]) -> None:
    """Write the models' names above the axes; two of similar size share a label."""
    places = modelled.drop_duplicates("model").sort_values("at")
    at, names = places["at"].tolist(), [short.get(model, model) for model in places["model"]]
    for i in range(len(at) - 1, 0, -1):
        if at[i] < 1.25 * at[i - 1]:
            names[i - 1 : i + 1], at[i - 1 : i + 1] = [f"{names[i - 1]}, {names[i]}"], [(at[i - 1] * at[i]) ** 0.5]
    for x, name in zip(at, names, strict=True):
        place = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        axis.annotate(name, (x, 1), xycoords=("data", "axes fraction"), **place)


def handles(drawn: list[tuple[str, str]], panel: dict[str, Any]) -> tuple[dict[str, Line2D], dict[str, Line2D]]:
    """Return legend entries: one per series and one per lane."""
    labels, lanes = panel.get("labels", {}), {}
    series = {}
    for name, lane in drawn:
        plain = look(name, "measured", {**panel, "joined": True})
        if plain.get("linestyle") != "none":  # a series drawn as marks only keeps its own marks
            plain = {k: v for k, v in plain.items() if not k.startswith("marker")}
        series[name] = Line2D([], [], label=labels.get(name, name), **{**plain, "linewidth": plain.get("linewidth", 3)})
        ranks, where = (2, "measured") if lane == "several ranks" else (1, lane)
        words = panel.get("lane_labels", {}).get(lane, style.LANE_TEXT.get(lane, "measured with two ranks"))
        lanes[lane] = Line2D([], [], label=words, **look("of no system", where, panel, ranks))
    return series, lanes


def extra_handles(panels: list[dict[str, Any]]) -> list[Line2D]:
    """Return legend entries of further metrics that have a label."""
    named = {more["label"]: more["looks"] for panel in panels for more in panel.get("more", []) if "label" in more}
    return [Line2D([], [], color=style.PALETTE["grey"], label=label, **looks) for label, looks in named.items()]

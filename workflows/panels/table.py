"""Tables drawn as figures: rules above and below, wrapped cells, no boxes.

words    {name: word} for every row
pivot    {down, across, head}: in place of rows and columns, one for each value of two columns of the tidy table
rows     [{name: word}]: words that the columns' templates may use; or {by: column}: a row for each of its values
columns  [{head, width, wrap, and the contents of its cells}]; the contents are one of
           text     a template of the row's words, bold
           select   {column: template}: the value of the rows that fit; formatted by form if a number, else unchanged;
                    `unit: true` appends its unit
           each     like select with a line for every x value: form may use {x}, {value} and the metrics under `also`
         with none  in place of a missing value;  against  {column: template}: coloured beyond the tolerance of its
         `quantity`, and with `percent` also the deviation;  minus  {lane: surplus contained in the printed value};
         once  only in the first of rows with the same words;  behind  [{select, form}]: further lines
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from workflows import registry
from workflows.panels import data as panel_data
from workflows.panels import style

LINE, PAD = 0.165, 0.13  # inches per line, and between rows


@dataclass(frozen=True)
class Cell:
    """Text (lines are wrapped) and colour of a cell."""

    text: str
    colour: str = style.INK
    bold: bool = False


def unfolded(table: pd.DataFrame, panel: dict[str, Any]) -> dict[str, Any]:
    """Return the panel with its pivot expanded into rows and columns; units are in the heads."""
    if "pivot" not in panel:
        return panel
    down, across = panel["pivot"]["down"], panel["pivot"]["across"]
    mine = panel_data.select(table, panel.get("where"))
    columns = [{"head": panel["pivot"]["head"], "text": f"{{{down}}}", "wrap": panel["pivot"].get("first", 22)}]
    for name in dict.fromkeys(mine[across]):
        units = set(mine.loc[mine[across] == name, "unit"]) - {"", "text"}
        head = panel["pivot"].get("words", {}).get(name, name) + (f" ({min(units)})" if len(units) == 1 else "")
        one = {"head": head, "select": {down: f"{{{down}}}", across: name}, "wrap": panel["pivot"].get("wrap", 20)}
        columns.append(one | {"width": panel["pivot"].get("wrap", 20) / 20, "unit": len(units) > 1})
    return {**panel, "columns": columns, "rows": [{down: name} for name in dict.fromkeys(mine[down])]}


def cells(table: pd.DataFrame, panel: dict[str, Any]) -> list[list[Cell]]:
    """Return the body: the cells of every row."""
    rows = panel["rows"]
    if isinstance(rows, dict):
        found = panel_data.select(table, rows.get("where"))
        rows = [{rows["by"]: name} for name in dict.fromkeys(found[rows["by"]])]
    out, before = [], {}
    for row in ({**panel.get("words", {}), **row} for row in rows):
        line = []
        for number, column in enumerate(panel["columns"]):
            once = column.get("once", "").format(**row)
            again = once and before.get(number) == once
            made = Cell("") if again else cell(table, column, row)
            line.append(replace(made, bold=made.bold and ("text" not in column or not number)))
            before[number] = once
        out.append(line)
    return out


def cell(table: pd.DataFrame, column: dict[str, Any], row: dict[str, Any]) -> Cell:
    """Return one cell."""
    if "text" in column:
        return Cell(column["text"].format(**row), bold=True)
    if "each" in column:
        return Cell(each(table, column, row))
    found = panel_data.select(table, filled(column["select"], row))
    if found.empty:
        return Cell(column.get("none", "not stated"), style.FAINT)
    value, number = found.iloc[0]["value"], found.iloc[0]["number"]
    unit = " " + found.iloc[0]["unit"] if column.get("unit") and found.iloc[0]["unit"] != "text" else ""
    if pd.isna(number):
        return Cell(value + behind(table, column, row) + unit)
    shown = column.get("form", "{:g}").format(number) + unit
    printed = panel_data.first(table, filled(column["against"], row)) if "against" in column else None
    colour = style.INK
    if printed is not None:
        lane = found.iloc[0]["lane"]
        printed -= column.get("minus", {}).get(lane, 0.0)
        own = lane == "published"
        shown += f"  ({100 * (number / printed - 1):+.1f} %)" if column.get("percent") and not own else ""
        colour = style.INK if own or within(number, printed, column["quantity"], lane) else style.PALETTE["vermilion"]
    return Cell(
        shown + behind(table, column, row),
        colour,
        bold=column.get("bold", found.iloc[0]["lane"] == "published" and "percent" in column),
    )


def within(number: float, printed: float, quantity: str, lane: str) -> bool:
    """Return whether a number is within the tolerance of its kind around the printed one."""
    ((form, amount),) = registry.tolerances()[quantity][lane].items()
    return abs(number - printed) <= (abs(printed) * amount / 100 if form == "relative_percent" else amount)


def behind(table: pd.DataFrame, column: dict[str, Any], row: dict[str, Any]) -> str:
    """Return further lines of a cell for selectors that find something other than "fits"."""
    lines = []
    for more in column.get("behind", []):
        found = panel_data.select(table, filled(more["select"], row))["value"]
        if len(found) and found.iloc[0] != "fits":
            number = panel_data.numeric(found.iloc[0])
            lines.append("\n" + more["form"].format(found.iloc[0] if number is None else number))
    return "".join(lines)


def each(table: pd.DataFrame, column: dict[str, Any], row: dict[str, Any]) -> str:
    """Return a line for each x value of the rows that fit."""
    found = panel_data.select(table, filled(column["each"], row))
    lines = []
    for x in sorted(set(found["x_value"]), key=float):
        here = found[found["x_value"] == x]
        values = {name: panel_data.first(here, {"metric": metric}) for name, metric in column["also"].items()}
        if None not in values.values():
            lines.append(column["form"].format(x=x, **values))
    return "\n".join(lines) or column.get("none", "not measured")


def filled(where: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a selector with the row's words filled in."""
    return {name: text.format(**row) if isinstance(text, str) else text for name, text in where.items()}


def height(body: list[list[Cell]], panel: dict[str, Any]) -> list[float]:
    """Return the heights in inches of the head and of every row."""
    wrap = [column.get("wrap", 18) for column in panel["columns"]]
    heads = [Cell(column["head"]) for column in panel["columns"]]
    counts = [max(wrapped(c.text, n).count("\n") + 1 for c, n in zip(row, wrap, strict=True)) for row in [heads, *body]]
    return [LINE * count + PAD for count in counts]


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw the table over the whole axes; return an empty list, since its head names the lanes."""
    panel = unfolded(table, panel)
    body = panel.get("_body") or cells(table, panel)
    heights, columns = height(body, panel), panel["columns"]
    widths = [column.get("width", 1.0) for column in columns]
    starts, whole = [sum(widths[:i]) for i in range(len(widths))], sum(widths)
    axis.set(xlim=(0, whole), ylim=(sum(heights) + 0.1, 0))
    axis.axis("off")
    y = 0.0
    rule(axis, y, whole, 1.2)
    heads = [Cell(column["head"], bold=True) for column in columns]
    for number, (row, tall) in enumerate(zip([heads, *body], heights, strict=True)):
        for column, start, each_cell in zip(columns, starts, row, strict=True):
            look = {"va": "center", "ha": "left", "fontsize": 8.5, "linespacing": 1.35, "color": each_cell.colour}
            text = wrapped(each_cell.text, column.get("wrap", 18))
            axis.text(start + 0.05, y + tall / 2, text, **look, fontweight="bold" if each_cell.bold else "normal")
        y += tall
        rule(axis, y, whole, 1.2 if number in (0, len(body)) else 0.4)
    return []


def wrapped(text: str, characters: int) -> str:
    """Return text with lines of at most this many characters; its own line ends stay."""
    return "\n".join(line for part in text.split("\n") for line in (textwrap.wrap(part, characters) or [""]))


def rule(axis: Axes, y: float, width: float, weight: float) -> None:
    """Draw a horizontal line from 0 to `width` at height `y`; `weight` is its thickness in points."""
    axis.plot([0, width], [y, y], color=style.INK, linewidth=weight, clip_on=False)

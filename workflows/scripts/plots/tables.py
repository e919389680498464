"""Tables drawn as figures: rules above and below, wrapped cells, no boxes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from matplotlib.figure import Figure

from workflows.scripts.plots import style


@dataclass(frozen=True)
class Cell:
    """A cell's text (lines are wrapped) and colour."""

    text: str
    colour: str = "#222222"
    bold: bool = False


def draw_table(
    head: list[str], body: list[list[Cell]], widths: list[float], wrap: list[int], width_inches: float = 9.0
) -> Figure:
    """A figure of a table. ``widths`` are shares of the columns, ``wrap`` their characters in a line."""
    line, pad = 0.165, 0.13
    wrapped = [[wrap_cell(cell.text, n) for cell, n in zip(row, wrap, strict=True)] for row in body]
    heads = [wrap_cell(text, n) for text, n in zip(head, wrap, strict=True)]
    heights = [line * max(text.count("\n") + 1 for text in row) + pad for row in [heads, *wrapped]]
    total = sum(heights) + 0.1
    figure, (axis,) = style.canvas(1, width=width_inches, height=total + 0.5)
    axis.set(xlim=(0, sum(widths)), ylim=(total, 0))
    axis.axis("off")
    starts = [sum(widths[:i]) for i in range(len(widths))]
    rule(axis, 0.0, sum(widths), 1.2)
    y = 0.0
    for number, (texts, height) in enumerate(zip([heads, *wrapped], heights, strict=True)):
        for column, (start, text) in enumerate(zip(starts, texts, strict=True)):
            cell = body[number - 1][column] if number else Cell("", bold=True)
            axis.text(
                start + 0.05,
                y + height / 2,
                text,
                va="center",
                ha="left",
                fontsize=8.5,
                color=cell.colour,
                linespacing=1.35,
                fontweight="bold" if cell.bold or column == 0 else "normal",
            )
        y += height
        rule(axis, y, sum(widths), 1.2 if number in (0, len(body)) else 0.4)
    return figure


def wrap_cell(text: str, characters: int) -> str:
    return "\n".join(line for part in text.split("\n") for line in (textwrap.wrap(part, characters) or [""]))


def rule(axis, y: float, width: float, weight: float) -> None:
    axis.plot([0, width], [y, y], color="#222222", linewidth=weight, clip_on=False)

"""Listings and equations: text from a paper next to its counterpart in this repository.

blocks   [{title, lines} or {title, file, name}]: side by side, monospaced; the second shows a function or class of this
         repository
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from workflows.panels import style

ROOT = Path(__file__).resolve().parents[2]


def draw(axis: Axes, table: pd.DataFrame, panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Draw the blocks side by side; return an empty list, since none of them has a lane."""
    axis.axis("off")
    blocks = [(block["title"], source(block)) for block in panel["blocks"]]
    for i, (title, lines) in enumerate(blocks):
        x = i / len(blocks) + 0.01
        axis.text(x, 1.0, title, transform=axis.transAxes, va="top", fontsize=9.5, fontweight="bold")
        mono = {"family": "DejaVu Sans Mono", "fontsize": panel.get("fontsize", 7.5), "linespacing": 1.45}
        axis.text(x, 0.93, indented(lines), transform=axis.transAxes, va="top", color=style.INK, **mono)
    return []


def indented(lines: str) -> str:
    """Return the lines with no-break spaces for runs of spaces, which a browser would collapse in an SVG."""
    return re.sub(r"^ +| {2,}", lambda spaces: "\N{NO-BREAK SPACE}" * len(spaces[0]), lines, flags=re.MULTILINE)


def source(block: dict[str, Any]) -> str:
    """Return the block's own lines, or the source of a function or class of this repository without its docstring."""
    if "lines" in block:
        return block["lines"]
    text = (ROOT / block["file"]).read_text()
    defined = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    nodes = [node for node in defined if node.name == block["name"]]
    if not nodes:
        raise ValueError(f"{block['file']} has no {block['name']!r}; the figure's specification names it")
    node = nodes[0]
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return textwrap.dedent(ast.unparse(node))

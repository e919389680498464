"""The picture of an exhibit as an element of its page, where a pointer can read its values."""

from __future__ import annotations

import re
from pathlib import Path

from markupsafe import Markup, escape

from workflows import tidy

EVERYWHERE = '<style type="text/css">*{'  # matplotlib's rule, meant for a separate document


def inlined(path: Path, title: str) -> Markup:
    """Return the drawing of an SVG file as an element named `title`; raise TableError if the file has none."""
    svg = path.read_text(encoding="utf-8")
    begin = svg.find("<svg ")
    if begin < 0:
        raise tidy.TableError(f"{path}: no SVG drawing; draw it again with: snakemake --cores all {path.stem}")
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[begin:], count=1, flags=re.DOTALL)
    svg = svg.replace(EVERYWHERE, EVERYWHERE.replace("*", ".picture svg *"), 1)
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))

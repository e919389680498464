"""HTML from the templates in `templates/`, which escape all text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

HERE = Path(__file__).parent


@cache
def _templates() -> Environment:
    own = FileSystemLoader(HERE / "templates")
    made = Environment(loader=own, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters |= {"slug": slug, "opening": opening, "with_errata": with_errata}
    return made


def render(name: str, title: str, root: str, **values: Any) -> str:
    """Return the page of that template; `root` is the relative path from the page to the site's
    folder ("" or "../")."""
    return _templates().get_template(f"{name}.html").render(title=title, root=root, **values)


def slug(words: str) -> str:
    """Return words as the value of a class or attribute: "not checkable here" -> "not-checkable-here"."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def opening(words: str) -> str:
    """Return words with the first letter as a capital."""
    return words[:1].upper() + words[1:]


@pass_context
def with_errata(context: Context, text: str, paper: str) -> Markup:
    """Return text in which every "erratum M5" links to that erratum of the paper (the name of its folder)."""
    link = rf'<a href="{context["root"]}errata.html#{paper}-\2">\1 \2</a>'
    return Markup(re.sub(r"\b([Ee]rratum) ([A-Z]\d+)\b", link, str(escape(text))))


def markdown(line: str) -> Markup:
    """Return the HTML of a line of a caption; the only markup in captions is bold."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(line))))

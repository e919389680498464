"""HTML pages from the templates beside this module: what is text is escaped there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _templates() -> Environment:
    own = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=own, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def page(name: str, title: str, **values: Any) -> str:
    """The page of that name, which needs nothing but the files beside it."""
    return _templates().get_template(f"{name}.html").render(title=title, **values)

"""The modelled lane of each paper, computed once in a test process: it takes about six seconds per paper."""

from __future__ import annotations

import functools
from typing import Any

from workflows.derive.table import rows_of
from workflows.papers.memascend import rows as memascend
from workflows.papers.memascend.rows import data_flow, memory


@functools.cache
def swept_and_timed() -> tuple[dict[str, Any], ...]:
    """Return MemAscend's modelled rows of its sweeps and times."""
    return (*memascend.sweeps.planned(), *memascend.times.rows())


@functools.cache
def modelled(paper: str) -> tuple[dict[str, Any], ...]:
    """Return the modelled rows of a paper; none if nothing is computed yet."""
    if paper == "memascend":
        return (*memory.planned(), *swept_and_timed(), *data_flow.rows())
    module = rows_of(paper)
    return () if module is None else tuple(module.modelled())

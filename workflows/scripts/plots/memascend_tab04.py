"""MemAscend Table IV: throughput of MemAscend over ZeRO-Infinity, the same I/O engine in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import improvements

HEAD_INCHES = 0.1


def draw(table: pd.DataFrame) -> Figure:
    """The table as a figure."""
    return improvements.draw(table, "MemAscend vs ZeRO-Infinity")

"""MemAscend Table III: hardware configurations 1 and 2, with the machine that measured beside them."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import specs

HEAD_INCHES = 0.1


def draw(table: pd.DataFrame) -> Figure:
    """The table as a figure."""
    return specs.draw(table)

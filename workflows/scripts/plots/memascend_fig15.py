"""MemAscend Fig. 15: peak system memory of four models, end to end (fp16)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots.bars import amount_and_reduction


def draw(table: pd.DataFrame) -> Figure:
    """Peaks on the left, reduction on the right."""
    return amount_and_reduction(
        table, "peak system memory", "peak system memory (GiB; measured × k²)", "average reduction"
    )

"""MemAscend Fig. 11: memory of the parameter buffer pool, four models."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots.bars import amount_and_reduction


def draw(table: pd.DataFrame) -> Figure:
    """Pools on the left, reduction on the right."""
    return amount_and_reduction(
        table,
        "parameter buffer pool",
        "parameter buffer pool (GiB; measured × k²)",
        "average pool reduction",
        decimals=2,
    )

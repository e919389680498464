"""MemAscend Fig. 21: peak system memory of four models in bf16 mixed precision."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots.bars import amount_and_reduction


def draw(table: pd.DataFrame) -> Figure:
    """Peaks on the left, reduction on the right."""
    return amount_and_reduction(
        table, "peak system memory", "peak system memory (GiB; measured × k²)", "average memory reduction, bf16"
    )

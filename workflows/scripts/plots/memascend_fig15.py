"""MemAscend Fig. 15: peak system memory of four models, end to end (fp16)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots.bars import amount_and_reduction
from workflows.scripts.plots.rows import TWIN
from workflows.scripts.tidy import AS_PUBLISHED, MEMASCEND, SCALED, numeric

METRIC = "peak system memory"


def draw(table: pd.DataFrame) -> Figure:
    """Peaks on the left, reduction on the right; runs with several ranks in words, as the paper has one."""
    figure = amount_and_reduction(table, METRIC, "peak system memory (GiB; measured × k²)", "average reduction")
    text = "\n".join(several_ranks(table))
    if text:
        figure.axes[0].annotate(text, (0.02, 0.97), xycoords="axes fraction", va="top", fontsize=8)
    return figure


def several_ranks(table: pd.DataFrame) -> list[str]:
    """A line for each model that was measured with more than one rank, all ranks added up."""
    found = table["testbed"].str.extract(TWIN)
    ranks = found[1].fillna("").str.removeprefix("-r")
    mine = table.assign(k=found[0], ranks=ranks, number=table["value"].map(numeric))
    mine = mine[mine["ranks"].ne("") & mine["metric"].eq(METRIC + SCALED) & mine["number"].notna()]
    lines = []
    for (model, k, ranks), group in mine.groupby(["model", "k", "ranks"]):
        peaks = group.set_index("series")["number"]
        if {AS_PUBLISHED, MEMASCEND} <= set(peaks.index):
            before, after = peaks[AS_PUBLISHED], peaks[MEMASCEND]
            percent = 100 * (1 - after / before)
            lines.append(f"{model}, {ranks} ranks (k = {k}): {before:.1f} to {after:.1f} GiB, {percent:.1f} % less")
    return lines

"""Tables of machines (MemAscend Tables III and V)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots.tables import Cell, draw_table


def draw(table: pd.DataFrame) -> Figure:
    """A row for each component, a column for each machine, its lane in the head."""
    table = table[table["metric"] == "specification"]
    components = list(dict.fromkeys(table["x_value"]))
    machines = list(dict.fromkeys(zip(table["series"], table["lane"], strict=True)))
    head = ["Component", *(f"{series}\n({lane})" for series, lane in machines)]
    body = [
        [Cell(component), *(cell(table, series, lane, component) for series, lane in machines)]
        for component in components
    ]
    n = len(machines)
    return draw_table(head, body, [0.8] + [1.6] * n, [14] + [max(18, 84 // n)] * n)


def cell(table: pd.DataFrame, series: str, lane: str, component: str) -> Cell:
    found = table[(table["series"] == series) & (table["lane"] == lane) & (table["x_value"] == component)]["value"]
    return Cell(found.iloc[0] if len(found) else "not stated")

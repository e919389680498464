"""MemAscend Table II: peak system memory of three model sizes under three approaches."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import rows, style
from workflows.scripts.plots.tables import Cell, draw_table
from workflows.scripts.tidy import ALL_IN_GPU, AS_PUBLISHED, SCALED, ZERO_OFFLOAD, numeric

SIZES = {"1B": "Llama3.2-1B", "3B": "Llama3.2-3B", "8B": "Llama3.1-8B"}
SYSTEMS = (ALL_IN_GPU, ZERO_OFFLOAD, AS_PUBLISHED)
LANES = {"published": "published", "modelled": "modelled", "measured": "measured × k²"}
METRIC = "peak system memory"
# Fig. 8's process memory, which the printed totals hold and the measured lane (net of its baseline) does not.
PROCESS_OVERHEAD_GIB = 1.63
SHOWN_AS_DEVIATION = 5.0  # percent: beyond this a cell is coloured

HEAD_INCHES = 0.1


def draw(table: pd.DataFrame) -> Figure:
    """A row for each size and lane; deviations from the printed value beside the numbers."""
    table = table.assign(
        series=table["series"].replace({"ZeRO-Infinity": AS_PUBLISHED}), model=table["model"].replace(SIZES)
    )
    body = []
    for size, model in SIZES.items():
        for lane, name in LANES.items():
            first = f"{size}\n({model})" if lane == "published" else ""
            body.append([Cell(first), Cell(name), *(cell(table, model, series, lane) for series in SYSTEMS)])
    head = ["Model size", "Lane", *(f"{series} (GiB)" for series in SYSTEMS)]
    return draw_table(head, body, [1.0, 1.0, 1.6, 1.6, 1.8], [16, 16, 28, 28, 30])


def cell(table: pd.DataFrame, model: str, series: str, lane: str) -> Cell:
    """The value of a lane, with its deviation from the paper."""
    mine = table[(table["model"] == model) & (table["series"] == series)]
    printed = text_of(mine[(mine["lane"] == "published") & (mine["metric"] == METRIC)])
    metrics = [METRIC + SCALED, METRIC] if lane == "measured" else [METRIC]
    text = next((t for t in (text_of(mine[(mine["lane"] == lane) & (mine["metric"] == m)]) for m in metrics) if t), "")
    number = numeric(text)
    if not text:
        return Cell("not measured" if lane == "measured" else "not stated", "#888888")
    if number is None:
        return Cell(text)
    rest = outcome(mine, lane)
    if lane == "published":
        return Cell(f"{number:.2f}", bold=True)
    if numeric(printed) is None:
        return Cell(f"{number:.2f}{rest}")
    expected = float(printed) - (PROCESS_OVERHEAD_GIB if lane == "measured" else 0.0)
    off = 100 * (number / expected - 1)
    return Cell(f"{number:.2f}  ({off:+.1f} %){rest}", style.VERMILION if abs(off) > SHOWN_AS_DEVIATION else "#222222")


def outcome(mine: pd.DataFrame, lane: str) -> str:
    """Where the lane says so: why the model does not fit, and what the GPU would have to hold."""
    lines = []
    for metric, form in (("outcome", "N/A ({})"), ("peak device memory", "GPU: {:.1f} GiB")):
        found = mine[(mine["lane"] == lane) & (mine["metric"] == metric)]["value"]
        if len(found) and lane == "modelled" and found.iloc[0] != "fits":
            number = numeric(found.iloc[0])
            lines.append(form.format(found.iloc[0] if number is None else number))
    return "".join(f"\n{line}" for line in lines)


def text_of(found: pd.DataFrame) -> str:
    """The value of the largest twin's row, or an empty string."""
    if found.empty:
        return ""
    factor = found["testbed"].str.extract(rows.TWIN)[0].fillna("1").astype(int)
    return found.loc[factor.idxmin(), "value"]

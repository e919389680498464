"""Tables IV and VI: percent more tokens a second, by model, batch and configuration."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import style
from workflows.scripts.plots.tables import Cell, draw_table
from workflows.scripts.tidy import DENSE, numeric

METRIC = "throughput improvement"
LOW, HIGH = (f"{METRIC}, {end} quartile over rounds" for end in ("lower", "upper"))
SHOWN_AS_DEVIATION = 25.0  # percent of the printed improvement: the tolerance of the claims


def draw(table: pd.DataFrame, series: str) -> Figure:
    """A line for each printed cell: the paper, the planner; and what this machine measured with a twin of the model."""
    mine = table[table["metric"].isin((METRIC, LOW, HIGH))].assign(number=table["value"].map(numeric))
    body = []
    for model in DENSE:
        printed = mine[(mine["model"] == model) & (mine["lane"] == "published")]
        columns = (printed[printed["series"] == f"{series}, {c}"] for c in ("C1", "C2"))
        batches = [list(dict.fromkeys(column["x_value"])) for column in columns]
        for number, pair in enumerate(zip(*batches, strict=True)):
            cells = [Cell(model if number == 0 else ""), Cell(" / ".join(pair))]
            for configuration, batch in zip(("C1", "C2"), pair, strict=True):
                where = mine[(mine["series"] == f"{series}, {configuration}") & (mine["model"] == model)]
                cells += printed_and_modelled(where[where["x_value"] == batch])
            measured = mine[(mine["series"] == series) & (mine["model"] == model) & (mine["lane"] == "measured")]
            cells.append(Cell(on_this_machine(measured) if number == 0 else ""))
            body.append(cells)
    head = ["Model", "Batch\nC1 / C2"]
    head += [f"{c} (%)\n{lane}" for c in ("C1", "C2") for lane in ("published", "modelled")]
    head.append("Twin on this machine (%)\nmeasured")
    return draw_table(head, body, [1.1, 0.8, 0.9, 0.9, 0.9, 0.9, 2.1], [14, *[10] * 5, 34])


def printed_and_modelled(data: pd.DataFrame) -> list[Cell]:
    """Two cells; a modelled value further off than the claims allow is coloured."""
    values = {lane: data.loc[data["lane"] == lane, "number"] for lane in ("published", "modelled")}
    printed, modelled = (float(v.iloc[0]) if len(v) else None for v in values.values())
    cells = [Cell("not stated" if printed is None else f"{printed:.2f}", bold=True)]
    if modelled is None:
        return [*cells, Cell("")]
    off = printed is not None and abs(modelled / printed - 1) > SHOWN_AS_DEVIATION / 100
    return [*cells, Cell(f"{modelled:.2f}", style.VERMILION if off else "#222222")]


def on_this_machine(data: pd.DataFrame) -> str:
    """A line for each batch: median over rounds, quartiles in brackets."""
    lines = []
    for batch in sorted(set(data["x_value"]), key=int):
        low, middle, high = (
            data.loc[(data["metric"] == m) & (data["x_value"] == batch), "number"].iloc[0] for m in (LOW, METRIC, HIGH)
        )
        lines.append(f"batch {batch}: {middle:+.1f} ({low:+.1f} to {high:+.1f})")
    return "\n".join(lines) or "not measured"

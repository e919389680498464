"""What panels draw from a tidy table: one value for each model, series and lane, at the original's size."""

from __future__ import annotations

import re

import pandas as pd

from workflows.scripts.tidy import AS_PUBLISHED, DENSE, SCALED, numeric

TWIN = re.compile(r"-k(\d+)(-r\d+)?$")
ORDER = ("Llama3.2-1B", "Llama3.2-3B", *DENSE, "Qwen3-30B-A3B")
SERIES_ORDER = (
    "ZeRO-Infinity (as published)",
    "ZeRO-Infinity (",
    "torch.aminmax",
    "MemAscend",
    "ZeRO-Offload",
    "All in GPU",
)


def comparable(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with a number, at the original's size: of the measured lane, the scaled metric of each model's largest twin.

    Adds the columns ``number``, ``k`` and ``ranks``. A published "ZeRO-Infinity" is the system as published,
    "both" is two systems.
    """
    table = table.assign(number=table["value"].map(numeric))
    table = table[table["number"].notna()].copy()
    found = table["testbed"].str.extract(r"-k(\d+)(?:-r(\d+))?$")
    table["k"] = found[0].fillna("1").astype(int)
    table["ranks"] = found[1].fillna("1").astype(int)
    measured = table["lane"].eq("measured")
    scaled = table["metric"].str.endswith(SCALED)
    has_scaled = table["metric"].isin({metric.removesuffix(SCALED) for metric in table.loc[scaled, "metric"]})
    table = table[~(measured & has_scaled & (table["k"] > 1))].copy()
    table["metric"] = table["metric"].str.removesuffix(SCALED)
    table["series"] = table["series"].replace({"ZeRO-Infinity": AS_PUBLISHED})
    both = table["series"].eq("both")
    table = pd.concat([table[~both], table[both].assign(series=AS_PUBLISHED), table[both].assign(series="MemAscend")])
    return largest_twins(table[table["ranks"] == 1])


def largest_twins(table: pd.DataFrame) -> pd.DataFrame:
    """Of several twins of a model on a host, the one with the smallest k, for each series."""
    host = table["testbed"].str.split("/").str[0]
    least = table.groupby([host, "series", "model", "metric", "lane"])["k"].transform("min")
    return table[table["k"] == least]


def models_of(table: pd.DataFrame) -> list[str]:
    """Models in a fixed order, those of the paper first."""
    present = set(table["model"])
    return [model for model in ORDER if model in present]


def series_of(table: pd.DataFrame) -> list[str]:
    """Series in a fixed order."""

    def rank(series: str) -> tuple[int, str]:
        return next((i for i, start in enumerate(SERIES_ORDER) if series.startswith(start)), len(SERIES_ORDER)), series

    return sorted(set(table["series"]), key=rank)


def value(table: pd.DataFrame, **where: str) -> float | None:
    """The number of the row that matches, or None; the first of several."""
    mask = pd.Series(True, index=table.index)
    for column, wanted in where.items():
        mask &= table[column] == wanted
    found = table.loc[mask, "number"]
    return float(found.iloc[0]) if len(found) else None

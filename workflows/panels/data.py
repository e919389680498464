"""The data that panels draw from a tidy table: numbers under one name for all lanes, at the original's size.

A panel's specification selects rows with `where` ({column: value or list}) and may compute with `derive`:
  {less: [A, B]}     100 (1 - B / A) of two series       {remains: [A, B]}  100 B / A of two series
  {share: [M, N]}    100 N / (M + N) of two metrics      {over: M}          the value divided by that of metric M
`rates` adds bandwidths computed from the times that it selects.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from workflows.panels.style import LANES, REFERENCE
from workflows.tidy import OF_REFERENCE, SCALED, is_reference, numeric

TWIN = re.compile(r"-k(\d+)(?:-r(\d+))?$")
SERIES = ["ZeRO-Infinity (as published)", "ZeRO-Infinity", "torch.aminmax", "MemAscend", "ZeRO-Offload", "All in GPU"]


def prepared(table: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
    """Return every row with the columns `number` and `at` (NaN for text), `k` and `ranks`.

    A twin's scaled metric replaces its own, and only the largest of several twins of a model is kept. The specification
    says which series "both" and "all" stand for, what to `rename` ({column: {from: to}}), and which printed values are
    `corrected` ({lane, values: {as printed: as meant}}).
    """
    table = table.assign(number=table["value"].map(numeric), at=table["x_value"].map(numeric))
    table = table.astype({"number": float, "at": float})
    found = table["testbed"].str.extract(TWIN)
    table["k"], table["ranks"] = (found[i].fillna("1").astype(int) for i in (0, 1))
    scaled = table["metric"].str.endswith(SCALED)
    own = table["metric"].isin(set(table.loc[scaled, "metric"].str.removesuffix(SCALED)))
    table = table[~(table["lane"].eq("measured") & own & table["number"].notna())].copy()
    table["metric"] = table["metric"].str.removesuffix(SCALED)
    of_reference = is_reference(table)
    table.loc[of_reference, "lane"] = REFERENCE
    table["series"] = table["series"].str.replace(OF_REFERENCE, "", regex=True)
    for several in ("both", "all"):
        of = table["series"].eq(several)
        table = pd.concat([table[~of], *(table[of].assign(series=name) for name in spec.get(several, [several]))])
    table = table.replace(spec.get("rename", {}))
    corrected = spec.get("corrected", {"lane": "", "values": {}})
    printed = table["lane"].eq(corrected["lane"]) & table["value"].isin(list(corrected["values"]))
    table.loc[printed, "number"] = table.loc[printed, "value"].map(corrected["values"]).astype(float)
    same = ["series", "model", "metric", "lane", "ranks", "x_name", "x_value", "subfigure"]
    least = table.groupby(same)["k"].transform("min")
    return table[table["k"] == least]


def select(data: pd.DataFrame, where: dict[str, Any] | None) -> pd.DataFrame:
    """Return the rows that fit every column; a list matches any of its values, and null any value."""
    for column, wanted in (where or {}).items():
        if wanted is not None:
            data = data[data[column].isin([*map(str, wanted)] if isinstance(wanted, list) else [str(wanted)])]
    return data


def shown(data: pd.DataFrame, panel: dict[str, Any]) -> pd.DataFrame:
    """Return the numbers of one panel: its metric, its selection, then what it derives."""
    data = select(data, panel.get("where"))
    derive = panel.get("derive")
    if "rates" in panel:  # GB/s, from times in microseconds and the bytes at x
        timed = select(data, panel["rates"])
        data = pd.concat(
            [data, timed.assign(metric=panel["metric"], number=timed["at"] / timed["number"] / 1e3, unit="GB/s")]
        )
    if derive:
        data = derived(data, *next(iter(derive.items())), panel.get("metric"))
    elif "metric" in panel:
        data = select(data, {"metric": panel["metric"]})
    return data[data["number"].notna()]


def derived(data: pd.DataFrame, how: str, names: Any, metric: str | None) -> pd.DataFrame:
    """Return the rows of a quotient; each has the cells of its last operand."""
    column = "series" if how in ("less", "remains") else "metric"
    if column == "series":
        data = select(data, {"metric": metric})
    first, second = (names, metric) if how == "over" else names
    keys = ["model", "lane", "ranks", *({"series", "metric"} - {column})]
    whole = data[data[column] == first].drop_duplicates(keys).set_index(keys)["number"]
    rest = data[(data[column] == second) & data["number"].notna()].copy()
    part, below = rest["number"], whole.reindex(pd.MultiIndex.from_frame(rest[keys])).to_numpy()
    rest["number"] = {
        "less": 100 * (1 - part / below),
        "remains": 100 * part / below,
        "share": 100 * part / (part + below),
        "over": part / below,
    }[how]
    return rest[rest["number"].notna()]


def words(row: pd.Series, panel: dict[str, Any], number: float | None = None) -> str:
    """Return a value for readers: system and model, x, lane, and amount.

    `number` replaces the row's own number, for example by a part of a sum.
    """
    number = row["number"] if number is None else number
    twin = f", from a twin of k = {row['k']}" if row["lane"] == "measured" and row["k"] > 1 else ""
    ranks = f", {row['ranks']} ranks" if row["ranks"] > 1 else ""
    number_at = plain(row["at"]) if row["at"] >= 10_000 else row["x_value"]
    at = f"{row['x_name']} {number_at}".strip() if row["x_name"] != "model" else ""
    which = [row["series"], row["model"], at, f"{row['lane']}{twin}{ranks}"]
    how = next(iter(panel.get("derive", {})), None)
    unit = {None: row["unit"], "over": ""}.get(how, "%")
    return f"{', '.join(dict.fromkeys(filter(None, which)))}: {plain(number)} {unit}".strip()


def plain(number: float) -> str:
    """Return a number with four significant digits, or from 1000 on with all digits of its whole part."""
    return f"{number:,.2f}".rstrip("0").rstrip(".") if abs(number) >= 1000 else f"{number:.4g}"


def first(data: pd.DataFrame, where: dict[str, Any]) -> float | None:
    """Return the first number that fits, or None."""
    found = select(data, where)["number"].dropna()
    return float(found.iloc[0]) if len(found) else None


def ordered(found: Any, order: list[str]) -> list[str]:
    """Return the names found: those that begin like an entry of `order` in its order, then the others by name."""

    def rank(name: str) -> tuple[int, str]:
        places = [i for i, start in enumerate(order) if name == start or name.startswith(start + " ")]
        exact = [i for i, start in enumerate(order) if name == start]
        return (exact or places or [len(order)])[0], name

    return sorted(set(found), key=rank)


def lanes_of(data: pd.DataFrame) -> list[str]:
    """Return the lanes that have rows, in the order in which they are drawn."""
    present = set(data["lane"])
    return [lane for lane in LANES if lane in present]

"""Growth of chips and models: committed release data, and lines fitted to their logarithms (Fig. 1 of two papers)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from workflows import registry
from workflows.cases import Row, row

RELEASES = "public release data"  # stands in the testbed column
SERIES = {"16-bit rate of a chip": ("chips", "tflops"), "memory of a chip": ("chips", "gb")}
SERIES["size of a model"] = ("models", "billions")


def growth(exhibit: str, until: float) -> Iterator[Row]:
    """Yield the rows of Fig. 1: releases up to the date `until`, their trend lines, and figures derived from the
    slopes.

    Values are relative to the first release of their series.
    """
    said = registry.read(registry.ROOT / "workflows/papers/releases.yaml")
    slopes = {}
    for series, (kind, field) in SERIES.items():
        found = sorted((each for each in said[kind] if each["date"] <= until), key=lambda each: each["date"])
        dates, values = (np.array([each[name] for each in found], dtype=float) for name in ("date", field))
        slope, start = np.polyfit(dates, np.log10(values), 1)
        slopes[series] = float(slope)
        for each in found:
            cells = {"series": series, "model": each["name"], "x": ("release date", float(each["date"]))}
            yield _row(exhibit, "relative to the first", each[field] / values[0], "x", each["source"], **cells)
        for date in (dates[0], dates[-1]):
            at = 10 ** (start + slope * date) / values[0]
            cells = {"series": f"{series}, trend", "x": ("release date", float(date))}
            yield _row(exhibit, "relative to the first", at, "x", "least squares of the logarithms", **cells)
        yield _row(exhibit, "growth in two years", 10 ** (2 * slope), "x", "slope of its line", series=series)
    rate, memory, size = slopes.values()
    for to, of in (("16-bit rate", rate), ("model size", size)):
        cells = {"series": f"memory of a chip over {to}"}
        yield _row(exhibit, "ratio of growth rates", 100 * memory / of, "%", "ratio of the two slopes", **cells)


def _row(exhibit: str, metric: str, value: float, unit: str, source: str, **cells: Any) -> Row:
    return row(exhibit, metric, value, unit, "modelled", source, testbed=RELEASES, **cells)

"""Latency and bandwidth of one tensor by its size (MemAscend Fig. 14), from records of ``memascend bench nvme``.

ZeRO-Infinity is DeepNVMe with a file per tensor on the file system. MemAscend is the direct engine on a loop device, or
in a file if there is none. Two further series separate the causes: DeepNVMe in the file behind that device, at the
engine's place, separates the software from the place on the disk; the engine in a file shows the effect of the loop
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from workflows.cases import Row, of_record, quartiles
from workflows.tidy import MEMASCEND

EXHIBIT = "memascend-fig14"
ZERO_INFINITY = "ZeRO-Infinity"
SERIES = {
    "engine": MEMASCEND,
    "engine, file": "MemAscend's engine in a file",
    "DeepNVMe, file per tensor": ZERO_INFINITY,
    "DeepNVMe": "DeepNVMe at MemAscend's place",
}
PANEL = {("write", "latency"): "a", ("write", "bandwidth"): "b", ("read", "latency"): "c", ("read", "bandwidth"): "d"}
ENDS = (", lower quartile over rounds", "", ", upper quartile over rounds")
GAIN = "write bandwidth improvement"
READS = "average read bandwidth relative to ZeRO-Infinity"


def rows(bench: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one record; runs with several workers are left out."""
    points = [p for p in bench["points"] if p.get("question") == "sizes" and p["method"] in SERIES]
    bandwidth: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        series, op, size = SERIES[point["method"]], point["op"], point["bytes"]
        for end, seconds in zip(ENDS, quartiles(point["seconds"]), strict=True):
            yield _row(bench, series, f"{op} latency{end}", 1e6 * seconds, "us", size, PANEL[op, "latency"])
        rates = quartiles([size / seconds / 1e9 for seconds in point["seconds"]])
        for end, rate in zip(ENDS, rates, strict=True):
            yield _row(bench, series, f"{op} bandwidth{end}", rate, "GB/s", size, PANEL[op, "bandwidth"])
        bandwidth.setdefault((series, op), {})[size] = rates[1]
    yield from _gains(bench, bandwidth)


def _gains(bench: dict[str, Any], bandwidth: dict[tuple[str, str], dict[int, float]]) -> Iterator[Row]:
    """Yield the gain in writing by size and over the sizes, and in reading the ratio of the means over the sizes."""
    if any((series, op) not in bandwidth for series in (MEMASCEND, ZERO_INFINITY) for op in ("write", "read")):
        return
    mine, theirs = bandwidth[MEMASCEND, "write"], bandwidth[ZERO_INFINITY, "write"]
    ratio = {size: mine[size] / theirs[size] for size in mine}
    for size, times in ratio.items():
        yield _row(bench, MEMASCEND, GAIN, 100 * (times - 1), "%", size, "b")
    yield _row(bench, MEMASCEND, f"{GAIN}, up to", max(ratio.values()), "x", "", "b")
    yield _row(bench, MEMASCEND, f"{GAIN}, average", fmean(100 * (times - 1) for times in ratio.values()), "%", "", "b")
    reads = [fmean(bandwidth[series, "read"].values()) for series in (MEMASCEND, ZERO_INFINITY)]
    yield _row(bench, MEMASCEND, READS, reads[0] / reads[1], "x", "", "d")


def _row(bench: dict[str, Any], series: str, metric: str, value: float, unit: str, size: int | str, panel: str) -> Row:
    x = ("tensor size (bytes)" if size else "", size)
    return of_record(bench, EXHIBIT, metric, value, unit, subfigure=panel, series=series, x=x)

"""The overflow check by size: MemAscend Fig. 12, the times of Fig. 3 and the extra memory of Fig. 13.

The rows come from records of ``memascend bench overflow`` (older ones, of kind bench-overflow, only give Figs. 3 and
13). The sizes that were run are measured. A model's gradients do not fit a small machine: its latency is read off a
straight line (least squares) through the medians of all measured sizes, has the lane ``modelled``, and names that line
as its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from memascend.planner.spec import model_spec
from workflows.cases import Row, of_record, quartiles
from workflows.tidy import AS_PUBLISHED, MEMASCEND

EXHIBIT = "memascend-fig12"
LATENCY = "overflow check latency"
LOW, HIGH = (f"{LATENCY}, {end} quartile over rounds" for end in ("lower", "upper"))
REDUCTION, AVERAGE = "overflow check latency reduction", "average overflow check latency reduction"
EXPONENT = "growth exponent"
SERIES = {  # method of the benchmark -> series; the record names DeepSpeed's release
    "chain": AS_PUBLISHED,
    "aminmax": "torch.aminmax",
    "isfinite": "torch.isfinite().all()",
    "fused": MEMASCEND,
    "sum": "tensor.sum (read limit)",
    "read_loop": "native read loop",
}
SYSTEMS = ("chain", "deepspeed", "fused")
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
BEYOND_CACHES = 64_000_000  # fp32 elements: 256 MB, more of a buffer than a last-level cache holds


def rows(bench: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one record from its points in fp32, the dtype of the flat buffer's gradients."""
    points = [p for p in bench["points"] if p["dtype"] == "fp32"]
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    for point in points:
        low, middle, high = quartiles(point["seconds"])
        medians[point["method"]][point["numel"]] = middle
        for metric, seconds in ((LATENCY, middle), (LOW, low), (HIGH, high)):
            yield _row(bench, series(bench, point["method"]), metric, 1e3 * seconds, "ms", point["numel"])
    yield from _reductions(bench, medians)
    for method, line in medians.items():
        exponent = growth_exponent(line)
        if exponent is not None:
            yield _row(bench, series(bench, method), EXPONENT, exponent, "", f"{BEYOND_CACHES} and more")
    yield from _extrapolated(bench, medians)


def series(bench: dict[str, Any], method: str) -> str:
    """Return the name of a method's series in the other exhibits."""
    if method == "deepspeed":
        return f"ZeRO-Infinity (DeepSpeed {bench['versions'].get('deepspeed', 'version unknown')})"
    return SERIES[method]


def growth_exponent(line: dict[int, float]) -> float | None:
    """Return e in latency ~ elements^e for sizes beyond the caches; None for fewer than two such sizes."""
    far = {numel: seconds for numel, seconds in line.items() if numel >= BEYOND_CACHES}
    return float(np.polyfit(np.log(list(far)), np.log(list(far.values())), 1)[0]) if len(far) > 1 else None


def straight_line(line: dict[int, float]) -> tuple[float, float] | None:
    """Return (seconds, seconds per element) of the least-squares line; None for fewer than two sizes."""
    if len(line) < 2:
        return None
    slope, start = np.polyfit(list(line), list(line.values()), 1)
    return float(start), float(slope)


def _row(
    bench: dict[str, Any], name: str, metric: str, value: float, unit: str, elements: int | str, **more: Any
) -> Row:
    own = {"exhibit": EXHIBIT, "series": name, "x": ("elements", elements)} | more
    return of_record(bench, metric=metric, value=value, unit=unit, **own)


def _reductions(bench: dict[str, Any], medians: dict[str, dict[int, float]]) -> Iterator[Row]:
    """Yield the reduction from the chain to the fused check for each size, and its mean over sizes
    beyond the caches."""
    chain, fused = medians["chain"], medians["fused"]
    percent = {numel: 100 * (1 - fused[numel] / chain[numel]) for numel in chain if numel in fused}
    for numel, value in percent.items():
        yield _row(bench, MEMASCEND, REDUCTION, value, "%", numel)
    far = [value for numel, value in percent.items() if numel >= BEYOND_CACHES]
    if far:
        yield _row(bench, MEMASCEND, AVERAGE, sum(far) / len(far), "%", f"{BEYOND_CACHES} and more")


def _extrapolated(bench: dict[str, Any], medians: dict[str, dict[int, float]]) -> Iterator[Row]:
    """Yield latencies at the models' gradient counts, and the reductions between them."""
    lines = {m: straight_line(medians[m]) for m in SYSTEMS if m in medians}
    lines = {m: line for m, line in lines.items() if line is not None}
    percents = []
    for spec in map(model_spec, MODELS):
        seconds = {}
        for method, (start, slope) in lines.items():
            seconds[method] = start + slope * spec.parameters
            sizes = sorted(medians[method])
            source = (
                f"line through {len(sizes)} measured sizes up to {sizes[-1]:.3g} elements:"
                f" {1e3 * start:.3g} ms + {1e9 * slope:.3g} ns x elements; record {bench['key']}"
            )
            more = {"lane": "modelled", "model": spec.display, "source": source}
            value = 1e3 * seconds[method]
            yield _row(bench, series(bench, method), LATENCY, value, "ms", spec.parameters, **more)
        if {"chain", "fused"} <= set(seconds):
            percents.append(100 * (1 - seconds["fused"] / seconds["chain"]))
            more |= {"source": "100 (1 - MemAscend / as published), from lines"}
            yield _row(bench, MEMASCEND, REDUCTION, percents[-1], "%", spec.parameters, **more)
    if percents:
        more = {"lane": "modelled", "model": f"{len(percents)} models", "source": "mean over the models, from lines"}
        yield _row(bench, MEMASCEND, AVERAGE, sum(percents) / len(percents), "%", "", x=("", ""), **more)


def each_way(bench: dict[str, Any]) -> Iterator[Row]:
    """Yield the time of each method (Fig. 3), and its extra memory as a multiple of the largest buffer (Fig. 13)."""
    shown = ("chain", "aminmax", "fused", "sum")
    points = [p for p in bench["points"] if p["dtype"] == "fp32" and p["method"] in shown and "extra_bytes" in p]
    largest = max((p["numel"] for p in points), default=0)
    for point in points:
        name, elements = SERIES[point["method"]], point["numel"]
        seconds = median(point["seconds"])
        yield _row(bench, name, LATENCY, 1e3 * seconds, "ms", elements, exhibit="memascend-fig03")
        if elements == largest and point["method"] != "sum":
            factor = point["extra_bytes"] / (4 * elements)
            metric = "extra memory relative to the buffer"
            yield _row(bench, name, metric, factor, "x", elements, exhibit="memascend-fig13")

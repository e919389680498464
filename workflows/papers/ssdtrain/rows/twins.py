"""Figs. 6, 7, 8a and Table III measured: twins of the paper's models, from records of `memascend bench activations`.

A peak is the memory of a step in excess of what was resident before it. A twin's bytes times k^2 are the original's,
whose context is divided by k as well; for one of its two GPUs they are halved. Seconds and throughput are the twin's.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from memascend.planner.pieces import forward_flops
from workflows.cases import Row, of_record, ratio_by_rounds, row
from workflows.paper_models import spec
from workflows.tidy import GIB, SCALED

PAPER, GPUS, BATCH = "ssdtrain", 2, 16
SERIES = {"keep": "No offloading", "recompute": "Recompute all", "ssd": "SSDTrain", "save_on_cpu": "save_on_cpu"}
SERIES["mix"] = "Mix of all three"
OF_TWIN = " of the twin"
FIGURES_7 = {"H12288 L3": "ssdtrain-fig07a", "H14336 L3": "ssdtrain-fig07b"}
MEASURED_6 = ("H8192 L4", "H12288 L3", "H16384 L2")
BASE, SENT = SERIES["keep"], SERIES["ssd"]


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the rows of each record, and the range of the reductions of each host."""
    less: dict[str, dict[str, float]] = {}  # host -> record -> reduction in percent
    for record in records:
        model = record["points_requested"]["model"]
        by_size = sorted(record["points"], key=lambda point: point["batch"])
        points = {(p["batch"], SERIES[p["method"]]): p for p in by_size}
        if model in FIGURES_7:
            yield from _rok(record, model, points)
        if model == "H12288 L3":
            yield from _by_sequence(record, model, points)
        if model != "H14336 L3" and (BATCH, SENT) in points:
            yield from _with_and_without(record, model, points)
            if model in MEASURED_6:
                less.setdefault(record["host"]["name"], {})[f"{record['key']} {model}"] = _reduction(points)
    for host, found in less.items():
        keys = " ".join(name.split()[0] for name in found)
        for end, value in (("min", min(found.values())), ("max", max(found.values()))):
            cells = {"series": SENT, "testbed": f"{host}/twins"}
            metric = f"activation_peak_reduction_{end}"
            yield row("ssdtrain-fig06", metric, value, "%", "measured", keys, **cells)


def _shown(record: dict[str, Any], exhibit: str, metric: str, value: float, unit: str, **cells: Any) -> Row:
    """Return a row of a record."""
    model, k = record["points_requested"]["model"], record["options"]["twin"]
    own = {"model": model, "testbed": f"{record['host']['name']}/{model}-k{k}"}
    return of_record(record, exhibit, metric, value, unit, **own | cells)


def _peak(record: dict[str, Any], point: dict[str, Any]) -> float:
    """Return GiB of one GPU at the original's size."""
    return median(point["peak_bytes"]) * record["options"]["twin"] ** 2 / GPUS / GIB


def _reduction(points: dict[Any, Any]) -> float:
    """Return by how many percent offloading reduces the peak of keeping everything."""
    sent, kept = (median(points[BATCH, series]["peak_bytes"]) for series in (SENT, BASE))
    return 100 * (1 - sent / kept)


def _ratio(points: dict[Any, Any], series: str, other: str, batch: int = BATCH) -> float:
    """Return the seconds of a series over those of another, round by round."""
    return ratio_by_rounds(points[batch, series]["seconds"], points[batch, other]["seconds"])


def _with_and_without(record: dict[str, Any], model: str, points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 6 and the offloaded bytes of Table III."""
    exhibit, at = "ssdtrain-fig06", {"x": ("batch", BATCH)}
    for series in (BASE, SENT):
        point, cells = points[BATCH, series], {"series": series, **at}
        yield _shown(record, exhibit, "activation peak" + SCALED, _peak(record, point), "GiB", **cells)
        yield _shown(record, exhibit, "step time" + OF_TWIN, median(point["seconds"]), "s", **cells)
        shares = [waited / whole for waited, whole in zip(point["waited_s"], point["seconds"], strict=True)]
        yield _shown(record, exhibit, "waits for the cache", 100 * median(shares), "% of the step", **cells)
        if series != BASE:
            yield _shown(record, exhibit, "activation peak reduction", _reduction(points), "%", **cells)
            made = next(r for r in record["summary"] if (r["batch"], r["way"]) == (BATCH, "ssd"))
            predicted = 100 * made["predicted_peak_reduction"]
            yield _shown(record, exhibit, "activation peak reduction, predicted", predicted, "%", **cells)
            stored = median(point["written_bytes"]) * record["options"]["twin"] ** 2 / GPUS
            sent = {"series": SENT, "x": ("batch_size", BATCH)}
            yield _shown(record, "ssdtrain-tab03", "offloaded_amount", stored / 1e9, "GB", **sent)
            yield _shown(record, "ssdtrain-tab03", "offloaded_amount (GiB)", stored / GIB, "GiB", **sent)
            longer = 100 * (_ratio(points, series, BASE) - 1)
            yield _shown(record, exhibit, "step time overhead", longer, "%", **cells)


def _rok(record: dict[str, Any], model: str, points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 7: throughput over peak, and the gains that the text states."""
    exhibit, k, context = FIGURES_7[model], record["options"]["twin"], record["options"]["context"]
    sub = {"subfigure": exhibit[-1]}
    for (batch, series), point in points.items():
        flops = 3 * forward_flops(spec(PAPER, model).twin(k), batch, context)
        giga = flops / (median(point["seconds"]) + median(point["update_s"])) / 1e9
        at = {"x": ("activation peak (GiB)", _peak(record, point)), "series": series}
        yield _shown(record, exhibit, "model throughput" + OF_TWIN, giga, "GFLOPS", **at, **sub)
    fits = [b for b, series in points if series == SENT and _fits(points, b)]
    if (8, BASE) in points and fits:
        cells = {"series": f"{SENT} vs keep", **sub}
        yield _shown(record, exhibit, "batch_size_gain", max(fits) / 8, "x", **cells)
    if (BATCH, SENT) in points:
        cells = {"series": SENT, "x": ("at batch", BATCH), **sub}
        yield _shown(record, exhibit, "throughput over keeping", 1 / _ratio(points, SENT, BASE), "x", **cells)
        if again := points.get((BATCH, SERIES["recompute"])):
            over = median(points[BATCH, SENT]["peak_bytes"]) / median(again["peak_bytes"])
            yield _shown(record, exhibit, "peak over recomputing", over, "x", **cells)


def _fits(points: dict[Any, Any], batch: int) -> bool:
    """Return whether offloading at this batch has a peak no larger than keeping at batch 8."""
    kept = points.get((8, BASE))
    return kept is not None and median(points[batch, SENT]["peak_bytes"]) <= median(kept["peak_bytes"])


def _by_sequence(record: dict[str, Any], model: str, points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 8a: seconds per sequence, and how they fall with the batch."""
    exhibit = "ssdtrain-fig08a"
    parts = {b: [median(p[name]) for name in ("seconds", "update_s")] for (b, s), p in points.items() if s == BASE}
    for batch, both in parts.items():
        cells = {"series": BASE, "model": f"batch {batch}"}
        for metric, seconds in zip(("forward and backward", "weights update"), both, strict=True):
            yield _shown(record, exhibit, metric + OF_TWIN, 1e3 * seconds / batch, "ms a sequence", **cells)
        if 1 in parts:
            gain = 100 * (sum(parts[1]) / (sum(both) / batch) - 1)
            yield _shown(record, exhibit, "throughput improvement over batch 1", gain, "%", **cells)
    if 1 in parts and len(parts) > 1:
        most = max(parts)
        less = [one - many / most for one, many in zip(parts[1], parts[most], strict=True)]
        cells = {"series": BASE, "model": f"batch {most}"}
        share = 100 * less[1] / sum(less)
        yield _shown(record, exhibit, "share of the gain that is the update's", share, "%", **cells)

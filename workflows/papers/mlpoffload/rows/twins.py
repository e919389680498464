"""Figs. 7 to 10, 14 and 15 measured: iterations of a time twin over paths of known rates (workflows.run.path_twin).

Seconds are the twin's own. The record has what the simulator predicted for the same rates, where the machine's own
rates are known. DeepSpeed and MLP-Offload are in every record, the arms between them in some.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from workflows.cases import Row, of_record
from workflows.papers.mlpoffload.rows.arms import BARS, MOVED, OURS, RATIOS, ZERO
from workflows.records import testbed_of

ARMS = {name: arm for bars in BARS.values() for name, arm in bars.items()}
PHASES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "update"}


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    for record in records:
        arms = {point["arm"]: point for point in record["points"]}
        place, _, k = testbed_of(record).rpartition("-k")
        where = f"{place}-{'duplex' if record['duplex'] else 'simplex'}-k{k}"
        at = {"model": record["model"], "testbed": where}
        for exhibit, bars in BARS.items():
            for series, arm in bars.items():
                if arm in arms:
                    yield of_record(record, exhibit, "iteration_time", _step(arms[arm]), "s", series=series, **at)
        for (exhibit, series, metric), (slow, fast) in RATIOS.items():
            if ARMS[slow] in arms and ARMS[fast] in arms:
                ratio = _step(arms[ARMS[slow]]) / _step(arms[ARMS[fast]])
                yield of_record(record, exhibit, metric, ratio, "x", series=series, **at)
        for series in (ZERO, OURS):
            yield from _phases(record, arms[ARMS[series]], at | {"series": series})
        yield from _residency(record, arms[ARMS[OURS]], at | {"series": OURS})


def _step(point: dict[str, Any]) -> float:
    """Median seconds of an iteration."""
    return median(sum(each) for each in zip(*(point[name] for name in PHASES), strict=True))


def _phases(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    for name, said in PHASES.items():
        yield of_record(record, "mlpoffload-fig07", "time", median(point[name]), "s", x=("phase", said), **at)
    yield of_record(record, "mlpoffload-fig07", "iteration_time", _step(point), "s", **at)
    update, count = median(point["optimizer_s"]), record["twin"]["parameters"]
    yield of_record(record, "mlpoffload-fig08", "update_throughput", count / update / 1e6, "M params/s", **at)
    yield of_record(record, "mlpoffload-fig09", "io_throughput", MOVED * count / update / 1e9, "GB/s", **at)


def _residency(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Percent of the states: what a step leaves unwritten stays in host memory, the rest as the paths' bytes divide."""
    host = max(0.0, 1 - median(point["bytes_written"]) / (12 * record["twin"]["parameters"]))
    held = [path[0] for path in point["paths"][-1]]
    shares = [host, *((1 - host) * each / sum(held) for each in held)]
    for metric, share in zip(("host memory", "NVMe", "PFS"), shares, strict=True):
        yield of_record(record, "mlpoffload-fig10", metric, 100 * share, "%", **at)

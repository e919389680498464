"""Figs. 3, 7a and 9b measured: time twins on the streaming engine, from records of `memascend bench engine`.

Products have one core, updates and I/O another, and the SSD one rate (`memascend.bench.paced`). Beside it stands what
was said before: the simulator's step, and for Fig. 9b the engine's own model, which decides after the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from memascend.simulator.trace import Event
from workflows.cases import Row, of_record
from workflows.papers.lohan.rows import settings as own
from workflows.papers.lohan.rows.first_figure import LINES
from workflows.played import spans

OF_TWIN, SHARE = " of the twin", "swapped share (%)"
# Of the twin for a sequence of the 13B: its products then stand to an SSD of 500 MB/s as the 13B's to the server's.
TOKENS = 12
ARMS = {"optimized": "LoHan Optimized", "naive": "LoHan Naive", "none": "LoHan+ZeRO"}
FIG_3 = {"naive": "lohan-fig03a", "optimized": "lohan-fig03b"}


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    for record in (each for each in records if each["options"].get("path_rate")):
        points = {(point["context"], point["method"]): point for point in record["points"]}
        for way, events in record.get("traces", {}).items():
            yield from by_tensor(record, FIG_3[way], [Event(**event) for event in events])
        if "none" in record["options"]["ways"]:
            yield from arms(record, points)
        if "swapped" in record["options"]["ways"]:
            yield from swapped(record, points)


def shown(record: dict[str, Any], exhibit: str, metric: str, value: float, unit: str, **cells: Any) -> Row:
    place = f"{record['host']['name']}/13B-k{record['options']['twin']}"
    return of_record(record, exhibit, metric, value, unit, **{"testbed": place, "model": "13B"} | cells)


def arms(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    exhibit, longest = "lohan-fig07a", max(context for context, _ in points)
    batch = longest // TOKENS
    said = {(row["context"], row["method"]): row["seconds"] for row in record["foretold"]}
    for context in dict.fromkeys(context for context, _ in points):
        at = {"x": ("batch_size", context // TOKENS)}
        for arm, series in ARMS.items():
            for lane, seconds in (
                ("measured", median(points[context, arm]["seconds"])),
                ("modelled", said[context, arm]),
            ):
                cells = {"series": series, "lane": lane, **at}
                yield shown(record, exhibit, "throughput" + OF_TWIN, context / seconds, "token/s", **cells)
            if arm != "optimized":
                cells = {"series": f"LoHan Optimized / {series.removeprefix('LoHan ')}", **at}
                pairs = zip(points[context, arm]["seconds"], points[context, "optimized"]["seconds"], strict=True)
                yield shown(record, exhibit, "throughput_ratio", median(a / b for a, b in pairs), "x", **cells)
                foretold = said[context, arm] / said[context, "optimized"]
                metric = "throughput_ratio foretold" + OF_TWIN
                yield shown(record, exhibit, metric, foretold, "x", **cells, lane="modelled")
    memory, mine = points[longest, "memory"], points[longest, "optimized"]
    device = median(memory["forward_s"]) + median(memory["backward_s"])
    ssd = (median(mine["read"]) + median(mine["written"])) / record["options"]["path_rate"]
    cells = {"series": "device / SSD", "x": ("batch_size", batch)}
    yield shown(record, exhibit, "ratio of seconds" + OF_TWIN, device / ssd, "x", **cells)
    played = own.step("LoHan Optimized", "13B", batch)
    aim = played.of_resource("GPU products") / played.of_resource("SSD")
    yield own.shown(exhibit, "ratio of seconds", aim, "x", own.PLAYED, model="13B", **cells)


def swapped(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    exhibit, found = "lohan-fig09b", {}
    for (_, way), point in points.items():
        if way == "memory":
            continue
        decision, seconds = point["swapping"][-1], median(point["seconds"])
        found[way] = seconds
        at = {"x": (SHARE, 100 * decision["more_bytes"] / decision["offered_bytes"])}
        if way == "swapped":
            yield shown(record, exhibit, "predicted optimum" + OF_TWIN, seconds, "s", series="LoHan", **at)
            continue
        for lane, value in (("measured", seconds), ("modelled", decision["seconds"])):
            cells = {"series": "LoHan", "lane": lane, **at}
            yield shown(record, exhibit, "iteration time" + OF_TWIN, value, "s", **cells)
    over = found["swapped"] / min(found.values())
    yield shown(record, exhibit, "predicted optimum over the least time measured", over, "x", series="LoHan")


def by_tensor(record: dict[str, Any], exhibit: str, events: list[Event]) -> Iterator[Row]:
    """As `first_figure.by_tensor`: reads are of states, and writes too; numbers count blocks from 1."""

    def named(event: Event) -> tuple[str, str] | None:
        block = re.search(r"block (\d+)|\.h\.(\d+)[./]", event.name)
        if not block or event.resource not in LINES or (event.resource == "gpu0" and event.phase != "backward"):
            return None
        return LINES[event.resource], str(int(block[1] or block[2]) + 1)

    lines = spans(events, named)
    begun = min(begin for begin, _ in lines.values())
    for (line, block), (begin, end) in lines.items():
        cells = {"series": line, "x": ("begin (s)", begin - begun)}
        yield shown(record, exhibit, block, end - begin, "s", **cells)

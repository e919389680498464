"""Figs. 3, 7, 9b, 10b and 12 measured: time twins on the streaming engine, from records of `memascend bench engine`.

Products use one core, updates and I/O another, and the SSD has one rate (`memascend.bench.rate_limit`). Each value is
accompanied by its prediction: the simulator's step, and for Fig. 9b the engine's own model, which decides after the
first step. Fig. 5a is given by direction: systems that take turns on a machine without a GPU, by phase, and the parts
that the gain consists of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from memascend.simulator.trace import Event
from workflows.cases import Row, of_record, ratio_by_rounds, steady_ratio, step_seconds
from workflows.paper_models import spans
from workflows.papers.lohan.rows import settings
from workflows.papers.lohan.rows.fig01 import LINES
from workflows.papers.lohan.rows.throughput import DRIVES, most_in_memory
from workflows.records import predicted_steps

OF_TWIN, SHARE = " of the twin", "swapped share (%)"
# Tokens of the twin per sequence of the 13B: the ratio of its products to an SSD of 500 MB/s is then that of the 13B on
# the server.
TOKENS = 12
# Twins of all arms: model of the record -> original, exhibit, and tokens per sequence of the original.
OF_ARMS = {"13B-padded": ("13B", "lohan-fig07a", TOKENS), "175B-padded": ("175B", "lohan-fig07b", 16)}
RATIO_OFF = 0.1  # allowed deviation of device : SSD from the original's
FASTEST = 500_000_000  # B/s of a path that represents twelve SSDs
ARMS = {"optimized": "LoHan Optimized", "naive": "LoHan Naive", "none": "LoHan+ZeRO"}
TURNS = {
    ("zero_infinity", "as_published"): settings.ZERO,
    ("zero_infinity", "today"): "DeepSpeed 0.19.8",
    ("zero_infinity", "today_pipelined"): "DeepSpeed 0.19.8, pipelined",
    ("memascend", "memascend"): "MemAscend",
    ("zero_offload", "today"): settings.OFFLOAD,
    **{("lohan", arm): series for arm, series in ARMS.items()},
    ("lohan", "as_published"): settings.LOHAN,
}
# Part of the gain -> the two systems that differ in it.
PARTS = {
    "runtime": ("DeepSpeed 0.19.8, pipelined", "LoHan+ZeRO"),
    "gradients used as they come": ("LoHan+ZeRO", "LoHan Naive"),
    "stages overlapped": ("LoHan Naive", "LoHan Optimized"),
    "less computed again": ("LoHan Optimized", settings.LOHAN),
}
FIG_3 = {"naive": "lohan-fig03a", "optimized": "lohan-fig03b"}


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the rows of records with a rate-limited SSD, by what each of them measured."""
    for record in (each for each in records if each["options"].get("path_rate")):
        points = {(point["context"], point["method"]): point for point in record["points"]}
        for way, events in record.get("traces", {}).items():
            yield from by_tensor(record, FIG_3[way], [Event(**event) for event in events])
        if record["options"]["model"].startswith("dit:"):
            yield from diffusion(record, points)
            continue
        if {"naive", "optimized"} <= set(record["options"]["ways"]) and "traces" not in record:
            yield from arms(record, points)
        if "swapped" in record["options"]["ways"]:
            yield from swapped(record, points)
        if record["options"]["ways"] == ["memory", "optimized"]:
            yield from by_drives(record, points)


def phases(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield Fig. 5a from records that have exactly these arms: medians, with ratios and differences round by round."""
    for record in records:
        if {(point["system"], point["arm"]) for point in record["points"]} != set(TURNS):
            continue
        place = f"{record['host']['name']}/{record['model']}-k{record['twin']['k']}"
        steps: dict[int, dict[str, list[float]]] = {}
        for point in record["points"]:
            series, batch = TURNS[point["system"], point["arm"]], point["batch"]
            cells = {"series": series, "model": record["model"], "testbed": place}
            of_stage = {stage: point[f"{stage}_s"] for stage in ("forward", "backward", "optimizer")}
            seconds = steps.setdefault(batch, {})[series] = step_seconds(point)
            at = {**cells, "x": ("batch_size", batch)}
            tokens = batch * point["sequence"]
            yield of_record(record, "lohan-fig05a", "throughput" + OF_TWIN, tokens / median(seconds), "token/s", **at)
            for stage, took in of_stage.items() if len(steps) == 1 else ():  # at the smallest batch
                at = {**cells, "x": ("stage", stage)}
                yield of_record(record, "lohan-fig05a", "stage_time" + OF_TWIN, median(took), "s", **at)
        for batch, found in steps.items():
            at = {"model": record["model"], "testbed": place, "x": ("batch_size", batch)}
            for series, seconds in found.items():
                if series != settings.LOHAN:
                    ratio = ratio_by_rounds(seconds, found[settings.LOHAN])
                    more = {**at, "series": f"{settings.LOHAN} / {series}"}
                    yield of_record(record, "lohan-fig05a", "throughput_ratio" + OF_TWIN, ratio, "x", **more)
            for part, (slow, fast) in PARTS.items() if batch == min(steps) else ():
                less = median(a - b for a, b in zip(found[slow], found[fast], strict=True))
                yield of_record(record, "lohan-fig05a", "gain" + OF_TWIN, less, "s", **{**at, "series": part})


def shown(record: dict[str, Any], exhibit: str, metric: str, value: float | str, unit: str, **cells: Any) -> Row:
    """Return a row of a record; its testbed is the host's twin of 13B unless `cells` say otherwise."""
    place = f"{record['host']['name']}/13B-k{record['options']['twin']}"
    return of_record(record, exhibit, metric, value, unit, **{"testbed": place, "model": "13B"} | cells)


def arms(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    """Yield the arms of Fig. 7. Ratios of throughput count for the original only if device : SSD is
    as on its server, and if their rounds agree (`steady_ratio`)."""
    model, exhibit, tokens = OF_ARMS[Path(record["options"]["model"]).stem]
    place = f"{record['host']['name']}/{model}-k{record['options']['twin']}"
    longest = max(context for context, _ in points)
    batch = longest // tokens
    simulated = settings.step("LoHan Optimized", model, batch)
    aim = simulated.of_resource("GPU products") / simulated.of_resource("SSD")
    memory, mine = points[longest, "memory"], points[longest, "optimized"]
    device = median(memory["forward_s"]) + median(memory["backward_s"])
    ssd = (median(mine["read"]) + median(mine["written"])) / record["options"]["path_rate"]
    is_met = abs(device / ssd / aim - 1) <= RATIO_OFF
    refusal = f"N/A (device : SSD is {device / ssd:.2f} in the twin, {aim:.2f} of the original)"
    said = {(row["context"], row["method"]): row["seconds"] for row in predicted_steps(record)}
    for context in dict.fromkeys(context for context, _ in points):
        at = {"model": model, "testbed": place, "x": ("batch_size", context // tokens)}
        for arm, series in ((arm, series) for arm, series in ARMS.items() if arm in record["options"]["ways"]):
            for lane, seconds in (
                ("measured", median(points[context, arm]["seconds"])),
                ("modelled", said[context, arm]),
            ):
                cells = {"series": series, "lane": lane, **at}
                yield shown(record, exhibit, "throughput" + OF_TWIN, context / seconds, "token/s", **cells)
            if arm != "optimized":
                cells = {"series": f"LoHan Optimized / {series.removeprefix('LoHan ')}", **at}
                ratio = steady_ratio(points[context, arm]["seconds"], points[context, "optimized"]["seconds"])
                yield shown(record, exhibit, "throughput_ratio", ratio if is_met else refusal, "x", **cells)
                predicted = said[context, arm] / said[context, "optimized"]
                metric = "throughput_ratio predicted" + OF_TWIN
                yield shown(record, exhibit, metric, predicted, "x", **cells, lane="modelled")
    cells = {"series": "device / SSD", "model": model, "x": ("batch_size", batch)}
    yield shown(record, exhibit, "ratio of seconds" + OF_TWIN, device / ssd, "x", **cells, testbed=place)
    yield settings.shown(exhibit, "ratio of seconds", aim, "x", settings.SIMULATED, **cells)


def diffusion(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 12; Fast-DiT is the module in memory, at the batch that the original's GPU can hold."""
    layers, hidden = map(int, record["options"]["model"].removeprefix("dit:").split("x")[:2])
    name = next((name for name, size in settings.DITS.items() if size == (layers, hidden)), None)
    if name is None:
        return
    place = f"{record['host']['name']}/DiT-k{record['options']['twin']}"
    ways = {
        settings.LOHAN: ("optimized", int(settings.PAPER.value("dit_batch"))),
        "Fast-DiT": ("memory", most_in_memory(name)),
    }
    for series, (way, batch) in ways.items():
        if (point := points.get((batch, way))) is not None:
            speed = batch / median(point["seconds"])
            cells = {"testbed": place, "model": name, "series": series}
            yield of_record(record, "lohan-fig12", "throughput" + OF_TWIN, speed, "image/s", **cells)


def together(drives: int) -> float:
    """Return GB/s of this many SSDs that read as much as they write, as a twin's path represents them.

    Each drive is as fast as its data sheet says, up to the total rate of twelve.
    """
    ways = ("read", "write")
    whole, one = ([settings.PAPER.value(f"{of}ssd_{way}_gb_per_s") for way in ways] for of in ("", "one_"))
    return 2 / sum(1 / min(most, drives * each) for most, each in zip(whole, one, strict=True))


def by_drives(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 10b for the number of SSDs whose rate relative to twelve is that of the record's path relative to
    FASTEST."""
    share = record["options"]["path_rate"] / FASTEST
    drives = [n for n in DRIVES if abs(together(n) / together(12) - share) < 0.005]
    said = {(row["context"], row["method"]): row["seconds"] for row in predicted_steps(record)}
    for (context, way), point in points.items():
        for count in drives if way == "optimized" else ():
            for lane, seconds in (("measured", median(point["seconds"])), ("modelled", said[context, way])):
                cells = {"series": f"bsz={context // TOKENS}", "lane": lane, "x": ("num_SSDs", count)}
                yield shown(record, "lohan-fig10b", "throughput" + OF_TWIN, context / seconds, "token/s", **cells)


def swapped(record: dict[str, Any], points: dict[Any, Any]) -> Iterator[Row]:
    """Yield Fig. 9b: the time at each swapped share as measured and as the engine predicts, and how good its
    choice is."""
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
    """Yield the timeline of `fig01.by_tensor` from a measured trace; reads and writes are of states, blocks count from
    1."""

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

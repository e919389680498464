"""Rows of step-time records (workflows.run.interleaved): MemAscend Tables IV and VI, and the I/O volumes of Fig. 20.

An improvement is the median over rounds of the ratio within a round, since a round's arms ran one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from workflows.cases import Row, of_record, quartiles, step_seconds
from workflows.records import measured_on
from workflows.tidy import DISPLAY, GIB, SCALED

Arm = tuple[str, ...]  # system, arm, dtype, and the environment if it is not ours

MEMASCEND_BF16 = ("memascend", "memascend", "bf16")
# Table -> (series, slower arm, faster arm).
TABLES: dict[str, tuple[str, Arm, Arm]] = {
    "memascend-tab04": (
        "MemAscend vs ZeRO-Infinity",
        ("zero_infinity", "as_published_direct", "fp16"),  # Table IV uses this engine in both
        ("memascend", "memascend", "fp16"),
    ),
    "memascend-tab06": ("MemAscend+bf16 vs MemAscend", MEMASCEND_BF16, ("memascend", "memascend_bf16", "bf16")),
}
# Further arms that some profiles time: ZeRO-Infinity of both DeepSpeed versions with its own file engine.
COMPARED: dict[str, tuple[Arm, ...]] = {
    "memascend-tab04": (
        ("zero_infinity", "as_published", "fp16"),
        ("zero_infinity", "today", "fp16"),
        ("zero_infinity", "as_published", "fp16", "deepspeed_016"),
        ("zero_infinity", "today_016", "fp16", "deepspeed_016"),
    )
}
VOLUMES: dict[Arm, str] = {
    MEMASCEND_BF16: "MemAscend",
    ("memascend", "memascend_bf16", "bf16"): "MemAscend + bf16 optimizer",
}
# Names in older records, from before ZeRO-Infinity had an arm with these parts.
FORMER = {("memascend", "direct_only"): ("zero_infinity", "as_published_direct")}
ENOUGH_ROUNDS = 3  # fewer rounds give no spread; such a record is only for bytes
LARGEST_SPREAD = 10.0  # points between the quartiles of an improvement
IMPROVEMENT = "throughput improvement"
LOW, HIGH = (f"{IMPROVEMENT}, {end} quartile over rounds" for end in ("lower", "upper"))


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the improvements on each device, and the volumes of every measured record."""
    records = [record for record in records if record["lane"] == "measured"]  # predictions belong to another paper
    for device in sorted({record.get("device", "cpu") for record in records}):
        of_one = [record for record in records if record.get("device", "cpu") == device]
        for exhibit in TABLES:
            yield from improvements(exhibit, of_one)
    for record in records:
        yield from volumes(record)


def measured(record: dict[str, Any], exhibit: str, metric: str, value: float | str, unit: str, **cells: Any) -> Row:
    """Return a row of a record."""
    own = {"model": DISPLAY.get(record["model"], record["model"]), "testbed": measured_on(record)}
    return of_record(record, exhibit, metric, value, unit, **own | cells)


def steps(record: dict[str, Any], arm: Arm) -> dict[tuple[int, int], dict[str, Any]]:
    """Return (context of the original, batch) -> the arm's point."""
    k = record["twin"]["k"]
    return {(p["sequence"] * k, p["batch"]): p for p in record["points"] if arm_of(p) == arm}


def arm_of(point: dict[str, Any]) -> Arm:
    """Return the arm of a point by its present name."""
    arm = tuple(point[word] for word in ("system", "arm", "dtype", "environment") if word in point)
    return (*FORMER.get(arm[:2], arm[:2]), *arm[2:])


def improvements(exhibit: str, records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield each model's and batch's improvement with quartiles, the smallest over all, and its
    change with the batch."""
    series, slower, faster = TABLES[exhibit]
    found: dict[str, dict[int, float]] = defaultdict(dict)
    spread = 0.0
    for record in (r for r in records if r["rounds"] >= ENOUGH_ROUNDS):
        before, after = steps(record, slower), steps(record, faster)
        for context, batch in before.keys() & after.keys():
            point = context, batch
            ratios = zip(step_seconds(before[point]), step_seconds(after[point]), strict=True)
            low, middle, high = quartiles([100 * (old / new - 1) for old, new in ratios])
            found[record["model"]][batch] = middle
            spread = max(spread, high - low)
            at = {"series": series, "x": ("batch", batch)}
            for metric, value in ((IMPROVEMENT, middle), (LOW, low), (HIGH, high)):
                yield measured(record, exhibit, metric, value, "%", **at)
            for name in (slower, faster):
                yield from step_times(record, exhibit, name, point)
        for name in COMPARED.get(exhibit, ()):
            yield from relative(record, exhibit, name, faster)
    yield from over_all(exhibit, series, records, found, spread)


def step_times(record: dict[str, Any], exhibit: str, arm: Arm, point: tuple[int, int]) -> Iterator[Row]:
    """Yield the median seconds of an arm's step and of its optimizer phase at a point."""
    own = steps(record, arm)[point]
    cells = {"series": " ".join(arm), "x": ("batch", point[1])}
    yield measured(record, exhibit, "step time", median(step_seconds(own)), "s", **cells)
    yield measured(record, exhibit, "optimizer phase time", median(own["optimizer_s"]), "s", **cells)


def relative(record: dict[str, Any], exhibit: str, arm: Arm, base: Arm) -> Iterator[Row]:
    """Yield an arm's seconds, and its ratio to another's within a round with quartiles, at each
    point that both have."""
    ours, theirs = steps(record, base), steps(record, arm)
    for point in theirs.keys() & ours.keys():
        yield from step_times(record, exhibit, arm, point)
        pairs = zip(step_seconds(theirs[point]), step_seconds(ours[point]), strict=True)
        cells = {"series": " ".join(arm), "x": ("batch", point[1])}
        names = (f"step time over MemAscend's{end}" for end in (", lower quartile", "", ", upper quartile"))
        for metric, value in zip(names, quartiles([their / our for their, our in pairs]), strict=True):
            yield measured(record, exhibit, metric, value, "ratio", **cells)


def over_all(
    exhibit: str, series: str, records: list[dict[str, Any]], found: dict[str, dict[int, float]], spread: float
) -> Iterator[Row]:
    """Yield the values that the claims judge, or a text in their place if the rounds scatter too much."""
    if not found:
        return
    host, device = records[0]["host"]["name"], records[0].get("device", "cpu")
    place = f"{host}{'' if device == 'cpu' else f'/{device}'}/twins"
    cells = {"series": series, "model": "", "testbed": place, "source": " ".join(r["key"] for r in records)}
    if spread > LARGEST_SPREAD:
        text = f"N/A (quartiles {spread:.0f} points apart: the machine was busy)"
        for metric in ("smallest improvement", "smallest gain from the smaller batch"):
            yield measured(records[0], exhibit, metric, text, "%", **cells)
        return
    smallest = min(value for by_batch in found.values() for value in by_batch.values())
    yield measured(records[0], exhibit, "smallest improvement", smallest, "%", **cells)
    gains = [by_batch[min(by_batch)] - by_batch[max(by_batch)] for by_batch in found.values() if len(by_batch) > 1]
    if gains:
        yield measured(records[0], exhibit, "smallest gain from the smaller batch", min(gains), "points", **cells)


def volumes(record: dict[str, Any]) -> Iterator[Row]:
    """Yield the bytes to and from the SSD in one step, counted at the I/O engine.

    They are the same at every batch, so the first is used.
    """
    k, exhibit = record["twin"]["k"], "memascend-fig20"
    for arm, series in VOLUMES.items():
        for point in list(steps(record, arm).values())[:1]:
            moved = median(a + b for a, b in zip(point["bytes_read"], point["bytes_written"], strict=True))
            metric = "I/O volume per iteration"
            yield measured(record, exhibit, metric, moved / GIB, "GiB", series=series)
            yield measured(record, exhibit, metric + SCALED, moved * k**2 / GIB, "GiB", series=series)
            an_element = moved / record["twin"]["parameters"]
            yield measured(record, exhibit, "I/O per parameter", an_element, "B", series=series)

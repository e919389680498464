"""Figs. 3, 5, 7 to 10 and 13 to 15 measured: iterations of a time twin over paths of known rates, on one or more ranks.

The records are those of workflows.run.path_twin. Seconds are the twin's own. A record also has the simulator's
prediction for the same rates if the machine's own rates are known. DeepSpeed is in every record. A record with
MLP-Offload gives the exhibits' comparisons of the two; further records of the same twin without it have more arms, of
which only the bars are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from workflows.cases import Row, of_record, steady_ratio, step_seconds
from workflows.papers.mlpoffload.rows.arms import BARS, MOVED, OURS, RATIOS, ZERO
from workflows.records import measured_on

ARMS = {name: arm for bars in BARS.values() for name, arm in bars.items()}
FREE, IN_MEMORY = "free", "zero_offload"
TOGETHER_S = 0.005  # ends that are closer belong to one sub-group, for which DeepSpeed waits as a whole
OF_TWIN = " of the twin"
PHASES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "update"}


def rows(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the rows of each record in the exhibits that its arms belong to."""
    for record in records:
        if any("accumulation" in point for point in record["points"]):
            yield from _accumulated(record)
            continue
        arms = _arms(record)
        seconds = {arm: median(step_seconds(point)) for arm, point in arms.items()}
        where = measured_on({**record, "ranks": 1})  # the ranks are in the model's name, which is the bar's
        at, whole = {"model": twin_name(record), "testbed": where}, ARMS[OURS] in arms
        for exhibit, bars in BARS.items():
            for series, arm in bars.items():
                if arm in arms and (whole or series != ZERO):
                    yield of_record(record, exhibit, "iteration_time", seconds[arm], "s", series=series, **at)
        for (exhibit, series, metric), (slow, fast) in RATIOS.items():
            if ARMS[slow] in arms and ARMS[fast] in arms:
                ratio = seconds[ARMS[slow]] / seconds[ARMS[fast]]
                yield of_record(record, exhibit, metric, ratio, "x", series=series, **at)
        if not whole:
            continue
        for series in (ZERO, OURS):
            yield from _phases(record, arms[ARMS[series]], at | {"series": series})
        yield from _residency(record, arms[ARMS[OURS]], at | {"series": OURS})
        if FREE in arms:
            bar = at | {"series": "Multi-Path, no turns"}
            yield of_record(record, "mlpoffload-fig15", "iteration_time", seconds[FREE], "s", **bar)
            yield from _taking_turns(record, arms, at)
        if "transfers" in arms[ARMS[ZERO]]:
            yield from _shares_of_io(record, arms[ARMS[ZERO]], at)
            yield from _by_sub_group(record, arms[ARMS[ZERO]], at)


@dataclass(frozen=True)
class Original:
    """A model on Testbed-1 that a twin may stand for.

    Attributes:
        ending: what ends the names of its series.
        resident_share: share of the states in MLP-Offload's host memory.
        drive: share of DeepSpeed's iteration in which its drive is busy.
        rates: GB/s of each path, read and written.
    """

    model: str
    ending: str
    resident_share: float
    drive: float
    rates: tuple[tuple[float, float], ...]

    def is_met_by(self, record: dict[str, Any]) -> bool:
        """Return whether the paths' rates and the share in host memory are within 10 % of the model's."""
        share, found = _resident_share(record), [tuple(map(float, each.split("/"))) for each in record["rates"]]
        pairs = [
            (a / found[0][0], b / self.rates[0][0]) for mine, its in zip(found, self.rates) for a, b in zip(mine, its)
        ]
        pairs.append((share, self.resident_share))
        return len(found) == len(self.rates) and all(abs(a / b - 1) <= 0.1 for a, b in pairs)

    def refusal(self, record: dict[str, Any]) -> str:
        """Return why the record says nothing about the model: its drive is busy for a different share. Empty if it
        does."""
        zero = _arms(record)[ARMS[ZERO]]
        (read, written), *_ = (map(float, each.split("/")) for each in record["rates"])
        moved = zip(zero["bytes_read"], zero["bytes_written"], step_seconds(zero), strict=True)
        drive = median((a / read + b / written) / 1e6 / step for a, b, step in moved)
        if abs(drive - self.drive) <= 0.1:
            return ""
        return (
            f"N/A (the drive is busy for {drive:.0%} of the twin's iteration, for {self.drive:.0%} of the original's)"
        )


def of_originals(records: list[dict[str, Any]], originals: Iterable[Original]) -> Iterator[Row]:
    """Yield Figs. 7, 10, 14 and 15 for each model from the twin that matches it best, as medians of the ratios of each
    round.

    The twins have one rank, and paths whose rate reads and writes share.
    """
    found = [
        r for r in records if not r["duplex"] and r.get("ranks", 1) == 1 and {ARMS[ZERO], ARMS[OURS]} <= {*_arms(r)}
    ]
    found = [r for r in found if all("accumulation" not in point for point in r["points"])]
    for original in originals if found else ():
        meeting = [record for record in found if original.is_met_by(record)]
        if not meeting:
            continue
        record = min(meeting, key=lambda each: abs(_resident_share(each) - original.resident_share))
        yield from _compared(record, original)


def _compared(record: dict[str, Any], original: Original) -> Iterator[Row]:
    """Yield the twin's ratios and phases as those of the original, or why they say nothing about it."""
    arms, refusal = _arms(record), original.refusal(record)
    cells = {"model": original.model, "testbed": measured_on(record)}
    steps = {arm: step_seconds(point) for arm, point in arms.items()}
    updates = {arm: point["optimizer_s"] for arm, point in arms.items()}
    compared = {
        ("mlpoffload-fig07", "MLP-Offload / ZeRO-3", "iteration_speedup"): (steps, ZERO, OURS),
        ("mlpoffload-fig07", "MLP-Offload / ZeRO-3", "speedup_max"): (updates, ZERO, OURS),
        **{row: (steps, *both) for row, both in RATIOS.items()},
    }
    for (exhibit, series, metric), (seconds, slow, fast) in compared.items():
        if ARMS[slow] in seconds and ARMS[fast] in seconds:
            value = refusal or steady_ratio(seconds[ARMS[slow]], seconds[ARMS[fast]])
            at = cells | {"series": series + original.ending}
            yield of_record(record, exhibit, metric.removesuffix("_max") + OF_TWIN, value, "x", **at)
    splits = [first[0] / second[0] for first, second, *_ in arms[ARMS[OURS]]["paths"]]
    at = cells | {"series": "NVMe:PFS, MLP-Offload, Eq. 1" + original.ending}
    yield of_record(record, "mlpoffload-fig10", "split" + OF_TWIN, refusal or median(splits), "to 1", **at)
    for series in (ZERO, OURS):
        for name, said in PHASES.items():
            at = cells | {"series": series + original.ending, "x": ("phase", said)}
            value = refusal or median(arms[ARMS[series]][name])
            yield of_record(record, "mlpoffload-fig07", "time" + OF_TWIN, value, "s", **at)
        value, at = refusal or median(steps[ARMS[series]]), cells | {"series": series + original.ending}
        yield of_record(record, "mlpoffload-fig07", "iteration_time" + OF_TWIN, value, "s", **at)


def _arms(record: dict[str, Any]) -> dict[str, Any]:
    """Return the points by arm, without the system in memory."""
    return {point["arm"]: point for point in record["points"] if point.get("system") != IN_MEMORY}


def _resident_share(record: dict[str, Any]) -> float:
    """Return the share of the states that MLP-Offload's step leaves in host memory: those that it does not write."""
    return max(0.0, 1 - median(_arms(record)[ARMS[OURS]]["bytes_written"]) / (12 * record["twin"]["parameters"]))


def twin_name(record: dict[str, Any]) -> str:
    """Return a twin's name in bars: its model, and simplex paths or several ranks if it has them."""
    ranks = record.get("ranks", 1)
    words = ["simplex" * (not record["duplex"]), f"{ranks} ranks" * (ranks > 1)]
    return ", ".join([record["model"], *filter(None, words)])


def _accumulated(record: dict[str, Any]) -> Iterator[Row]:
    """Yield Fig. 13: seconds by the micro-batches of an update, and the least of the gains."""
    at, gains = {"model": record["model"], "testbed": measured_on(record)}, []
    seconds = {(each["arm"], each["accumulation"]): median(step_seconds(each)) for each in record["points"]}
    for batches in sorted({number for _, number in seconds}):
        for series in (ZERO, OURS):
            value, cells = seconds[ARMS[series], batches], at | {"series": series, "x": ("batch", batches)}
            yield of_record(record, "mlpoffload-fig13", "iteration_time", value, "s", **cells)
        gains.append(100 * (seconds[ARMS[ZERO], batches] / seconds[ARMS[OURS], batches] - 1))
    cells = at | {"series": f"{OURS} / ZeRO-3"}
    yield of_record(record, "mlpoffload-fig13", "speedup_min", min(gains), "% faster", **cells)


def _phases(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Yield the median seconds of an arm's phases, and the rates that follow from its update."""
    for name, said in PHASES.items():
        yield of_record(record, "mlpoffload-fig07", "time", median(point[name]), "s", x=("phase", said), **at)
    yield of_record(record, "mlpoffload-fig07", "iteration_time", median(step_seconds(point)), "s", **at)
    update, count = median(point["optimizer_s"]), record["twin"]["parameters"]
    yield of_record(record, "mlpoffload-fig08", "update_throughput", count / update / 1e6, "M params/s", **at)
    yield of_record(record, "mlpoffload-fig09", "io_throughput", MOVED * count / update / 1e9, "GB/s", **at)


def _residency(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Yield percentages of the states: the part that a step does not write is in host memory, the
    paths share the rest."""
    host, path_bytes = _resident_share(record), [path[0] for path in point["paths"][-1]]
    shares = [host, *((1 - host) * each / sum(path_bytes) for each in path_bytes)]
    for metric, share in zip(("host memory", "NVMe", "PFS"), shares, strict=True):
        yield of_record(record, "mlpoffload-fig10", metric, 100 * share, "%", **at)


def _taking_turns(record: dict[str, Any], arms: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Yield the effect of several ranks taking turns on a path: seconds without turns over those with, and fairness."""
    pairs = {"one path": (arms["skip_gradients"], arms["exclusive"]), "all paths": (arms[FREE], arms[ARMS[OURS]])}
    for series, (free, exclusive) in pairs.items():
        cells = at | {"series": f"one rank at a time, {series}"}
        speedup = median(step_seconds(free)) / median(step_seconds(exclusive))
        yield of_record(record, "mlpoffload-fig14", "speedup", speedup, "x", **cells)
        for way, point in (("in turns", exclusive), ("as it comes", free)):
            cells = at | {"series": f"{way}, {series}"}
            yield of_record(record, "mlpoffload-fig14", "fairness", fairness(point["transfers"]), "", **cells)


def fairness(updates: list[list[list[Any]]]) -> float:
    """Return the median over updates of the earliest rank's end over the latest rank's, from the
    begin of the update."""
    shares = []
    for transfers in updates:
        ends = {rank: end for rank, _, _, end, _ in sorted(transfers, key=lambda each: each[3])}
        shares.append(min(ends.values()) / max(ends.values()))
    return median(shares)


def _shares_of_io(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Yield the share of DeepSpeed's update in which the training thread waits for the drive; none in host memory."""
    share = 100 * median(host / whole for host, whole in zip(point["host_s"], point["optimizer_s"], strict=True))
    found = {"offloaded to the SSD": (at["model"], median(point["optimizer_s"]), share)}
    memory = next((each for each in record["points"] if each.get("system") == IN_MEMORY), None)
    if memory is not None:
        found["in host memory"] = f"{at['model']}, in memory", median(memory["optimizer_s"]), 100.0
    for series, (model, seconds, share) in found.items():
        cells = at | {"series": series, "model": model}
        yield of_record(record, "mlpoffload-fig03", "update time", seconds, "s", **cells)
        yield of_record(record, "mlpoffload-fig03", "compute share", share, "%", **cells)
        yield of_record(record, "mlpoffload-fig03", "I/O share", 100 - share, "%", **cells)


def _by_sub_group(record: dict[str, Any], point: dict[str, Any], at: dict[str, str]) -> Iterator[Row]:
    """Yield Fig. 5 for one rank's last update: bytes that end together, over the time since the end before."""
    for way in ("read", "write"):
        mine = [each for each in point["transfers"][-1] if each[:2] == [0, way]]
        last, number, together = min((begin for _, _, begin, _, _ in mine), default=0.0), 0, 0
        for each, after in zip(mine, [*mine[1:], None], strict=False):
            together += each[4]
            if (after is None or after[3] - each[3] > TOGETHER_S) and each[3] > last:
                cells = at | {"series": way, "x": ("part of the update", number)}
                rate = together / (each[3] - last) / 1e9
                yield of_record(record, "mlpoffload-fig05", "bandwidth", rate, "GB/s", **cells)
                last, number, together = each[3], number + 1, 0

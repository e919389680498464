"""Measured rows of runs that visit several contexts and batches, or that are watched for their loss.

MemAscend Figs. 2, 9, 10, 16, 17 and 18 (peaks at each point of a sweep) and Fig. 19 (losses). A twin's context is the
original's divided by k; x values here are the original's. A rank may hold the sequences of both of the paper's GPUs
(``gpus`` of the record): rounding to a power of two gives the same for two stores as for one of twice the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workflows.scripts import tidy
from workflows.scripts.records import Run
from workflows.scripts.tidy import AS_PUBLISHED, GIB, MEMASCEND, SCALED

AT_CONTEXT, AT_BATCH, UNDER_CAP = "context (tokens)", "batch", "memory cap (GiB)"
CONTEXT = 4096
LONGEST, LARGEST = 131_072, 32  # the model's own limit, and the batch that stores as much: the paper's last ones
CAPS_GIB = {"128": 128.0, "119.21": 128e9 / GIB}  # as printed, and read as GB (erratum M7)
PROCESS_GIB = 1.63  # Fig. 8; measured peaks lack one for each of the paper's processes
SUBFIGURES = dict(zip(tidy.DENSE, "abcd", strict=True))
PEAK, DEVICE_PEAK = "peak system memory", "peak device memory"
# (checkpointing, attention, loss) of a point -> the stack of Fig. 2.
STACKS = {
    ("none", "eager", "plain"): "ZeRO-Infinity",
    ("plain", "eager", "plain"): "+GC",
    ("plain", "sdpa", "chunked"): "+Liger/Flash",
    ("offloaded", "sdpa", "chunked"): "+Offloaded-GC",
}

Row = dict[str, Any]


def is_sweep(run: Run) -> bool:
    return bool(run.record.get("points_requested") or run.record.get("stacks"))


def is_curve(run: Run) -> bool:
    return bool(run.record.get("evaluate_every"))


def rows(runs: list[Run]) -> Iterator[Row]:
    """Every row of these runs. Which exhibit a sweep is for follows from its model and its points."""
    sweeps = [run for run in runs if is_sweep(run) and run.ok]
    for run in sweeps:
        if len(run.record["stacks"]) > 1:
            yield from stacks(run)
            continue
        for exhibit, x_name, subfigure in exhibits_of(run):
            yield from peaks(exhibit, run, x_name, subfigure)
    yield from losses([run for run in runs if is_curve(run) and run.record["status"] == "ok"])


def exhibits_of(run: Run) -> Iterator[tuple[str, str, str]]:
    """(exhibit, x axis, subfigure) that a sweep of this model is drawn in."""
    if run.model == "Qwen3-30B-A3B":
        yield from (("memascend-fig18", AT_CONTEXT, "a"), ("memascend-fig18", AT_BATCH, "b"))
        return
    if run.model == "Qwen2.5-7B":
        yield from (("memascend-fig09", AT_CONTEXT, ""), ("memascend-fig10", AT_BATCH, ""))
    if run.model in SUBFIGURES:
        yield from (
            ("memascend-fig16", AT_CONTEXT, SUBFIGURES[run.model]),
            ("memascend-fig17", AT_BATCH, SUBFIGURES[run.model]),
        )


def points(run: Run, x_name: str) -> dict[int, dict[str, Any]]:
    """x of the original -> the point: contexts at one sequence a GPU, batches (a GPU) at a context of 4096."""
    out = {}
    for point in run.record["points"]:
        context, batch = point["sequence"] * run.k, point["batch"] * run.record["ranks"] / run.record["gpus"]
        if x_name == AT_CONTEXT and batch == 1:
            out[context] = point
        if x_name == AT_BATCH and context == CONTEXT:
            out[int(batch)] = point
    return out


def measured(exhibit: str, run: Run, metric: str, value: float, unit: str, **more: Any) -> Row:
    own = {"exhibit_id": exhibit, "series": run.series, "model": run.model, "metric": metric, "value": f"{value:.9g}"}
    return own | {"unit": unit, "lane": "measured", "testbed": run.testbed, "source": run.record["key"], **more}


def in_bytes(exhibit: str, run: Run, metric: str, nbytes: float, **more: Any) -> Iterator[Row]:
    yield measured(exhibit, run, metric, nbytes / GIB, "GiB", **more)
    yield measured(exhibit, run, metric + SCALED, nbytes * run.k**2 / GIB, "GiB", **more)


def peaks(exhibit: str, run: Run, x_name: str, subfigure: str) -> Iterator[Row]:
    found = points(run, x_name)
    for x, point in found.items():
        at = {"x_name": x_name, "x_value": str(x), "subfigure": subfigure}
        yield from in_bytes(exhibit, run, PEAK, point["memory"]["host_peak_net_bytes"], **at)
        for metric, size in {"activation checkpoints": "requested", "pinned for them": "reserved"}.items():
            yield from in_bytes(exhibit, run, metric, point[f"checkpoint_store_{size}_bytes"], **at)
    if exhibit == "memascend-fig09":
        yield from under_caps(exhibit, run, "largest context", "tokens", found, LONGEST)
        yield from growth(exhibit, run, found)
    if exhibit == "memascend-fig10":
        yield from under_caps(exhibit, run, "largest batch", "sequences", found, LARGEST)


def under_caps(
    exhibit: str, run: Run, metric: str, unit: str, found: dict[int, dict[str, Any]], limit: int
) -> Iterator[Row]:
    """Of the powers of two, the last under each cap; no row where the sweep ends before it is reached."""
    sizes = {x: p["memory"]["host_peak_net_bytes"] * run.k**2 / GIB for x, p in found.items() if x & (x - 1) == 0}
    processes = run.record["gpus"] * PROCESS_GIB
    for name, cap in CAPS_GIB.items():
        fits = [x for x, size in sizes.items() if size + processes <= cap]
        if fits and (max(fits) == limit or max(fits) < max(sizes)):
            yield measured(exhibit, run, metric, max(fits), unit, x_name=UNDER_CAP, x_value=name)


def growth(exhibit: str, run: Run, found: dict[int, dict[str, Any]]) -> Iterator[Row]:
    if len(found) < 2:
        return
    (first, small), (last, large) = min(found.items()), max(found.items())
    config = run.record["twin"]["config"]
    tokens = (last - first) // run.k * run.record["gpus"]
    equation_1 = tokens * config["num_hidden_layers"] * config["hidden_size"] * 2
    grown = large["memory"]["host_peak_net_bytes"] - small["memory"]["host_peak_net_bytes"]
    yield measured(exhibit, run, "growth relative to Equation 1", grown / equation_1, "x")


def stacks(run: Run) -> Iterator[Row]:
    """Fig. 2: most bytes of the device's role alive at once, from allocation events."""
    exhibit = "memascend-fig02"
    for point in run.record["points"]:
        context = point["sequence"] * run.k
        series = STACKS[tuple(point["stack"][name] for name in ("checkpointing", "attention", "loss"))]
        at = {"x_name": AT_CONTEXT, "x_value": str(context), "series": series}
        at["subfigure"] = "a" if context < CONTEXT else "b"
        yield from in_bytes(exhibit, run, DEVICE_PEAK, point["memory"]["device_peak_bytes"], **at)
        yield measured(exhibit, run, "batch size", point["batch"], "sequences", **at)


def losses(runs: list[Run]) -> Iterator[Row]:
    """Fig. 19: both arms' losses, and the largest difference between them."""
    exhibit = "memascend-fig19"
    for run in runs:
        for step, loss in enumerate(run.record["losses"], 1):
            yield measured(exhibit, run, "training loss", loss, "nats", subfigure="a", x_name="step", x_value=str(step))
        for reading in run.record["evaluation"]:
            at = {"subfigure": "b", "x_name": "step", "x_value": str(reading["step"])}
            yield measured(exhibit, run, "evaluation loss", reading["loss"], "nats", **at)
    by_arm = {(run.series, run.testbed, run.record["seed"]): run for run in runs}
    for (series, testbed, seed), ours in by_arm.items():
        theirs = by_arm.get((AS_PUBLISHED, testbed, seed))
        if series == MEMASCEND and theirs is not None:
            training = difference(ours.record["losses"], theirs.record["losses"])
            evaluation = difference(*([r["loss"] for r in run.record["evaluation"]] for run in (ours, theirs)))
            keys = {"source": f"{theirs.record['key']} {ours.record['key']}"}
            yield measured(exhibit, ours, "largest difference in training loss", training, "nats", **keys)
            yield measured(exhibit, ours, "largest difference in evaluation loss", evaluation, "nats", **keys)


def difference(one: list[float], other: list[float]) -> float:
    """Largest absolute difference of two curves of equal length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))

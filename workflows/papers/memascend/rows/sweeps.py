"""Memory by context and batch, and losses: MemAscend Figs. 2, 9, 10, 16, 17, 18 and 19, planned and measured.

As in these figures, there are two GPUs: each rank has a process overhead of 1.63 GiB (Fig. 8) and its own checkpoint
store, which ZeRO-Infinity rounds up to a power of two. The planned grids are finer than the paper's, so that plateaus
are visible. A twin's context is the original's divided by k; x values are the original's. A rank may process the
sequences of both of the paper's GPUs (``gpus`` of the record): rounding is the same for two stores as for one of twice
the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memascend.planner import Workload, model_spec
from memascend.planner.footprint import DEVICE_PEAK, GIB, PEAK, checkpoint_bytes
from memascend.planner.gpu_memory import STACKS, gpu_memory
from workflows import tidy
from workflows.cases import Case, Planned, Row, in_bytes, largest_under, of_case
from workflows.papers.memascend.rows import settings
from workflows.records import Run
from workflows.tidy import AS_PUBLISHED, MEMASCEND

shown = settings.PAPER.shown
CHECKPOINTS = "activation checkpoints in system memory"
HYPOTHESIS = "peak system memory, hypothesis H1"
LONGEST, LARGEST = settings.CONTEXTS[-1], 32  # the model's limit, and the batch with as much to store
# Grids over which the averages of Fig. 16 might be taken (erratum M8); the paper states none.
GRIDS = {
    "every 4096": tuple(settings.CONTEXTS),
    "4096 and every 8192": (settings.CONTEXT, *range(2 * settings.CONTEXT, LONGEST + 1, 2 * settings.CONTEXT)),
    "powers of two": tuple(settings.CONTEXT << i for i in range(6)),
}
SUBFIGURES = dict(zip(tidy.DENSE, "abcd", strict=True))
# (checkpointing, attention, loss) of a measured point -> the stack of Fig. 2.
STACK_NAMES = {
    ("none", "eager", "plain"): "ZeRO-Infinity",
    ("plain", "eager", "plain"): "+GC",
    ("plain", "sdpa", "chunked"): "+Liger/Flash",
    ("offloaded", "sdpa", "chunked"): "+Offloaded-GC",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Peak host memory of one system at one context or batch."""

    x: int
    case: Case  # a plan is without activations
    peak_bytes: int


def planned() -> Iterator[Row]:
    """Yield the modelled lane of the exhibits over context and batch."""
    yield from planned_stacks()
    contexts, sizes = (curves("qwen2.5-7b", name, values) for name, values in axes("qwen2.5-7b"))
    yield from drawn("memascend-fig09", contexts, settings.AT_CONTEXT)
    yield from reached("memascend-fig09", contexts)
    yield from drawn("memascend-fig10", sizes, settings.AT_BATCH)
    yield from reached("memascend-fig10", sizes)
    for model in settings.DENSE:
        contexts, sizes = (curves(model, name, values) for name, values in axes(model))
        at = {"subfigure": SUBFIGURES[model_spec(model).display]}
        yield from drawn("memascend-fig16", contexts, settings.AT_CONTEXT, **at)
        yield from averages("memascend-fig16", contexts, **at)
        yield smallest_reduction("memascend-fig16", contexts, **at)
        yield from drawn("memascend-fig17", sizes, settings.AT_BATCH, **at)
        yield smallest_reduction("memascend-fig17", sizes, **at)
    yield from planned_fig18()
    yield from equation_1()


def equation_1() -> Iterator[Row]:
    """Yield the formula without P_m for Qwen2.5-7B at batch 1, and what each system's allocator adds to it (P_m)."""
    exhibit, spec = "memascend-eq01", model_spec("qwen2.5-7b")
    for context in settings.CONTEXTS:
        at = {"x": (settings.AT_CONTEXT, context)}
        stored = settings.GPUS * context * spec.layers * spec.hidden * 2
        cells = {"model": spec.display, "series": "Equation 1 without P_m"} | at
        yield shown(exhibit, CHECKPOINTS, stored / GIB, "GiB", "Ng B C L H F16", **cells)
        for case in settings.pair("qwen2.5-7b", settings.C1, ranks=settings.GPUS):
            reserved = checkpoint_bytes(replace(case.made.work, context=context))
            yield of_case(exhibit, case, CHECKPOINTS, reserved / GIB, "GiB", "what the allocator reserves", **at)
            added = 100 * (reserved - stored) / stored
            yield of_case(exhibit, case, "pinned overhead P_m", added, "%", "reserved over Ng B C L H F16", **at)


def axes(model: str) -> tuple[tuple[str, Iterable[int]], ...]:
    """Return the (x axis, values) pairs of a model: contexts at batch 1, and batches."""
    return (settings.AT_CONTEXT, settings.CONTEXTS), (settings.AT_BATCH, settings.batches(model))


def curves(model: str, x_name: str, values: Iterable[int], testbed: str = settings.C1) -> list[Point]:
    """Return both systems at each context (batch 1) or batch (context 4096): the plan plus the checkpoints of Eq. 1."""
    out = []
    for x in values:
        for case in settings.pair(model, testbed, ranks=settings.GPUS):
            tokens = x if x_name == settings.AT_CONTEXT else settings.CONTEXT * x
            stored = checkpoint_bytes(replace(case.made.work, context=tokens))
            out.append(Point(x=x, case=case, peak_bytes=case.peak_bytes + stored))
    return out


def drawn(exhibit: str, points: list[Point], x_name: str, **cells: str) -> Iterator[Row]:
    """Yield the peak of each point."""
    for point in points:
        yield from in_bytes(exhibit, point.case, PEAK, point.peak_bytes, x=(x_name, point.x), **cells)


def reached(exhibit: str, points: list[Point]) -> Iterator[Row]:
    """Yield the largest point under the paper's cap, and for contexts the growth; printed totals
    include the processes."""
    metric, unit, limit = ("largest context", "tokens", LONGEST)
    if exhibit == "memascend-fig10":
        metric, unit, limit = ("largest batch", "sequences", LARGEST)
    sizes = []
    for p in points:
        processes_gib = 0.0 if p.case.lane == "modelled" else p.case.record["gpus"] * settings.PROCESS_GIB
        sizes.append((p.case, p.x, p.peak_bytes * p.case.k**2 / GIB + processes_gib))
    yield from largest_under(exhibit, metric, unit, sizes, settings.CAPS_GIB, limit)
    if exhibit == "memascend-fig09":
        yield from growth(exhibit, points)


def growth(exhibit: str, points: list[Point]) -> Iterator[Row]:
    """Yield each series' growth from its first to its last context, relative to that of Eq. 1."""
    for series in dict.fromkeys(p.case.series for p in points):
        mine = sorted((p for p in points if p.case.series == series), key=lambda p: p.x)
        if len(mine) < 2:
            continue
        first, last = mine[0], mine[-1]
        case = first.case
        if isinstance(case, Planned):
            gpus, layers, hidden = settings.GPUS, case.made.work.spec.layers, case.made.work.spec.hidden
        else:
            config = case.record["twin"]["config"]
            gpus, layers, hidden = case.record["gpus"], config["num_hidden_layers"], config["hidden_size"]
        equation_1 = (last.x - first.x) // case.k * gpus * layers * hidden * 2
        grown = (last.peak_bytes - first.peak_bytes) / equation_1
        formula = f"growth from {first.x} to {last.x} tokens over Ng B C L H 2"
        yield of_case(exhibit, case, "growth relative to Equation 1", grown, "x", formula)


def reductions_at(points: list[Point]) -> dict[int, float]:
    """Return x -> by how many percent MemAscend's peak is below the baseline's."""
    peaks = {(p.case.series, p.x): p.peak_bytes for p in points}
    return {x: 100 * (1 - peaks[MEMASCEND, x] / peaks[AS_PUBLISHED, x]) for x in dict.fromkeys(p.x for p in points)}


def smallest_reduction(exhibit: str, points: list[Point], **cells: str) -> Row:
    """Return the smallest reduction over all contexts or batches of a model."""
    least, formula = min(reductions_at(points).values()), "least over the points of the curve"
    return of_case(exhibit, points[0].case, "smallest reduction", least, "%", formula, **cells | {"series": MEMASCEND})


def averages(exhibit: str, points: list[Point], **cells: str) -> Iterator[Row]:
    """Yield the mean reduction over the contexts of each grid."""
    percent = reductions_at(points)
    for grid, contexts in GRIDS.items():
        mean = sum(percent[c] for c in contexts) / len(contexts)
        cells |= {"series": MEMASCEND, "x": ("grid of contexts", grid)}
        formula = "mean over the contexts of the grid"
        yield of_case(exhibit, points[0].case, "average reduction", mean, "%", formula, **cells)


def planned_fig18() -> Iterator[Row]:
    """Yield the formula of the dense models, and hypothesis H1: expert matrices stay in pinned host memory."""
    exhibit, resident = "memascend-fig18", resident_experts()
    formula = "the same, and each rank's share of every expert matrix in a pinned power of two"
    for subfigure, (x_name, values) in zip("ab", axes(settings.MOE), strict=True):
        points = curves(settings.MOE, x_name, values, settings.C3)
        yield from drawn(exhibit, points, x_name, subfigure=subfigure)
        for p in points:
            at = {"x": (x_name, p.x), "subfigure": subfigure}
            yield of_case(exhibit, p.case, HYPOTHESIS, (p.peak_bytes + resident) / GIB, "GiB", formula, **at)


def resident_experts() -> int:
    """Return the bytes of the 18,432 expert matrices if they stay in memory, each rank's share rounded separately (H1).

    This applies to both systems: MemAscend allocates such tensors by PyTorch's allocator too.
    """
    experts = [tensor for tensor in model_spec(settings.MOE).tensors() if ".experts." in tensor.name]
    return sum(settings.GPUS * (1 << (-(-2 * tensor.numel // settings.GPUS) - 1).bit_length()) for tensor in experts)


def planned_stacks() -> Iterator[Row]:
    """Yield Fig. 2: one GPU, 8B, batch 4; each stack contains the techniques before it."""
    spec = model_spec("llama3.1-8b")
    for context in (512, 32_768):
        for label, stack in STACKS.items():
            made = gpu_memory(Workload(spec=spec, system="zero_infinity", stack=stack, batch=4, context=context))
            cells = {"series": label, "model": spec.display, "x": (settings.AT_CONTEXT, context)}
            for metric, nbytes in {DEVICE_PEAK: made.device_bytes, **made.components()}.items():
                yield shown("memascend-fig02", metric, nbytes / GIB, "GiB", "memascend.planner.gpu_memory", **cells)


def measured(runs: list[Run]) -> Iterator[Row]:
    """Yield the rows of sweeps and curves; a sweep's exhibits follow from its model and its points."""
    for run in (run for run in runs if run.is_sweep and run.ok):
        if len(run.record["stacks"]) > 1:
            yield from measured_stacks(run)
            continue
        for exhibit, x_name, subfigure in exhibits_of(run):
            yield from sweep(exhibit, run, x_name, subfigure)
    yield from losses([run for run in runs if run.is_curve and run.record["status"] == "ok"])


def exhibits_of(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (exhibit, x axis, subfigure) for a sweep of this model."""
    if run.model == "Qwen3-30B-A3B":
        yield from (("memascend-fig18", settings.AT_CONTEXT, "a"), ("memascend-fig18", settings.AT_BATCH, "b"))
        return
    if run.model == "Qwen2.5-7B":
        yield from (("memascend-fig09", settings.AT_CONTEXT, ""), ("memascend-fig10", settings.AT_BATCH, ""))
    if run.model in SUBFIGURES:
        at = SUBFIGURES[run.model]
        yield from (("memascend-fig16", settings.AT_CONTEXT, at), ("memascend-fig17", settings.AT_BATCH, at))


def points(run: Run, x_name: str) -> dict[int, dict[str, Any]]:
    """Return x of the original -> point: contexts at one sequence per GPU, batches per GPU at a context of 4096."""
    out = {}
    for point in run.record["points"]:
        context, batch = point["sequence"] * run.k, point["batch"] * run.record["ranks"] / run.record["gpus"]
        if x_name == settings.AT_CONTEXT and batch == 1:
            out[context] = point
        if x_name == settings.AT_BATCH and context == settings.CONTEXT:
            out[int(batch)] = point
    return out


def sweep(exhibit: str, run: Run, x_name: str, subfigure: str) -> Iterator[Row]:
    """Yield the peak and the store of checkpoints at each point of a run."""
    found = points(run, x_name)
    for x, point in found.items():
        at = {"x": (x_name, x), "subfigure": subfigure}
        yield from in_bytes(exhibit, run, PEAK, point["memory"]["host_peak_net_bytes"], **at)
        for metric, size in {"activation checkpoints": "requested", "pinned for them": "reserved"}.items():
            yield from in_bytes(exhibit, run, metric, point[f"checkpoint_store_{size}_bytes"], **at)
    if exhibit in ("memascend-fig09", "memascend-fig10"):
        peaks = [Point(x=x, case=run, peak_bytes=p["memory"]["host_peak_net_bytes"]) for x, p in found.items()]
        yield from reached(exhibit, peaks)


def measured_stacks(run: Run) -> Iterator[Row]:
    """Yield Fig. 2: the largest number of live bytes of the device's role, from allocation events."""
    exhibit = "memascend-fig02"
    for point in run.record["points"]:
        context = point["sequence"] * run.k
        series = STACK_NAMES[tuple(point["stack"][name] for name in ("checkpointing", "attention", "loss"))]
        at = {
            "x": (settings.AT_CONTEXT, context),
            "series": series,
            "subfigure": "a" if context < settings.CONTEXT else "b",
        }
        yield from in_bytes(exhibit, run, DEVICE_PEAK, point["memory"]["device_peak_bytes"], **at)
        yield of_case(exhibit, run, "batch size", point["batch"], "sequences", **at)


def losses(runs: list[Run]) -> Iterator[Row]:
    """Yield Fig. 19: both arms' losses, and the largest difference between them."""
    exhibit = "memascend-fig19"
    for run in runs:
        for step, loss in enumerate(run.record["losses"], 1):
            at = {"subfigure": "a", "x": ("step", step)}
            yield of_case(exhibit, run, "training loss", loss, "nats", **at)
        for reading in run.record["evaluation"]:
            at = {"subfigure": "b", "x": ("step", reading["step"])}
            yield of_case(exhibit, run, "evaluation loss", reading["loss"], "nats", **at)
    by_arm = {(run.series, run.testbed, run.record["seed"]): run for run in runs}
    for (series, testbed, seed), ours in by_arm.items():
        theirs = by_arm.get((AS_PUBLISHED, testbed, seed))
        if series == MEMASCEND and theirs is not None:
            training = difference(ours.record["losses"], theirs.record["losses"])
            evaluation = difference(*([r["loss"] for r in run.record["evaluation"]] for run in (ours, theirs)))
            keys = {"source": f"{theirs.record['key']} {ours.record['key']}"}
            for what, value in (("training", training), ("evaluation", evaluation)):
                yield of_case(exhibit, ours, f"largest difference in {what} loss", value, "nats") | keys


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest absolute difference of two curves of equal length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))

"""Memory against context and batch in the modelled lane: MemAscend Figs. 2, 9, 10, 16, 17 and 18.

Two GPUs, as these figures have: each rank holds a process overhead of 1.63 GiB (Fig. 8) and a checkpoint store of its
own, which ZeRO-Infinity rounds to a power of two. The grids are finer than the paper's, so that plateaus are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from memascend.planner import Plan, Workload, model_spec
from memascend.planner.footprint import GIB, PEAK, checkpoint_bytes
from memascend.planner.gpu_memory import STACKS, gpu_memory
from workflows.scripts.model_rows import C1, C3, DENSE, Row, pair, planned, row
from workflows.scripts.tidy import MEMASCEND

GPUS = 2
CONTEXT = 4096
LARGEST_CONTEXT = 131_072
CONTEXTS = range(CONTEXT, LARGEST_CONTEXT + 1, CONTEXT)
# Largest batch of a model that the paper names (Fig. 17 text, Table IV).
LARGEST_BATCH = {"llama3.1-8b": 96, "qwen2.5-7b": 64, "qwen2.5-14b": 64, "qwen2.5-32b": 48, "qwen3-30b-a3b": 32}
AT_CONTEXT, AT_BATCH, UNDER_CAP = "context (tokens)", "batch", "memory cap (GiB)"
CAPS_GIB = {"128": 128.0, "119.21": 128e9 / GIB}  # as printed, and read as GB (erratum M7)
MOE = "qwen3-30b-a3b"
HYPOTHESIS = "peak system memory, hypothesis H1"
# Grids that the averages of Fig. 16 might be over (erratum M8); the paper states none.
GRIDS = {
    "every 4096": tuple(CONTEXTS),
    "4096 and every 8192": (CONTEXT, *range(2 * CONTEXT, LARGEST_CONTEXT + 1, 2 * CONTEXT)),
    "powers of two": tuple(CONTEXT << i for i in range(6)),
}


def rows() -> Iterator[Row]:
    yield from fig02()
    yield from fig09()
    yield from fig10()
    yield from fig16()
    yield from fig17()
    yield from fig18()


def fig02() -> Iterator[Row]:
    """One GPU, 8B, batch 4: each stack of techniques with all before it."""
    spec = model_spec("llama3.1-8b")
    for context in (512, 32_768):
        for label, stack in STACKS.items():
            work = Workload(spec=spec, system="zero_infinity", stack=stack, batch=4, context=context)
            made = gpu_memory(work)
            cells = {"series": label, "model": spec.display, "testbed": C1}
            cells |= {"x_name": AT_CONTEXT, "x_value": str(context)}
            for metric, nbytes in {"peak device memory": made.device_bytes, **made.components()}.items():
                yield row("memascend-fig02", metric, nbytes / GIB, "GiB", "memascend.planner.gpu_memory", **cells)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Peak host memory of one system at one context or batch."""

    x: int
    made: Plan  # without activations
    host_bytes: int


@cache
def without_activations(model: str) -> tuple[Plan, Plan]:
    return pair(model, ranks=GPUS)


def host_bytes(made: Plan, tokens: int) -> int:
    """The plan and the checkpoints of ``tokens`` a GPU (Eq. 1), one store a rank."""
    return made.host_bytes + checkpoint_bytes(replace(made.work, context=tokens))


def curves(model: str, x_name: str, values: Iterable[int]) -> list[Point]:
    """Both systems at each context (batch 1) or batch (context 4096)."""
    return [
        Point(x=x, made=made, host_bytes=host_bytes(made, x if x_name == AT_CONTEXT else CONTEXT * x))
        for x in values
        for made in without_activations(model)
    ]


def drawn(exhibit: str, points: list[Point], x_name: str, testbed: str = C1, **cells: str) -> Iterator[Row]:
    for point in points:
        at = {"x_name": x_name, "x_value": str(point.x), **cells}
        yield planned(exhibit, point.made, PEAK, point.host_bytes, testbed, **at)


def under_caps(exhibit: str, metric: str, unit: str, points: list[Point], first: int) -> Iterator[Row]:
    """Of the powers of two from ``first``, the last whose peak is under each cap."""
    for made in without_activations("qwen2.5-7b"):
        mine = [p for p in points if p.made is made and (p.x // first) & (p.x // first - 1) == 0]
        for name, cap in CAPS_GIB.items():
            largest = max(p.x for p in mine if p.host_bytes <= cap * GIB)
            cells = {"series": made.label, "model": made.work.spec.display, "testbed": C1}
            cells |= {"x_name": UNDER_CAP, "x_value": name}
            yield row(exhibit, metric, largest, unit, "last power of two whose peak is under the cap", **cells)


def fig09() -> Iterator[Row]:
    exhibit = "memascend-fig09"
    points = curves("qwen2.5-7b", AT_CONTEXT, CONTEXTS)
    yield from drawn(exhibit, points, AT_CONTEXT)
    yield from under_caps(exhibit, "largest context", "tokens", points, CONTEXT)
    for made in without_activations("qwen2.5-7b"):
        first, *_, last = (p for p in points if p.made is made)
        equation_1 = GPUS * (last.x - first.x) * made.work.spec.layers * made.work.spec.hidden * 2
        growth = (last.host_bytes - first.host_bytes) / equation_1
        cells = {"series": made.label, "model": made.work.spec.display, "testbed": C1}
        source = f"growth from {first.x} to {last.x} tokens over Ng B C L H 2"
        yield row(exhibit, "growth relative to Equation 1", growth, "x", source, **cells)


def fig10() -> Iterator[Row]:
    exhibit = "memascend-fig10"
    points = curves("qwen2.5-7b", AT_BATCH, batches("qwen2.5-7b"))
    yield from drawn(exhibit, points, AT_BATCH)
    yield from under_caps(exhibit, "largest batch", "sequences", points, 1)


def batches(model: str) -> list[int]:
    """1, 2 and every 4 up to the model's largest batch."""
    return [1, 2, *range(4, LARGEST_BATCH[model] + 1, 4)]


def reductions(points: list[Point]) -> dict[int, float]:
    """x -> reduction from as published to MemAscend in percent."""
    peaks = {(p.made.work.system, p.x): p.host_bytes for p in points}
    at = dict.fromkeys(p.x for p in points)
    return {x: 100 * (1 - peaks["memascend", x] / peaks["zero_infinity", x]) for x in at}


def fig16() -> Iterator[Row]:
    exhibit = "memascend-fig16"
    for subfigure, model in zip("abcd", DENSE, strict=True):
        points = curves(model, AT_CONTEXT, CONTEXTS)
        yield from drawn(exhibit, points, AT_CONTEXT, subfigure=subfigure)
        percent = reductions(points)
        for grid, contexts in GRIDS.items():
            mean = sum(percent[c] for c in contexts) / len(contexts)
            cells = {"series": MEMASCEND, "model": model_spec(model).display, "testbed": C1, "subfigure": subfigure}
            cells |= {"x_name": "grid of contexts", "x_value": grid}
            yield row(exhibit, "average reduction", mean, "%", "mean over the contexts of the grid", **cells)


def fig17() -> Iterator[Row]:
    for subfigure, model in zip("abcd", DENSE, strict=True):
        points = curves(model, AT_BATCH, batches(model))
        yield from drawn("memascend-fig17", points, AT_BATCH, subfigure=subfigure)


def fig18() -> Iterator[Row]:
    """The formula of the dense models, and beside it hypothesis H1: expert matrices stay in pinned host memory."""
    exhibit, resident = "memascend-fig18", resident_experts()
    source = "the same, and each rank's share of every expert matrix in a pinned power of two"
    for subfigure, x_name, values in (("a", AT_CONTEXT, CONTEXTS), ("b", AT_BATCH, batches(MOE))):
        points = curves(MOE, x_name, values)
        yield from drawn(exhibit, points, x_name, C3, subfigure=subfigure)
        for p in points:
            cells = {"x_name": x_name, "x_value": str(p.x), "subfigure": subfigure}
            yield planned(exhibit, p.made, HYPOTHESIS, p.host_bytes + resident, C3, **cells) | {"source": source}


def resident_experts() -> int:
    """Bytes that the 18,432 expert matrices take if they stay in memory, each rank's share rounded by itself (H1).

    Both systems: such tensors go to PyTorch's allocator in MemAscend too.
    """
    experts = [tensor for tensor in model_spec(MOE).tensors() if ".experts." in tensor.name]
    return sum(GPUS * (1 << (-(-2 * tensor.numel // GPUS) - 1).bit_length()) for tensor in experts)

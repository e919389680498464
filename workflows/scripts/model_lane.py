"""The modelled lane: what the planner says of each exhibit, on the paper's machines, as rows of the tidy table.

Totals hold the process overhead that Fig. 8 states (1.63 GiB a process), as the printed totals do. The plans describe
one rank and no activation checkpoints, which is what Figs. 4, 8, 15 and 21 fit (the paper states neither).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from memascend.planner import model_spec
from memascend.planner.footprint import DEVICE_PEAK, GIB, OWNER_METRICS, PEAK, PINNED_OVERHEAD, overflow_timeline
from workflows.scripts import model_sweeps, model_times, tidy
from workflows.scripts.model_rows import C1, C2, DENSE, FOUR, Row, pair, paper_plan, planned, row

TABLE_II = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b")
TABLE_II_GPU_GIB, TABLE_II_RAM_GIB = 24, 128
# Components of Fig. 8; what the paper's bars leave out goes together.
FIGURE_8 = (
    "parameter buffer pool",
    "gradient flat buffer",
    "optimizer-state and swap-out buffers",
    "overflow check overhead",
    "process overhead",
    PINNED_OVERHEAD,
)
OTHER = "other host buffers"


def reductions(exhibit: str, pairs: Iterable[tuple[str, float, float]], testbed: str) -> Iterator[Row]:
    """Reduction in percent from (model, before, after), and the mean of them all."""
    percents = []
    source = "100 (1 - MemAscend / as published)"
    for model, before, after in pairs:
        percents.append(100 * (1 - after / before))
        cells = {"series": tidy.MEMASCEND, "model": model, "testbed": testbed}
        yield row(exhibit, "reduction", percents[-1], "%", source, **cells)
    cells = {"series": tidy.MEMASCEND, "model": FOUR, "testbed": testbed}
    yield row(exhibit, "average reduction", sum(percents) / len(percents), "%", f"mean of {source}", **cells)


def fig03() -> Iterator[Row]:
    """Bytes alive through the steps of the check, for 8B."""
    exhibit = "memascend-fig03"
    for made in pair("llama3.1-8b"):
        chain = made.work.system == "zero_infinity"
        steps = list(overflow_timeline(made.work.spec.parameters, chain=chain))
        flat = steps[0][1]
        for step, live in steps:
            yield planned(exhibit, made, "live tensors", live, C1, x_name="step", x_value=step)
        yield planned(exhibit, made, "gradient flat buffer", flat, C1)
        yield planned(exhibit, made, "peak during overflow check", max(live for _, live in steps), C1)
        for step, live in steps:
            if step in ("isinf", "isnan", "fused check"):
                cells = {"series": made.label, "model": made.work.spec.display, "testbed": C1}
                source = "abs() copy 4 B and mask 1 B an element" if chain else "one pass, no temporaries"
                cells |= {"x_name": "step", "x_value": step}
                yield row(exhibit, "peak relative to tensor", live / flat, "x", source, **cells)


def fig04() -> Iterator[Row]:
    """What MemAscend needs is required, the rest of the baseline's peak is overhead."""
    exhibit, shares = "memascend-fig04", []
    source = "overhead / peak of ZeRO-Infinity"
    for model in DENSE:
        before, after = pair(model)
        whole, required = before.host_bytes, after.host_bytes
        yield planned(exhibit, before, PEAK, whole, C2)
        yield planned(exhibit, before, "required", required, C2)
        yield planned(exhibit, before, "overhead", whole - required, C2)
        shares.append(100 * (1 - required / whole))
        cells = {"series": before.label, "model": before.work.spec.display, "testbed": C2}
        yield row(exhibit, "wasted share", shares[-1], "%", source, **cells)
    cells = {"series": tidy.AS_PUBLISHED, "model": FOUR, "testbed": C2}
    yield row(exhibit, "average wasted share", sum(shares) / len(shares), "%", f"mean of {source}", **cells)


def fig08() -> Iterator[Row]:
    """Components and totals for Qwen2.5-7B, today's DeepSpeed (on a GPU machine) beside the paper's baseline."""
    exhibit, spec = "memascend-fig08", model_spec("qwen2.5-7b")
    as_published, ours = pair("qwen2.5-7b")
    for made in (as_published, paper_plan("qwen2.5-7b", "zero_infinity", "today"), ours):
        parts = made.components()
        for metric in FIGURE_8:
            yield planned(exhibit, made, metric, parts.pop(metric, 0), C1)
        yield planned(exhibit, made, OTHER, sum(parts.values()), C1)
        yield planned(exhibit, made, PEAK, made.host_bytes, C1)
    parts = ours.components()
    needed = {name: parts[name] for name in ("parameter buffer pool", "gradient flat buffer")}
    for metric, nbytes in {**needed, PEAK: sum(needed.values())}.items():
        yield planned(exhibit, ours, metric, nbytes, C1, series=tidy.MINIMUM)
    cells = {"series": tidy.MEMASCEND, "model": spec.display, "testbed": C1}
    percent = 100 * (1 - ours.host_bytes / as_published.host_bytes)
    yield row(exhibit, "reduction", percent, "%", "100 (1 - MemAscend / as published)", **cells)


def fig11() -> Iterator[Row]:
    """The parameter buffer pool as requested: rounding is a component of its own in Fig. 8."""
    exhibit, pairs = "memascend-fig11", []
    for model in DENSE:
        plans = pair(model)
        sizes = [made.requested_bytes("parameter_pool") for made in plans]
        for made, size in zip(plans, sizes, strict=True):
            yield planned(exhibit, made, OWNER_METRICS["parameter_pool"], size, C1)
        pairs.append((plans[0].work.spec.display, *sizes))
    yield from reductions(exhibit, pairs, C1)


def fig13() -> Iterator[Row]:
    """What the check needs beside the gradient buffer."""
    for model in DENSE:
        for made in pair(model):
            for owner in ("overflow_check", "gradient_flat_buffer"):
                yield planned("memascend-fig13", made, OWNER_METRICS[owner], made.requested_bytes(owner), C1)


def peaks(exhibit: str, dtype: str) -> Iterator[Row]:
    """Figs. 15 and 21: peaks of four models, reductions and their mean."""
    pairs = []
    for model in DENSE:
        plans = pair(model, dtype)
        for made in plans:
            yield planned(exhibit, made, PEAK, made.host_bytes, C2)
        pairs.append((plans[0].work.spec.display, *(made.host_bytes for made in plans)))
    yield from reductions(exhibit, pairs, C2)


def tab02() -> Iterator[Row]:
    """All nine cells; a configuration beyond 24 GiB of GPU or 128 GiB of host memory is named as what it is."""
    exhibit = "memascend-tab02"
    for model in TABLE_II:
        for system in ("all_in_gpu", "zero_offload", "zero_infinity"):
            made = paper_plan(model, system)
            yield planned(exhibit, made, PEAK, made.host_bytes, C2)
            if made.device_bytes:
                yield planned(exhibit, made, DEVICE_PEAK, made.device_bytes, C2)
            outcome = "fits"
            if made.device_bytes > TABLE_II_GPU_GIB * GIB:
                outcome = "VRAM OOM"
            elif made.host_bytes > TABLE_II_RAM_GIB * GIB:
                outcome = "DRAM OOM"
            source = f"against {TABLE_II_GPU_GIB} GiB of GPU and {TABLE_II_RAM_GIB} GiB of host memory"
            cells = {"series": made.label, "model": made.work.spec.display, "testbed": C2}
            yield row(exhibit, "outcome", outcome, "text", source, **cells)


def modelled() -> list[Row]:
    """Every row of the lane. Tables III and V have none: they describe machines."""
    exhibits = (fig03(), fig04(), fig08(), fig11(), fig13(), peaks("memascend-fig15", "fp16"))
    exhibits += (peaks("memascend-fig21", "bf16"), tab02(), model_sweeps.rows(), model_times.rows())
    return [each for rows in exhibits for each in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="tidy table of the modelled lane")
    args = parser.parse_args()
    try:
        tidy.write_table(modelled(), args.out)
    except (ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

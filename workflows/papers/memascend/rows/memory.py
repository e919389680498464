"""Host memory of one step: MemAscend Figs. 3, 4, 8, 11, 13, 15 and 21 and Table II, from plans and runs.

Planned totals include the process overhead that Fig. 8 states (1.63 GiB per process), as printed totals do; measured
peaks are net of the run's baseline. The plans describe one rank without activation checkpoints, which matches Figs. 4,
8, 15 and 21 (the paper states neither).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

import pandas as pd

from memascend.memory.pools import adaptive_pool_classes
from memascend.planner import plan
from memascend.planner.footprint import DEVICE_PEAK, GIB, OWNER_METRICS, PEAK, PINNED_OVERHEAD, overflow_timeline
from memascend.planner.gpu_memory import gpu_memory
from workflows import tidy
from workflows.cases import FOUR, Case, Planned, Row, failed, in_bytes, of_case, paper_plan, reductions
from workflows.papers.memascend.rows.settings import C1, C2, DENSE, pair
from workflows.records import Run, last_check, read_trace, without_temporaries
from workflows.tidy import AS_PUBLISHED, MEMASCEND

TABLE_II = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b")
TABLE_II_NAMES = ("Llama3.2-1B", "Llama3.2-3B", "Llama3.1-8B")
TABLE_II_GPU_GIB, TABLE_II_RAM_GIB = 24, 128
TABLE_II_RANGE = ((1, 2048), (8, 4096))  # batch and context, which the paper leaves open
# Components of Fig. 8; components that the paper's bars leave out are summed.
FIGURE_8 = (
    "parameter buffer pool",
    "gradient flat buffer",
    "optimizer-state and swap-out buffers",
    "overflow check overhead",
    "process overhead",
    PINNED_OVERHEAD,
)
OTHER, LEDGER = "other host buffers", "ledger explained share"
NEEDED = ("parameter buffer pool", "gradient flat buffer")
OTHER_METRICS = {  # metric -> field of the record's memory section
    "raw resident peak": "raw_peak_bytes",
    "start-up resident peak": "startup_peak_bytes",
    "training resident peak": "training_peak_bytes",
    "device-role peak": "device_peak_bytes",
    "process baseline": "baseline_bytes",
}


def planned() -> Iterator[Row]:
    """Yield the modelled lane of the exhibits on memory at one point."""
    four = {testbed: [each for model in DENSE for each in pair(model, testbed)] for testbed in (C1, C2)}
    yield from planned_fig03()
    yield from fig04(pairs(four[C2]))
    yield from planned_fig08()
    yield from fig11(four[C1])
    yield from buffers(four[C1])
    yield from fig13(four[C1])
    yield from peaks("memascend-fig15", four[C2])
    yield from peaks("memascend-fig21", [each for model in DENSE for each in pair(model, C2, "bf16")])
    yield from planned_tab02()


def measured(runs: list[Run]) -> Iterator[Row]:
    """Yield the rows of runs at one point, without sweeps and curves."""
    paired = [r for r in runs if r.series not in (tidy.ZERO_OFFLOAD, tidy.ALL_IN_GPU)]
    paired = [r for r in paired if r.model not in TABLE_II_NAMES[:2]]
    fp16, bf16 = ([r for r in paired if r.dtype == dtype] for dtype in ("fp16", "bf16"))
    yield from measured_fig03(fp16)
    yield from fig04(pairs(fp16))
    yield from measured_fig08([r for r in fp16 if r.model == "Qwen2.5-7B"])
    yield from fig11(fp16)
    yield from fig13(fp16)
    yield from peaks("memascend-fig15", fp16)
    yield from peaks("memascend-fig21", bf16)
    three = (AS_PUBLISHED, tidy.ZERO_OFFLOAD, tidy.ALL_IN_GPU)
    chosen = [r for r in runs if r.dtype == "fp16" and r.model in TABLE_II_NAMES and r.series in three]
    yield from run_peaks("memascend-tab02", chosen)


def pairs(cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Return the (as published, MemAscend) cases that differ in nothing else."""
    cases = [case for case in cases if case.ok]

    def same(case: Case) -> tuple:
        own = {} if isinstance(case, Planned) else case.record
        return case.model, case.testbed, *(own.get(word) for word in ("dtype", "seed", "sequence", "batch"))

    ours = {same(case): case for case in cases if case.series == MEMASCEND}
    return [(case, ours[same(case)]) for case in cases if case.series == AS_PUBLISHED and same(case) in ours]


def peak(case: Case) -> int:
    return case.peak_bytes


def fig04(both: list[tuple[Case, Case]]) -> Iterator[Row]:
    """Yield Fig. 4: MemAscend's peak is the required memory, the rest of the baseline's peak is overhead."""
    exhibit, shares = "memascend-fig04", []
    formula = "overhead / peak of ZeRO-Infinity"
    for before, after in both:
        whole, required = before.peak_bytes, after.peak_bytes
        for metric, nbytes in {PEAK: whole, "required": required, "overhead": whole - required}.items():
            yield from in_bytes(exhibit, before, metric, nbytes)
        shares.append(100 * (1 - required / whole))
        yield of_case(exhibit, before, "wasted share", shares[-1], "%", formula)
    if both and both[0][0].lane == "modelled":
        mean = sum(shares) / len(shares)
        yield of_case(exhibit, both[0][0], "average wasted share", mean, "%", f"mean of {formula}", model=FOUR)


def fig11(cases: Iterable[Case]) -> Iterator[Row]:
    """Yield the parameter buffer pool as requested; rounding is a separate component in Fig. 8."""
    cases = [case for case in cases if case.ok]
    for case in cases:
        yield from in_bytes("memascend-fig11", case, OWNER_METRICS["parameter_pool"], case.owned("parameter_pool"))
    yield from reductions("memascend-fig11", pairs(cases), lambda case: case.owned("parameter_pool"))


def buffers(cases: Iterable[Planned]) -> Iterator[Row]:
    """Yield the number of buffers in MemAscend's pool (IV-B): 2 + 7 N for a dense model with a separate head."""
    for case in (case for case in cases if case.series == MEMASCEND):
        work = case.made.work
        parts = work.streamed()
        count = sum(each.count for each in adaptive_pool_classes(parts.blocks, parts.outside, work.blocks_in_flight))
        formula = "memascend.memory.pools: classes of the adaptive pool"
        yield of_case("memascend-fig11", case, "buffers in the pool", count, "", formula)


def fig13(cases: Iterable[Case]) -> Iterator[Row]:
    """Yield the bytes that the check needs in addition to the gradient buffer, and that buffer."""
    for case in (case for case in cases if case.ok):
        yield from in_bytes("memascend-fig13", case, OWNER_METRICS["overflow_check"], case.check_bytes)
        buffer = case.owned("gradient_flat_buffer")
        yield from in_bytes("memascend-fig13", case, OWNER_METRICS["gradient_flat_buffer"], buffer)


def peaks(exhibit: str, cases: list[Case]) -> Iterator[Row]:
    """Yield Figs. 15 and 21: peaks of four models, reductions and their mean."""
    for case in cases:
        yield from (
            in_bytes(exhibit, case, PEAK, case.peak_bytes) if isinstance(case, Planned) else run_peaks(exhibit, [case])
        )
    yield from reductions(exhibit, pairs(cases), peak)


def run_peaks(exhibit: str, runs: list[Run]) -> Iterator[Row]:
    """Yield the host peak with the values reported next to it, or a text if the run has no peak."""
    for run in runs:
        if not run.ok:
            yield failed(exhibit, run)
            continue
        yield from in_bytes(exhibit, run, PEAK, run.peak_bytes)
        for metric, field in OTHER_METRICS.items():
            rows = list(in_bytes(exhibit, run, metric, run.memory(field)))
            yield from rows if metric == "device-role peak" else rows[:1]  # others do not scale with a twin
        yield of_case(exhibit, run, LEDGER, 100 * run.memory("ledger_explained_share"), "%")


def planned_fig03() -> Iterator[Row]:
    """Yield the live bytes through the steps of the check, for 8B."""
    exhibit = "memascend-fig03"
    for case in pair("llama3.1-8b", C1):
        chain = case.made.work.system == "zero_infinity"
        steps = list(overflow_timeline(case.made.work.spec.parameters, chain=chain))
        flat = steps[0][1]
        for step, live in steps:
            yield of_case(exhibit, case, "live tensors", live / GIB, "GiB", x=("step", step))
        yield of_case(exhibit, case, "gradient flat buffer", flat / GIB, "GiB")
        yield of_case(exhibit, case, "peak during overflow check", max(live for _, live in steps) / GIB, "GiB")
        for step, live in steps:
            if step in ("isinf", "isnan", "fused check"):
                formula = "abs() copy 4 B and mask 1 B an element" if chain else "one pass, no temporaries"
                yield of_case(exhibit, case, "peak relative to tensor", live / flat, "x", formula, x=("step", step))


def measured_fig03(runs: list[Run]) -> Iterator[Row]:
    """Yield memory during the check, from the largest twin."""
    exhibit = "memascend-fig03"
    ok = [r for r in runs if r.ok and r.record["ranks"] == 1 and r.model in tidy.DENSE]
    for run in (r for r in ok if r.series == AS_PUBLISHED and r.model == "Llama3.1-8B"):
        flat = run.owned("gradient_flat_buffer")
        yield from in_bytes(exhibit, run, "gradient flat buffer", flat)
        yield from in_bytes(exhibit, run, "peak during overflow check", flat + run.check_bytes)
    candidates = [before for before, _ in pairs(ok)]
    if candidates:
        chosen = min(candidates, key=lambda r: (r.k, r.model != "Qwen2.5-7B", r.record["seed"]))
        for run in ok:
            if (run.testbed, run.record["seed"]) == (chosen.testbed, chosen.record["seed"]):
                yield from check_timeline(exhibit, run)


def check_timeline(exhibit: str, run: Run) -> Iterator[Row]:
    """Yield memory relative to the flat buffer through the last check, from the ledger's events and from the kernel's
    view."""
    flat = run.owned("gradient_flat_buffer")
    if not flat:
        return
    if run.series == AS_PUBLISHED:
        highest = (flat + run.check_bytes) / flat
        yield of_case(exhibit, run, "peak relative to tensor", highest, "x", x=("step", "isinf"))
    seconds = run.record.get("overflow_check_seconds") or [0.0]
    x = "gradient elements", flat // 4
    yield of_case(exhibit, run, "overflow check latency", 1e3 * median(seconds), "ms", x=x)
    trace = read_trace(run)
    events = last_check(run.record)
    begin, end = (events[0][0], events[-1][0]) if events else without_temporaries(trace, seconds[-1])
    if begin is None:
        return
    live, levels = 0, {-1e-3: 0, **({} if events else {end - begin: 0})}
    for t, delta in events:
        live += delta
        levels[t - begin] = live
    for t, level in levels.items():
        x = "time in ms", f"{1e3 * t:.3f}"
        yield of_case(exhibit, run, "live tensors relative to the flat buffer", 1 + level / flat, "x", x=x)
    yield from resident(exhibit, run, trace, (begin, end), flat)


def resident(exhibit: str, run: Run, trace: pd.DataFrame, span: tuple[float, float], flat: int) -> Iterator[Row]:
    """Yield the sampled resident memory around the check, relative to its level before the check."""
    begin, end = span
    margin = 0.25 * (end - begin) + 0.02
    window = trace[(trace["t_s"] >= begin - margin) & (trace["t_s"] <= end + margin)]
    before = window[window["t_s"] < begin]
    if before.empty:
        return
    level = (before["rss_anon"] + before["rss_file"]).iloc[-1]
    for sample in window.iloc[:: max(1, len(window) // 400)].itertuples():
        relative = 1 + (sample.rss_anon + sample.rss_file - level) / flat
        x = "time in ms", f"{1e3 * (sample.t_s - begin):.3f}"
        yield of_case(exhibit, run, "resident memory relative to the flat buffer", relative, "x", x=x)


def planned_fig08() -> Iterator[Row]:
    """Yield components and totals for Qwen2.5-7B, including today's DeepSpeed (on a GPU machine)."""
    exhibit = "memascend-fig08"
    as_published, ours = pair("qwen2.5-7b", C1)
    for case in (as_published, paper_plan("qwen2.5-7b", "zero_infinity", C1, "today"), ours):
        parts = case.components()
        for metric in FIGURE_8:
            yield of_case(exhibit, case, metric, parts.pop(metric, 0) / GIB, "GiB")
        yield of_case(exhibit, case, OTHER, sum(parts.values()) / GIB, "GiB")
        yield of_case(exhibit, case, PEAK, case.peak_bytes / GIB, "GiB")
    yield from least(exhibit, ours, ours.components())
    percent = 100 * (1 - ours.peak_bytes / as_published.peak_bytes)
    formula = "100 (1 - MemAscend / as published)"
    yield of_case(exhibit, ours, "reduction", percent, "%", formula)


def measured_fig08(runs: list[Run]) -> Iterator[Row]:
    """Yield components and totals of runs, with the share that the ledger explains."""
    exhibit = "memascend-fig08"
    for run in (r for r in runs if r.ok):
        parts = run.components()
        for metric, nbytes in parts.items():
            yield from in_bytes(exhibit, run, metric, nbytes)
        yield from in_bytes(exhibit, run, "not in the ledger", run.peak_bytes - sum(parts.values()))
        yield from in_bytes(exhibit, run, PEAK, run.peak_bytes)
        for metric in ("process baseline", "start-up resident peak", "training resident peak"):
            yield of_case(exhibit, run, metric, run.memory(OTHER_METRICS[metric]) / GIB, "GiB")
        yield of_case(exhibit, run, LEDGER, 100 * run.memory("ledger_explained_share"), "%")
        if run.series == MEMASCEND:
            yield from least(exhibit, run, parts)
    yield from reductions(exhibit, pairs(runs), peak)


def least(exhibit: str, case: Case, parts: dict[str, int]) -> Iterator[Row]:
    """Yield the paper's theoretical minimum: MemAscend's pool and the gradient buffer."""
    needed = {name: parts[name] for name in NEEDED}
    for metric, nbytes in {**needed, PEAK: sum(needed.values())}.items():
        yield from in_bytes(exhibit, case, metric, nbytes, series=tidy.MINIMUM)


def planned_tab02() -> Iterator[Row]:
    """Yield all nine cells, with the whole peak at both ends of the range of batch and context that is assumed.

    A configuration beyond 24 GiB of GPU or 128 GiB of host memory at the lower end is named out of memory.
    """
    for model in TABLE_II:
        for system in ("all_in_gpu", "zero_offload", "zero_infinity"):
            yield from cell_of_tab02(model, system)


def cell_of_tab02(model: str, system: str) -> Iterator[Row]:
    """Yield the rows of one cell; only what lives in the GPU has a peak there."""
    exhibit, case = "memascend-tab02", paper_plan(model, system, C2)
    yield of_case(exhibit, case, PEAK, case.peak_bytes / GIB, "GiB")
    needs = []
    for batch, context in TABLE_II_RANGE:
        work = replace(case.made.work, batch=batch, context=context)
        host, device = plan(work).host_bytes, gpu_memory(work).device_bytes if case.made.device_bytes else 0
        at = f", batch {batch} of {context} tokens"
        yield of_case(exhibit, case, PEAK + at, host / GIB, "GiB")
        if device:
            yield of_case(exhibit, case, DEVICE_PEAK + at, device / GIB, "GiB")
        needs.append((host, device))
    host, device = needs[0]
    outcome = "fits"
    if device > TABLE_II_GPU_GIB * GIB:
        outcome = "VRAM OOM"
    elif host > TABLE_II_RAM_GIB * GIB:
        outcome = "DRAM OOM"
    at = "batch {} of {} tokens".format(*TABLE_II_RANGE[0])
    formula = f"{at}, against {TABLE_II_GPU_GIB} GiB of GPU and {TABLE_II_RAM_GIB} GiB of host memory"
    yield of_case(exhibit, case, "outcome", outcome, "text", formula)

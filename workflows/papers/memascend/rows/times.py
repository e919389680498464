"""Throughput and I/O in the modelled lane: MemAscend Figs. 10, 17, 18 and 20, Tables IV and VI.

Seconds are those of the systems' schedules, simulated on the paper's testbeds (memascend.planner.step_time).
Calibrations and their sources are in memascend.planner.machine.CALIBRATIONS. Two are solved from Fig. 17's printed
throughputs; the sustained rate of configuration 2's SSDs is in calibrations.yaml, solved from a cell of Table VI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from memascend.planner import Workload, model_spec
from memascend.planner.footprint import GIB
from memascend.planner.machine import CALIBRATIONS, Calibrations
from memascend.planner.step import io_volume
from memascend.planner.step_time import StepTime, step_time
from memascend.planner.workload import papers
from memascend.systems import arrangement
from workflows.cases import Row
from workflows.paper_models import assumption, machine
from workflows.papers.memascend.rows import settings

shown = settings.PAPER.shown
BF16 = "MemAscend + bf16 optimizer"
CONFIGURATIONS = {"C1": (settings.C1, settings.GPUS), "C2": (settings.C2, 1)}
# Tables IV and VI: model -> batches of configuration 1, of configuration 2.
CELLS = {
    "llama3.1-8b": {"C1": (8, 80), "C2": (8, 20)},
    "qwen2.5-7b": {"C1": (8, 64), "C2": (8, 20)},
    "qwen2.5-14b": {"C1": (8, 64), "C2": (4, 16)},
    "qwen2.5-32b": {"C1": (8, 48), "C2": (4, 8)},
}
# Exhibits with times, and the testbed of the first of them.
TIMED = {"memascend-fig10": settings.C1, "memascend-fig17": settings.C1, "memascend-fig18": settings.C3}
TIMED |= dict.fromkeys(("memascend-tab04", "memascend-tab06"), settings.C1)
IMPROVEMENT = "throughput improvement"
# Table -> (series, slower arm, faster arm); arms as keyword arguments of Workload.
TABLES = {
    "memascend-tab04": (
        "MemAscend vs ZeRO-Infinity",
        {"system": "zero_infinity", "dtype": "fp16"},
        {"system": "memascend", "dtype": "fp16"},
    ),
    "memascend-tab06": (
        "MemAscend+bf16 vs MemAscend",
        {"system": "memascend", "dtype": "bf16", "states": "fp32"},
        {"system": "memascend", "dtype": "bf16", "states": "bf16"},
    ),
}


def rows() -> Iterator[Row]:
    """Yield the modelled lane of the exhibits on throughput and I/O, with the constants behind them."""
    yield from throughput(
        "memascend-fig10", "qwen2.5-7b", settings.AT_BATCH, settings.batches("qwen2.5-7b"), settings.C1
    )
    for subfigure, model in zip("abcd", settings.DENSE, strict=True):
        yield from throughput(
            "memascend-fig17", model, settings.AT_BATCH, settings.batches(model), settings.C1, subfigure
        )
    yield from throughput(
        "memascend-fig18", settings.MOE, settings.AT_CONTEXT, list(settings.CONTEXTS), settings.C3, "a"
    )
    yield from throughput(
        "memascend-fig18", settings.MOE, settings.AT_BATCH, settings.batches(settings.MOE), settings.C3, "b"
    )
    yield from fig20()
    for exhibit in TABLES:
        yield from improvements(exhibit)
    yield from section_iii_c()
    for exhibit, testbed in TIMED.items():
        yield from (assumption(exhibit, testbed, each) for each in CALIBRATIONS)
    yield from settings.PAPER.assumptions()


@cache
def seconds(
    model: str, testbed: str, ranks: int, batch: int, context: int, *, whole_chain: bool = False, **arm: str
) -> StepTime:
    """Simulate a step; with `whole_chain` the milliseconds of III-C are each rank's, not divided among the ranks."""
    work = Workload(spec=model_spec(model), ranks=ranks, batch=batch, context=context, **arm)
    known = Calibrations()
    if testbed == settings.C2:
        known = replace(known, ssd_efficiency=settings.PAPER.value("configuration_2_ssd_efficiency"))
    if whole_chain:
        known = replace(known, chain_seconds_per_element=ranks * known.chain_seconds_per_element)
    return step_time(papers(work), machine(testbed), calibrations=known)


def throughput(
    exhibit: str, model: str, x_name: str, values: list[int], testbed: str, subfigure: str = ""
) -> Iterator[Row]:
    """Yield tokens per second of both systems on two GPUs, and over batches the exponent of their growth."""
    for system in ("zero_infinity", "memascend"):
        label, found = arrangement(system).label, {}
        for x in values:
            batch, context = (1, x) if x_name == settings.AT_CONTEXT else (x, settings.CONTEXT)
            step = seconds(model, testbed, settings.GPUS, batch, context, system=system)
            source = f"memascend.planner.step_time: {step.seconds:.3g} s per step, mostly {step.bottleneck}"
            cells = {"series": label, "model": model_spec(model).display, "testbed": testbed, "subfigure": subfigure}
            yield shown(exhibit, "throughput", step.tokens_per_second, "tokens/s", source, **cells, x=(x_name, x))
            found[x] = step.tokens_per_second
        if x_name == settings.AT_BATCH:
            exponent = math.log(found[values[-1]] / found[values[0]]) / math.log(values[-1] / values[0])
            source = f"logarithm of the gain over that of the batches, {values[0]} to {values[-1]}"
            cells = {"series": label, "model": model_spec(model).display, "testbed": testbed, "subfigure": subfigure}
            yield shown(exhibit, "growth exponent of throughput", exponent, "", source, **cells)


def fig20() -> Iterator[Row]:
    """Yield the bytes that a step moves, of each model and per parameter, with fp32 and bf16 states."""
    for model in settings.DENSE:
        spec = model_spec(model)
        for series, states in (("MemAscend", "fp32"), (BF16, "bf16")):
            work = Workload(spec=spec, system="memascend", dtype="bf16", states=states, ranks=settings.GPUS)
            volume = io_volume(papers(work)).total_bytes
            cells = {"series": series, "model": spec.display}
            source = f"memascend.planner.step, {states} states"
            yield shown("memascend-fig20", "I/O volume per iteration", volume / GIB, "GiB", source, **cells)
            yield shown("memascend-fig20", "I/O per parameter", volume / spec.parameters, "B", source, **cells)


def improvements(exhibit: str) -> Iterator[Row]:
    """Yield the percentage of additional tokens per second by cell, and the text's statements on all cells."""
    series, slower, faster = TABLES[exhibit]
    source = "memascend.planner.step_time: 100 (slower arm / faster arm - 1)"
    everywhere, shrinking = [], []
    for name, (testbed, ranks) in CONFIGURATIONS.items():
        percents = []
        for model, per_configuration in CELLS.items():
            mine = []
            for batch in per_configuration[name]:
                before, after = (
                    seconds(model, testbed, ranks, batch, settings.CONTEXT, **arm).seconds for arm in (slower, faster)
                )
                mine.append(100 * (before / after - 1))
                cells = {"series": f"{series}, {name}", "model": model_spec(model).display, "testbed": testbed}
                yield shown(exhibit, IMPROVEMENT, mine[-1], "%", source, **cells, x=(settings.AT_BATCH, batch))
            shrinking.append(mine[0] - mine[-1])
            percents += mine
        named = {"smallest": min(percents), "average": sum(percents) / len(percents), "largest": max(percents)}
        for which, value in named.items():
            cells = {"series": f"{series}, {name}", "testbed": testbed}
            yield shown(exhibit, f"{which} improvement", value, "%", source, **cells)
        everywhere += percents
    cells = {"series": series}
    yield shown(exhibit, "smallest improvement", min(everywhere), "%", source + "; configurations 1 and 2", **cells)
    gain = "smallest gain from the smaller batch"
    yield shown(exhibit, gain, min(shrinking), "points", source + "; configurations 1 and 2", **cells)


def section_iii_c() -> Iterator[Row]:
    """Yield III-C's share of the check and Table IV's cells on two GPUs, by both readings of its
    5507 ms (erratum M5)."""
    model, (testbed, ranks) = "llama3.1-8b", CONFIGURATIONS["C1"]
    series, slower, faster = TABLES["memascend-tab04"]
    for whole, ending in ((True, ""), (False, ", check halved")):
        made = seconds(model, testbed, ranks, 8, settings.CONTEXT, whole_chain=whole, **slower)
        check = next(phase.seconds for phase in made.phases if phase.name == "overflow check")
        source = f"memascend.planner.step_time: {check:.4g} of {made.seconds:.4g} s; erratum M5"
        cells = {"series": arrangement("zero_infinity").label, "model": model_spec(model).display, "testbed": testbed}
        share = 100 * check / made.seconds
        yield shown("memascend-fig03", f"share of iteration latency{ending}", share, "%", source, **cells)
    source = "memascend.planner.step_time: 100 (slower arm / faster arm - 1), the check not halved; erratum M5"
    for name, batches_of in CELLS.items():
        for batch in batches_of["C1"]:
            before = seconds(name, testbed, ranks, batch, settings.CONTEXT, whole_chain=True, **slower).seconds
            after = seconds(name, testbed, ranks, batch, settings.CONTEXT, **faster).seconds
            cells = {"series": f"{series}, C1, check not halved", "model": model_spec(name).display}
            cells |= {"testbed": testbed, "x": (settings.AT_BATCH, batch)}
            yield shown("memascend-tab04", IMPROVEMENT, 100 * (before / after - 1), "%", source, **cells)

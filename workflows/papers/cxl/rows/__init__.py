"""The rows of the exhibits of CXL-aware allocation: steps of its schedule on its two testbeds, and Table I's bytes.

Configurations A and B have one card and two cards. Cells that do not fit the GPU or the nodes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import Any

from memascend.baselines.cxl.scenarios import AS_PUBLISHED, AS_TEXT, OURS, SCENARIOS, allocation, checkpoints
from memascend.planner import Workload
from memascend.planner.footprint import GIB
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.step_time import StepTime
from memascend.simulator.trace import Event
from workflows.cases import Row, in_bytes, of_record
from workflows.paper_models import Paper, block_of, machine, spans
from workflows.records import Run

A, B = "cxl-a", "cxl-b"
PAPER = Paper("cxl", testbed=A)
shown = PAPER.shown
MODELS = {"7B": "qwen2.5-7b", "12B": "mistral-nemo-12b"}
SUBFIGURES = {"a": ("7B", 1), "b": ("7B", 2), "c": ("12B", 1), "d": ("12B", 2)}
DRAM, NAIVE, AWARE, DEFAULT = "DRAM only", "naive CXL", "CXL-aware", "CXL-aware (our default)"
ARMS = {DRAM: "baseline", NAIVE: "naive", AWARE: "as_published", DEFAULT: "cxl_aware"}
CONTEXTS, BATCHES = (4096, 8192, 16384, 32768), (1, 2, 4, 8, 16, 32)
DRAM_GIB = 512e9 / GIB  # DRAM of the baseline (Table II)
DRAM_HERE = "local DRAM"
# Methods of memascend bench adamw; the first is the paper's.
ADAMS = {"deepspeed": DRAM_HERE, "fp32": f"{DRAM_HERE}, our AdamW"}
RELATIVE = "throughput relative to DRAM only"


def modelled() -> Iterator[Row]:
    """Yield the modelled lane of all exhibits."""
    yield from relative()
    yield from phases()
    yield from memory()
    yield from adam_by_elements()
    yield from copies()
    yield from profile()
    yield from four_blocks()
    yield from scenarios()
    yield from PAPER.assumptions()


def measured(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield DRAM's curves of Figs. 4 and 5, and Fig. 2 on a twin: the system memory of ZeRO-Offload by context."""
    for record in (r for r in records if r["status"] == "ok"):
        bench = record.get("benchmark")
        for point in record["points"] if bench in ("adamw", "latency") else ():
            seconds = median(point["seconds"])
            if bench == "latency" and not point["memory_only"]:
                at = {"series": DRAM_HERE, "x": ("memory walked through (KiB)", point["bytes"] >> 10)}
                yield of_record(record, "cxl-fig04", "access latency", 1e9 * seconds, "ns", **at)
            if bench == "adamw" and point["method"] in ADAMS:
                at = {"series": ADAMS[point["method"]], "x": ("elements", point["numel"])}
                yield of_record(record, "cxl-fig05", "optimizer time", 1e3 * seconds, "ms", **at)
        if (record["kind"], record.get("model")) == ("training", MODELS["12B"]):
            run = Run(record, record["_path"])
            for point in record["points"] if run.ok else ():
                at = {"series": "12B", "model": "12B", "x": ("context (tokens)", point["sequence"] * run.k)}
                yield from in_bytes("cxl-fig02", run, "system memory", point["memory"]["host_peak_net_bytes"], **at)


@cache
def step(series: str, model: str, testbed: str, gpus: int, context: int, batch: int) -> StepTime:
    """Simulate a step; DRAM only is the same on both testbeds."""
    blocks = PAPER.spec(MODELS[model]).layers
    own = PAPER.value("runtime_seconds_a_block") * blocks / 4
    costs = PAPER.costs(own_s={"forward": own, "backward": 3 * own})
    cell = {"ranks": gpus, "context": context, "batch": batch}
    return PAPER.step("cxl", ARMS[series], MODELS[model], machine(A if series == DRAM else testbed), costs, **cell)


def fits(model: str, gpus: int, context: int, batch: int) -> bool:
    """Return whether a cell fits the GPU and the DRAM of the baseline, to which the percentages refer."""
    spec = PAPER.spec(MODELS[model])
    work = Workload(spec=spec, system="cxl", arm="baseline", dtype="bf16", ranks=gpus, context=context, batch=batch)
    return gpu_memory(work).device_bytes <= 80 * GIB and table_one(model, gpus, context, batch) <= DRAM_GIB


def table_one(model: str, gpus: int, context: int, batch: int) -> float:
    """Return GiB of 20 bytes per parameter and the activation checkpoints (Table I)."""
    spec = PAPER.spec(MODELS[model])
    return (20 * spec.parameters + gpus * checkpoints(batch, context, spec.layers, spec.hidden)) / GIB


def relative() -> Iterator[Row]:
    """Yield Figs. 13 and 14: every cell, the range of each series over the cells, and the largest gain of any cell."""
    source = "memascend.planner.step_time: tokens per second over those of DRAM alone"
    for exhibit, testbed in (("cxl-fig13", A), ("cxl-fig14", B)):
        for subfigure, (model, gpus) in SUBFIGURES.items():
            grid = [(c, b) for c in CONTEXTS for b in BATCHES if fits(model, gpus, c, b)]
            of = f"over {len(grid)} cells of 4K to 32K and 1 to 32 sequences"
            percents: dict[str, list[float]] = {}
            for series in (NAIVE, AWARE):
                cells = {"series": series, "model": model, "testbed": testbed, "subfigure": subfigure}
                found = percents.setdefault(series, [])
                for context, batch in grid:
                    at = (model, testbed, gpus, context, batch)
                    found.append(100 * step(DRAM, *at).seconds / step(series, *at).seconds)
                    x = f"batch at context {context // 1024}K", batch
                    yield shown(exhibit, RELATIVE, found[-1], "%", source, **cells, x=x)
                for end, value, drop in (("low", min(found), max(found)), ("high", max(found), min(found))):
                    yield shown(exhibit, f"{RELATIVE}, {end}", value, "%", of, **cells)
                    yield shown(exhibit, f"drop against DRAM only, {end}", 100 - drop, "%", of, **cells)
            gain = max(aware - naive for naive, aware in zip(percents[NAIVE], percents[AWARE], strict=True))
            yield shown(exhibit, "improvement over naive, up to", gain, "%", f"points, {of}", **cells)


CONFIGURATIONS = {
    DRAM: (DRAM, A),
    **{f"{series} ({n} AIC)": (series, bed) for n, bed in ((1, A), (2, B)) for series in (NAIVE, AWARE)},
    **{f"CXL-aware ({n} AIC), our default": (DEFAULT, bed) for n, bed in ((1, A), (2, B))},
}
NAMES = {"forward": "FWD", "backward": "BWD", "optimizer": "STEP"}


def phases() -> Iterator[Row]:
    """Yield Fig. 15, at context 32K and batch 4."""
    for subfigure, (model, gpus) in SUBFIGURES.items():
        for name, (series, testbed) in CONFIGURATIONS.items():
            made = step(series, model, testbed, gpus, 32768, 4)
            cells = {"series": name, "model": model, "testbed": testbed, "subfigure": subfigure}
            for phase in made.phases:
                source, x = f"memascend.planner.step_time, mostly {phase.bottleneck}", ("phase", NAMES[phase.name])
                yield shown("cxl-fig15", "latency", phase.seconds, "s", source, **cells, x=x)
            whole = 100 * (made.seconds / step(DRAM, model, A, gpus, 32768, 4).seconds - 1)
            yield shown("cxl-fig15", "total latency increase", whole, "%", "over DRAM only", **cells)


def profile() -> Iterator[Row]:
    """Yield Fig. 7, whose workload the paper does not state: 12B on one GPU, context 4K, at two batches."""
    for batch in (1, 8):
        for name in (DRAM, f"{NAIVE} (1 AIC)", f"{NAIVE} (2 AIC)"):
            series, testbed = CONFIGURATIONS[name]
            made = step(series, "12B", testbed, 1, 4096, batch)
            cells = {"series": name, "model": "12B", "testbed": testbed, "subfigure": f"batch {batch}"}
            source = "memascend.planner.step_time; context 4K and the batch are assumed"
            for phase in made.phases:
                x = "phase", NAMES[phase.name]
                yield shown("cxl-fig07", "latency", phase.seconds, "s", source, **cells, x=x)


def memory() -> Iterator[Row]:
    """Yield Figs. 2 and 3: Table I's bytes for 12B on two GPUs, and throughput with DRAM only."""
    source, cells = "Table I: 20 bytes per parameter and the activation checkpoints", {"series": "12B", "model": "12B"}
    for context in (512, 2048, 4096, 8192, 16384, 24576, 32768):
        size, x = table_one("12B", 2, context, 5), ("context (tokens)", context)
        yield shown("cxl-fig02", "system memory", size, "GiB", source, **cells, x=x)
    for batch in (1, 2, 4, 8, 16, 24, 32, 48):
        size, x = table_one("12B", 2, 4096, batch), ("batch", batch)
        yield shown("cxl-fig03", "system memory", size, "GiB", source, **cells, x=x)
        rate = step(DRAM, "12B", A, 2, 4096, batch).tokens_per_second
        yield shown("cxl-fig03", "throughput", rate, "tokens/s", "memascend.planner.step_time", **cells, x=x)


def adam_by_elements() -> Iterator[Row]:
    """Yield Fig. 5: 28 bytes per element from DRAM or from one card; processor caches are not modelled."""
    shares = (PAPER.value(f"adam_{what}_efficiency") for what in ("memory", "card"))
    reached = {node: rate * share for (node, rate), share in zip(node_rates().items(), shares, strict=True)}
    for elements in (10**6, 10**7, 2 * 10**7, 5 * 10**7, 10**8, 10**9, 10**10):
        for series, rate in reached.items():
            cells = {"series": series, "x": ("elements", elements)}
            source = f"28 bytes per element at {rate / 1e9:.1f} GB/s, the rate that STEP reaches in Fig. 15(a)"
            yield shown("cxl-fig05", "optimizer time", 1e3 * 28 * elements / rate, "ms", source, **cells)
    ratio, cells = reached["local DRAM"] / reached["CXL"], {"series": "CXL", "x": ("elements", "> 20M")}
    yield shown("cxl-fig05", "optimizer time relative to DRAM", ratio, "x", "ratio of the two rates", **cells)


def node_rates() -> dict[str, float]:
    """Return bytes per second of the two kinds of memory."""
    dram, card = (node["gb_per_s"]["value"] * 1e9 for node in machine(A).described["memory_nodes"])
    return {"local DRAM": dram, "CXL": card}


def copies() -> Iterator[Row]:
    """Yield Fig. 6: the slower of the GPU's link and the data's memory, which is shared by the GPUs
    that copy at once."""
    link, start = machine(A).pcie_bytes_per_s, PAPER.value("copy_start_seconds")
    for gpus in (1, 2):
        for series, rate in node_rates().items():
            name = series if gpus == 1 else f"{series}, two GPUs at once"
            for size in (2**e for e in range(16, 31, 2)):
                cells = {"series": name, "x": ("transfer size (bytes)", size)}
                value = size / (start + size / min(link, rate / gpus)) / 1e9
                source = "size / (start + size / slowest link); every link at its data sheet's rate"
                yield shown("cxl-fig06", "copy bandwidth", value, "GB/s", source, **cells)


LINES = {"pcie0.down": "PCIe to the GPU", "gpu0": "GPU", "pcie0.up": "PCIe to the CPU", "cpu": "CPU", "dram": "CPU"}


def four_blocks() -> Iterator[Row]:
    """Yield Fig. 1: four blocks of the 12B model at 32K and batch 1 with DRAM only, a bar per block and resource."""
    made = PAPER.step("cxl", "baseline", "four blocks", machine(A), PAPER.costs(), context=32768, batch=1)

    def named(event: Event) -> tuple[str, str] | None:
        if event.phase == "optimizer":
            return LINES[event.resource], "Adam"
        block = block_of(event)
        if event.resource == "dram" or not block:
            return None
        return LINES[event.resource], f"{event.phase[0].upper()}{block}"

    yield from PAPER.bars("cxl-fig01", spans(made.simulated.events, named), model="four blocks of 12B")


def scenarios() -> Iterator[Row]:
    """Yield Figs. 10 to 12: the bytes on each node by Algorithm 1 as printed, by the text's description, and by our
    default."""
    for each in SCENARIOS:
        testbed = A if len(each.capacities) == 2 else B
        nodes = ["DRAM", *(f"card {number}" for number in range(len(each.capacities) - 1))]
        for algorithm in (AS_PUBLISHED, AS_TEXT, OURS):
            cells: dict[str, Any] = {"testbed": testbed, "subfigure": algorithm, "model": each.name}
            placed = allocation(each, algorithm)
            for item, shares in placed.items():
                for node, nbytes in shares.items():
                    source = f"memascend.baselines.cxl.scenarios: {algorithm}"
                    yield shown(each.exhibit, item, nbytes / GIB, "GiB", source, series=nodes[node], **cells)
            for node, capacity in enumerate(each.capacities):
                given = sum(shares.get(node, 0) for shares in placed.values()) / GIB
                for metric, value in (("given", given), ("room", capacity / GIB)):
                    yield shown(each.exhibit, metric, value, "GiB", "sums and rooms", series=nodes[node], **cells)

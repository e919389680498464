"""The rows of SSDTrain's exhibits: its schedule on its two GPUs, and the projections of III-D.

The two GPUs share each block (tensor parallelism; each has the inputs and masks of norms completely), so one rank of
twice the rates represents both: seconds are those of the pair, bytes and operations are halved for one GPU. A number
printed in GB or TB has a row in that unit, and one in GiB or TiB, which may be meant (erratum S4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

from memascend.baselines.ssdtrain.projections import TABLE_III, fig_5, scaled, table_iii
from memascend.baselines.ssdtrain.schedule import KEEP, OFFLOAD, SAVED, backward, forward, regions_of
from memascend.planner import Workload
from memascend.planner.footprint import GIB
from memascend.planner.machine import MachineSpec
from memascend.planner.options import Stack
from memascend.planner.pieces import forward_flops
from memascend.planner.step import Step, step_of
from memascend.planner.step_time import StepTime, resources_for, step_time
from memascend.simulator import simulate
from memascend.simulator.trace import Event
from workflows import registry
from workflows.cases import Row, row
from workflows.paper_models import Paper, block_of, machine, spans
from workflows.papers.ssdtrain.rows import twins
from workflows.trends import growth

TESTBED = "ssdtrain"
PAPER = Paper("ssdtrain", testbed=TESTBED)
shown = PAPER.shown
GPUS, CONTEXT, BATCH = 2, 1024, 16
CASES = {f"H{hidden} L{layers}": (hidden, layers) for hidden, layers in TABLE_III}
CHECKPOINTING = {"keep": "none", "recompute": "plain"}
ARMS = {
    "No offloading": "keep",
    "Recompute all": "recompute",
    "SSDTrain": "as_published",
    "SSDTrain, 10 GB/s": "as_published",
}
PEAK, THROUGHPUT = "activation peak", "model throughput"
SIMULATED = "memascend.planner.step_time: schedule of baselines/ssdtrain, a rank for both GPUs"


def modelled() -> Iterator[Row]:
    """Yield the modelled lane of all exhibits."""
    yield from two_micro_batches()
    yield from projected()
    yield from with_and_without()
    for subfigure, model in (("a", "H12288 L3"), ("b", "H14336 L3")):
        yield from rok(f"ssdtrain-fig07{subfigure}", model)
    yield from by_sequence()
    yield from scaled_up()
    yield from table_3()
    yield from growth("ssdtrain-fig01", 2024.0)
    yield from exponent()
    yield from todays_tools()
    yield from PAPER.assumptions()


def measured(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the measured lane, from benchmarks of activations."""
    benches = [r for r in records if (r["kind"], r["status"], r.get("benchmark")) == ("bench", "ok", "activations")]
    yield from twins.rows(benches)


def pair(write_gb_per_s: float | None = None) -> MachineSpec:
    """Return both GPUs as one with twice the rates.

    `write_gb_per_s` is the write rate of each GPU's array in place of that of the data sheets.
    """
    one = machine(TESTBED)
    write = one.ssd_write_bytes_per_s if write_gb_per_s is None else 1e9 * write_gb_per_s
    names = ("gpu_flops_per_s", "pcie_bytes_per_s", "ssd_read_bytes_per_s")
    twice = {name: GPUS * getattr(one, name) for name in names}
    return replace(one, gpus=1, ssd_write_bytes_per_s=GPUS * write, **twice)


def work(series: str, model: str, batch: int) -> Workload:
    """Return the workload of a series."""
    arm = ARMS[series]
    stack = Stack(loss="plain", checkpointing=CHECKPOINTING.get(arm, "ssd"), megatron_gpus=GPUS)
    size = {"batch": batch, "context": CONTEXT, "dtype": "fp16", "stack": stack}
    return Workload(spec=PAPER.spec(model), system="ssdtrain", arm=arm, **size)


def where(series: str) -> MachineSpec:
    """Return the machine of a series: both GPUs as one, with slower SSDs if its name says so."""
    return pair(PAPER.value("slow_ssd_write_gb_per_s") if series.endswith("10 GB/s") else None)


@cache
def step(series: str, model: str, batch: int = BATCH) -> StepTime:
    """Simulate a step without its update."""
    return step_time(work(series, model, batch), where(series), calibrations=PAPER.costs())


def peak(series: str, model: str, batch: int = BATCH) -> float:
    """Return the activation peak of one GPU in GiB."""
    return step(series, model, batch).simulated.peak(SAVED) / GPUS / GIB


def update_s(model: str) -> float:
    """Return the seconds of a GPU's update, from its bytes and the bandwidth of GPU memory."""
    nbytes = PAPER.value("update_bytes_per_parameter") * PAPER.spec(model).parameters / GPUS
    return nbytes / (PAPER.value("gpu_memory_gb_per_s") * 1e9)


def with_and_without() -> Iterator[Row]:
    """Yield Fig. 6."""
    exhibit, base = "ssdtrain-fig06", "No offloading"
    percents: dict[str, list[float]] = {}
    for model in CASES:
        for series in (base, "SSDTrain", "SSDTrain, 10 GB/s"):
            cells = {"series": series, "model": model, "x": ("batch", BATCH)}
            yield shown(exhibit, "step time", step(series, model).seconds, "s", SIMULATED, **cells)
            yield shown(exhibit, PEAK, peak(series, model), "GiB", SIMULATED, **cells)
            if series != base:
                less = 100 * (1 - peak(series, model) / peak(base, model))
                longer = 100 * (step(series, model).seconds / step(base, model).seconds - 1)
                percents.setdefault(series, []).append(less)
                yield shown(exhibit, "activation peak reduction", less, "%", SIMULATED, **cells)
                yield shown(exhibit, "step time overhead", longer, "%", SIMULATED, **cells)
    for series, found in percents.items():
        for end, value in (("min", min(found)), ("max", max(found))):
            metric = f"activation_peak_reduction_{end}"
            yield shown(exhibit, metric, value, "%", "over three shapes of BERT", series=series)


BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)


def rok(exhibit: str, model: str) -> Iterator[Row]:
    """Yield Fig. 7: peak and throughput of each strategy by batch; operations are counted without recomputation."""
    spec, source = PAPER.spec(model), f"{SIMULATED}, and the weight update"
    for series in ARMS:
        for batch in BATCHES:
            seconds = step(series, model, batch).seconds + update_s(model)
            tera = 3 * forward_flops(spec, batch, CONTEXT) / GPUS / seconds / 1e12
            at = peak(series, model, batch)
            cells, x = {"series": series, "model": model, "subfigure": exhibit[-1]}, ("activation peak (GiB)", at)
            yield shown(exhibit, THROUGHPUT, tera, "TFLOPS", f"{source}; batch {batch}", **cells, x=x)
            yield shown(exhibit, PEAK, at, "GiB", SIMULATED, **cells, x=("batch", batch))
    kept_peak = peak("No offloading", model, 8)
    for series in ("SSDTrain", "SSDTrain, 10 GB/s"):
        most = max(batch for batch in range(8, 65) if peak(series, model, batch) <= kept_peak)
        cells = {"series": f"{series} vs keep", "model": model, "subfigure": exhibit[-1]}
        yield shown(exhibit, "batch_size_gain", most / 8, "x", "largest batch in the peak of keeping 8", **cells)
    for other, metric in (("No offloading", "throughput over keeping"), ("Recompute all", "peak over recomputing")):
        for series in ("SSDTrain", "SSDTrain, 10 GB/s"):
            ratio = step(other, model).seconds / step(series, model).seconds
            ratio = ratio if "throughput" in metric else peak(series, model) / peak(other, model)
            cells = {"series": series, "model": model, "subfigure": exhibit[-1], "x": ("at batch", 16)}
            yield shown(exhibit, metric, ratio, "x", SIMULATED, **cells)


def by_sequence() -> Iterator[Row]:
    """Yield Fig. 8a: seconds per sequence without offloading. The sequences of a batch share only the update."""
    model, exhibit = "H12288 L3", "ssdtrain-fig08a"
    parts = {
        b: {"forward and backward": step("No offloading", model, b).seconds, "weights update": update_s(model)}
        for b in BATCHES
    }
    for batch, both in parts.items():
        cells = {"series": "No offloading", "model": f"batch {batch}"}
        for metric, seconds in both.items():
            yield shown(exhibit, metric, 1e3 * seconds / batch, "ms a sequence", SIMULATED, **cells)
        gain = 100 * (sum(parts[1].values()) / (sum(both.values()) / batch) - 1)
        yield shown(exhibit, "throughput improvement over batch 1", gain, "%", SIMULATED, **cells)
    first, last = (parts[batch] for batch in (1, BATCHES[-1]))
    less = {name: first[name] - last[name] / BATCHES[-1] for name in first}
    share = 100 * less["weights update"] / sum(less.values())
    cells = {"series": "No offloading", "model": f"batch {BATCHES[-1]}"}
    yield shown(exhibit, "share of the gain that is the update's", share, "%", SIMULATED, **cells)
    batches, stages = 32 / 4, PAPER.value("bloom_pipeline_stages")  # 32 samples per rank, four per micro-batch
    bubble, source = 100 * (stages - 1) / (batches + stages - 1), "stages - 1 of as many turns and the micro-batches"
    yield shown(exhibit, "ideal pipeline bubble", bubble, "%", source, series="BLOOM", model="micro-batch of 4")


def exponent() -> Iterator[Row]:
    """Yield II-B's exponent of C: activations are N / h times a batch's tokens, N and the tokens are C^(1/2), h is
    N^(1/3)."""
    parameters = tokens = Fraction(1, 2)
    value = float(parameters * (1 - Fraction(1, 3)) + tokens)
    source = "N / h * tokens, with the powers of C of section II-B"
    yield shown("ssdtrain-fig01", "exponent of activations", value, "", source, series="S_activations")


SOURCE = "memascend.planner.endurance, as the authors' fork of llm-analysis (44495f6)"


def projected() -> Iterator[Row]:
    """Yield Fig. 5, and the ranges that the text gives."""
    exhibit, found = "ssdtrain-fig05", []
    for case, made, years in fig_5():
        model, x = f"{case.framework} {case.size} ({case.gpus})", ("GPUs", case.gpus)
        cells = {"series": case.framework, "model": model, "x": x}
        values = {"lifespan": (years, "years"), "write bandwidth": (made.write_bytes_per_s / 1e9, "GB/s")}
        values["activations a step"] = (case.sequences * made.activation_bytes / 1e12, "TB")
        values["sequences a step"] = (case.sequences, "sequences")
        found.append({metric: value for metric, (value, _) in values.items()})
        for metric, (value, unit) in values.items():
            yield shown(exhibit, metric, value, unit, SOURCE, **cells)
    ends = {("all cases", "lifespan_min"): (min, "lifespan", "years")}
    ends["all cases", "write_bandwidth_max"] = (max, "write bandwidth", "GB/s")
    ends["max activations per GPU", "min"] = (min, "activations a step", "TB")
    ends["max activations per GPU", "max"] = (max, "activations a step", "TB")
    ends["micro-batch size", "min"] = (min, "sequences a step", "sequences")
    ends["micro-batch size", "max"] = (max, "sequences a step", "sequences")
    for (series, metric), (end, of, unit) in ends.items():
        yield shown(exhibit, metric, end(each[of] for each in found), unit, f"{SOURCE}: over 12 cases", series=series)
    source = f"{SOURCE}: over 12 cases"
    most, cells = max(each["activations a step"] for each in found), {"series": "max activations per GPU"}
    yield shown(exhibit, "max (TiB)", most * 1e12 / 2**40, "TiB", source, **cells)
    rate = max(each["write bandwidth"] for each in found) * 1e9 / GIB
    yield shown(exhibit, "write_bandwidth_max (GiB)", rate, "GiB/s", source, series="all cases")
    # Four series of three systems: each case is compared with the next larger system, and 175B with 530B.
    pairs = [(number, number + 1) for number in range(11) if number % 3 != 2]
    pairs += [(number, number + 3) for number in (0, 1, 2, 6, 7, 8)]
    for metric, end in (("write bandwidth", max), ("lifespan", min)):
        worst = end(found[larger][metric] / found[smaller][metric] for smaller, larger in pairs)
        of = "largest of 14 pairs" if end is max else "least of 14 pairs"
        yield shown(exhibit, f"{metric} of a larger system or model", worst, "x", f"{SOURCE}: {of}", series="all cases")


def scaled_up() -> Iterator[Row]:
    """Yield Fig. 8b: write bandwidth per GPU for tensor x pipeline GPUs, fewer than 100."""
    exhibit, worst = "ssdtrain-fig08b", 0.0
    for model, key in CASES.items():
        base = scaled(*key).write_bytes_per_s
        for tensor, pipeline in ((2, 1), (2, 2), (2, 4), (4, 1), (8, 1), (8, 4), (8, 12)):
            rate = scaled(*key, tensor=tensor, pipeline=pipeline).write_bytes_per_s
            worst = max(worst, rate / base if (tensor, pipeline) != (2, 1) else 0.0)
            cells = {"series": model, "x": ("GPUs", f"TP {tensor} PP {pipeline}"), "subfigure": "b"}
            yield shown(exhibit, "write bandwidth", rate / 1e9, "GB/s", SOURCE, **cells)
    cells = {"series": "projection", "subfigure": "b"}
    yield shown(exhibit, "largest share of the two GPUs' bandwidth", 100 * worst, "%", SOURCE, **cells)


def table_3() -> Iterator[Row]:
    """Yield Table III: the bytes that the schedule stores, the estimate, and the required write bandwidth."""
    exhibit, estimates = "ssdtrain-tab03", table_iii()
    for model, key in CASES.items():
        made = estimates[key]
        cells = {"model": model, "x": ("batch_size", BATCH)}
        written = step_of(work("SSDTrain", model, BATCH), where("SSDTrain"), PAPER.costs()).volume().activation_bytes
        source = "what the schedule of baselines/ssdtrain stores: every block"
        for ending, one, unit in (("", 1e9, "GB"), (" (GiB)", GIB, "GiB")):
            stored, size, rate = written / GPUS / one, made.activation_bytes / one, made.write_bytes_per_s / one
            yield shown(exhibit, f"offloaded_amount{ending}", stored, unit, source, **cells, series="SSDTrain")
            yield shown(exhibit, f"model_estimate{ending}", size, unit, SOURCE, **cells, series="llm-analysis model")
            yield shown(exhibit, f"pcie_write_bandwidth{ending}", rate, f"{unit}/s", SOURCE, **cells, series="required")


def todays_tools() -> Iterator[Row]:
    """Yield Table I's features for current tools, each from the tool's own pages."""
    for series, said in registry.read(registry.file_of("ssdtrain", "tools.yaml")).items():
        for feature, words in said.items():
            if feature != "source":
                cells = {"series": series, "testbed": "each tool's own pages"}
                yield row("ssdtrain-tab01", feature, words, "text", "author", said["source"], **cells)


LINES = {"gpu0": "GPU", "ssd.write": "store", "ssd.read": "load"}


def two_micro_batches() -> Iterator[Row]:
    """Yield Fig. 2: both forward passes, then both backward passes in reverse; only the end of the second is kept."""
    made = Step(work("SSDTrain", "H12288 L3", 8), pair(), PAPER.costs())
    plans = [[replace(r, forwarded=False) for r in regions_of(made, [OFFLOAD] * 2 + [end])] for end in (OFFLOAD, KEEP)]
    done = ""
    for batch in (0, 1):
        done = forward(made, plans[batch], batch=batch, after=done)
    for batch in (1, 0):
        done = backward(made, plans[batch], batch=batch, after=done)

    def named(event: Event) -> tuple[str, str] | None:
        kind, _, rest = event.name.partition(" ")
        block = block_of(event)
        if event.resource not in LINES or not block:
            return None
        letter = {"forward": "F", "backward": "B"}.get(kind, "")
        return LINES[event.resource], f"{letter}L{block} of {int(rest[0]) + 1}"

    found = spans(simulate(made.tasks, resources_for(made)).events, named)
    yield from PAPER.bars("ssdtrain-fig02", found, "memascend.simulator: batch 8 a micro-batch", model="H12288 L3")

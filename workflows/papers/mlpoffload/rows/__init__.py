"""The rows of MLP-Offload's exhibits: steps of its schedule on its two testbeds.

There are two sets of inputs. *The authors' runs*: the parameters, the 2:1 split and the sub-groups in host memory of
their logs (calibrations.yaml). *Paper alone*: the shapes of Table 2 with plain feed-forwards, Eq. 1, and as many
sub-groups in host memory as the plan allows within the memory that 4.1 says is used. Results of the second are held
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

from memascend.baselines.mlp_offload.schedule import paths_of, schedule
from memascend.baselines.mlp_offload.system import SYSTEM
from memascend.planner import Workload
from memascend.planner.derived_sizes import STATES, cached_sub_group_buffers
from memascend.planner.footprint import plan
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.machine import MachineSpec
from memascend.planner.options import Stack
from memascend.planner.step import Step
from memascend.planner.step_time import StepTime, resources_for, step_time
from memascend.planner.workload import ELEMENT_BYTES, SwapSizes
from memascend.simulator import simulate
from memascend.simulator.trace import Event
from memascend.storage.placement import Rates, counts, weights
from workflows.cases import Row, of_record
from workflows.paper_models import ONE_STEP, Paper, machine, spans
from workflows.papers.mlpoffload.rows import twins
from workflows.papers.mlpoffload.rows.arms import BARS, MOVED, OURS, RATIOS, ZERO
from workflows.trends import growth

ONE, TWO = "mlpoffload-testbed1", "mlpoffload-testbed2"
PAPER = Paper("mlpoffload", testbed=ONE)
MODELS = ("40B", "52B", "70B", "100B", "120B")
ALONE = ", paper alone"
SERIES = (ZERO, OURS, ZERO + ALONE, OURS + ALONE)
NAMES = {"forward": "forward", "backward": "backward", "optimizer": "update"}
SOURCE = "memascend.planner.step_time: schedule of baselines/mlp_offload"
SUB_GROUP, LEAST_CACHED = 100_000_000, 3  # 4.1
GPU_BYTES = 80e9  # Table 1


def modelled() -> Iterator[Row]:
    """Yield the modelled lane of all exhibits."""
    yield from growth("mlpoffload-fig01", 2025.0)
    yield from shares_of_io()
    yield from raw_bandwidth()
    yield from by_sub_group()
    yield from four_sub_groups()
    yield from iterations()
    yield from placement()
    yield from weak_scaling()
    yield from accumulation()
    yield from ablations()
    yield from equation_1()
    yield from PAPER.assumptions()


def measured(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the measured lane, from step times over paths and from benchmarks of single paths."""
    mine = [r for r in records if (r.get("lane"), r.get("status")) == ("measured", "ok")]
    over_paths = [r for r in mine if r["kind"] == "step-times" and "duplex" in r]
    yield from twins.rows(over_paths)
    yield from twins.of_originals(over_paths, originals())
    yield from raw_rates([r for r in mine if r["kind"] == "bench" and r.get("apart")])


def originals() -> Iterator[twins.Original]:
    """Yield the models on Testbed-1, with the authors' inputs and from the paper alone."""
    paths = machine(ONE).described["paths"]
    rates = tuple((path["read_gb_per_s"]["value"], path["write_gb_per_s"]["value"]) for path in paths)
    for model in MODELS:
        for ending, cached, name in (("", cached_by, model), (ALONE, cached_alone, f"{model} as printed")):
            count, made_step = len(work("zero3", name, cached=LEAST_CACHED).sub_groups()), made(ZERO + ending, model)
            drive = made_step.of_resource(paths[0]["name"]) / made_step.seconds
            yield twins.Original(model, ending, cached(name) / count, drive, rates)


def raw_rates(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield Fig. 4 measured: this machine's drive, or its rate-limited path, read and written by one and more
    processes."""
    for record in records:
        for row in record["apart"]:
            name = f"NVMe {row['direction']}"
            cells = {"series": name, "subfigure": "here", "x": ("processes", row["processes"])}
            rate, latency = median(row["bytes_per_second"]) / 1e9, median(row["latency_s"])
            yield of_record(record, "mlpoffload-fig04", "bandwidth of all", rate, "GB/s", **cells)
            yield of_record(record, "mlpoffload-fig04", "latency of one", latency, "s", **cells)


def shown(exhibit: str, metric: str, value: float, unit: str, source: str = SOURCE, **cells: Any) -> Row:
    """Return a row of the modelled lane."""
    return PAPER.shown(exhibit, metric, value, unit, source, **cells)


def work(arm: str, model: str, *, cached: int, ranks: int = 4, **more: Any) -> Workload:
    """Return the workload of an arm whose ranks have `cached` sub-groups each in host memory."""
    buffers = cached_sub_group_buffers(SYSTEM.arms[arm].swaps_gradients, cached)
    sizes = SwapSizes(sub_group_size=SUB_GROUP, optimizer_buffers=buffers, bounce_buffers=False)
    size = {"batch": 1, "context": 2048, "dtype": "bf16", "stack": Stack(checkpointing="plain")} | more
    return Workload(spec=PAPER.spec(model), system="mlp_offload", arm=arm, ranks=ranks, sizes=sizes, **size)


@cache
def cached_by(model: str) -> int:
    """Return a rank's sub-groups in host memory by their share, since DeepSpeed's logs count fewer,
    larger sub-groups."""
    return round(PAPER.value(f"held_share_{model}") * len(work("zero3", model, cached=LEAST_CACHED).sub_groups()))


@cache
def cached_alone(model: str) -> int:
    """Return a rank's sub-groups in host memory from the paper alone.

    This is the memory that is used (4.1) less ZeRO-3's structures (4.3, as planned), but at least three, the smallest
    number in 4.1.
    """
    mine = work("zero3", model, cached=LEAST_CACHED)
    numels = list(map(sum, mine.sub_groups()))
    one = STATES * ELEMENT_BYTES["fp32"] * mine.ranks * sum(numels) / len(numels)
    left = PAPER.value("host_memory_used") * machine(ONE).ram_bytes - runtime_bytes(mine)
    return max(LEAST_CACHED, min(len(numels), int(left // one)))


def runtime_bytes(mine: Workload) -> int:
    """Return the planned bytes of host memory without the buffers that sub-groups are swapped through."""
    host = plan(mine)
    return host.host_bytes - host.requested_bytes("optimizer_buffers")


@cache
def step(arm: str, model: str, cached: int, batch: int = 1, batches: int = 1) -> StepTime:
    """Simulate a step on Testbed-1."""
    mine = work(arm, model, cached=cached, batch=batch, accumulation=batches)
    return step_time(mine, machine(ONE), calibrations=PAPER.costs())


def made(series: str, model: str, **more: int) -> StepTime:
    """Simulate a step of a series, with the authors' inputs or from the paper alone."""
    if series.endswith(ALONE):
        arm = "zero3" if series.startswith(ZERO) else "as_published"
        return step(arm, f"{model} as printed", cached_alone(f"{model} as printed"), **more)
    return step("zero3" if series == ZERO else "by_hand", model, cached_by(model), **more)


def parameters(series: str, model: str) -> int:
    """Return the number of parameters of a model as the series has it."""
    return PAPER.spec(f"{model} as printed" if series.endswith(ALONE) else model).parameters


def phase(step: StepTime, name: str) -> float:
    """Return the seconds of a phase; transfers from the GPU during the update count as the update's."""
    return next(each.seconds for each in step.phases if each.name == name)


def iterations() -> Iterator[Row]:
    """Yield Figs. 7 to 9."""
    ratios: dict[tuple[str, str], list[float]] = {}
    rates: dict[str, list[float]] = {series: [] for series in SERIES}
    took: dict[str, dict[str, float]] = {series: {} for series in SERIES}
    for model in MODELS:
        for series in SERIES:
            simulated, cells = made(series, model), {"series": series, "model": model}
            for name, said in NAMES.items():
                yield shown("mlpoffload-fig07", "time", phase(simulated, name), "s", **cells, x=("phase", said))
            took[series][model] = simulated.seconds
            yield shown("mlpoffload-fig07", "iteration_time", simulated.seconds, "s", **cells)
            seconds, count = phase(simulated, "optimizer"), parameters(series, model)
            rates[series].append(count / seconds)
            yield shown("mlpoffload-fig08", "update_throughput", count / seconds / 1e6, "M params/s", **cells)
            rate = f"{SOURCE}; {MOVED} bytes per parameter (half of 16 read and 12 written) over the update's seconds"
            yield shown("mlpoffload-fig09", "io_throughput", MOVED * count / seconds / 1e9, "GB/s", rate, **cells)
        for ending in ("", ALONE):
            slow, fast = made(ZERO + ending, model), made(OURS + ending, model)
            at = {"series": f"{OURS} / ZeRO-3{ending}", "model": model}
            iteration = slow.seconds / fast.seconds
            updates = phase(slow, "optimizer") / phase(fast, "optimizer")
            yield shown("mlpoffload-fig07", "iteration_speedup", iteration, "x", **at)
            yield shown("mlpoffload-fig08", "update_speedup", updates, "x", **at)
            ratios.setdefault((ending, "iteration"), []).append(iteration)
            ratios.setdefault((ending, "update"), []).append(updates)
    for series, by_model in took.items():  # 4.2 excepts 52B after 40B and 120B after 100B
        least = min(by_model[larger] / by_model[model] for model, larger in (("52B", "70B"), ("70B", "100B")))
        metric = "iteration_time of the next larger model, least of two"
        yield shown("mlpoffload-fig07", metric, least, "x", series=series)
    for series, found in rates.items():
        cells = {"series": series, "model": "least over most of the models"}
        yield shown("mlpoffload-fig08", "update_throughput_spread", min(found) / max(found), "x", **cells)
    for ending in ("", ALONE):
        at = {"series": f"{OURS} / ZeRO-3{ending}", "model": "largest over the models"}
        yield shown("mlpoffload-fig07", "iteration_speedup", max(ratios[ending, "iteration"]), "x", **at)
        yield shown("mlpoffload-fig07", "speedup_max", max(ratios[ending, "update"]), "x", **at)
        yield shown("mlpoffload-fig08", "update_throughput_ratio_min", min(ratios[ending, "update"]), "x", **at)
        yield shown("mlpoffload-fig08", "update_throughput_ratio_max", max(ratios[ending, "update"]), "x", **at)
        yield shown("mlpoffload-fig09", "io_speedup", max(ratios[ending, "update"]), "x", **at)


def shares_of_io() -> Iterator[Row]:
    """Yield Fig. 3: the update's seconds with a drive at work, and AdamW's own; 20B stays in host memory."""
    exhibit, source = "mlpoffload-fig03", f"{SOURCE}: AdamW's seconds at the rate of host memory, over the update's"
    spec = PAPER.spec("20B")
    alone = Step(work("zero3", "20B", cached=LEAST_CACHED), machine(ONE), PAPER.costs()).adamw_s(spec.parameters)
    updates = {"20B": ("in host memory", alone, 100.0)}
    for model in ("40B", "70B", "120B"):
        update = next(each for each in made(ZERO, model).phases if each.name == "optimizer")
        share = 100 * update.by_resource["CPU and host memory"] / update.seconds
        updates[model] = "offloaded to the SSD", update.seconds, share
    for model, (series, seconds, share) in updates.items():
        cells = {"series": series, "model": model}
        yield shown(exhibit, "update time", seconds, "s", **cells)
        yield shown(exhibit, "compute share", share, "%", source, **cells)
        yield shown(exhibit, "I/O share", 100 - share, "%", source, **cells)
    source, cells = (
        f"{SOURCE}: 40B offloaded over 20B in memory",
        {"series": "host memory (20B) vs SSD", "model": "40B"},
    )
    yield shown(exhibit, "update_speedup", updates["40B"][1] / alone, "x", source, **cells)
    yield from twenty_billion(alone)


def twenty_billion(update_in_host_memory: float) -> Iterator[Row]:
    """Yield section 1's iterations of 20B with the states on the GPUs, in host memory and on the NVMe.

    Also yields the two update rates that Fig. 8 names, which are for states that stay in the memory that is updated.
    """
    spec, offloaded = PAPER.spec("20B"), step("zero3", "20B", LEAST_CACHED)
    resident = step("skip_gradients", "20B", LEAST_CACHED)  # its backward pass writes nothing
    passes = phase(resident, "forward") + phase(resident, "backward")
    source = "30 bytes per parameter, as in host memory, at the rate of four GPUs' memory"
    on_gpus = 30 * spec.parameters / (4e9 * PAPER.value("gpu_memory_gb_per_s"))
    states = {
        "no offloading": (passes + on_gpus, f"passes of {SOURCE}; the update {source}"),
        "host memory": (passes + update_in_host_memory, f"passes of {SOURCE}; AdamW at the rate of host memory"),
        "NVMe": (offloaded.seconds, SOURCE),
    }
    for series, (seconds, how) in states.items():
        yield shown("mlpoffload-fig03", "iteration_time", seconds, "s", how, series=series, model="20B")
    for series, seconds in (("in GPU memory", on_gpus), ("in host memory", update_in_host_memory)):
        rate, how = spec.parameters / seconds / 1e6, "30 bytes per parameter at the memory's rate"
        yield shown("mlpoffload-fig08", "update_throughput", rate, "M params/s", how, series=series, model="20B")


def raw_bandwidth() -> Iterator[Row]:
    """Yield Fig. 4: Table 1's rates shared by processes, each with one sub-group of 12 bytes per parameter."""
    source = "Table 1's rate, shared alike; latency of a sub-group of 1.2 GB"
    for testbed in (ONE, TWO):
        for path in machine(testbed).described["paths"]:
            for way in ("read", "write"):
                rate = path[f"{way}_gb_per_s"]["value"]
                for processes in (1, 2, 4, 8):
                    name = f"{'NVMe' if path['name'] == 'nvme' else 'PFS'} {way}"
                    x = "processes", processes
                    cells = {"series": name, "testbed": testbed, "subfigure": testbed[-1], "x": x}
                    yield shown("mlpoffload-fig04", "bandwidth of all", rate, "GB/s", source, **cells)
                    seconds = processes * 12 * SUB_GROUP / (1e9 * rate)
                    yield shown("mlpoffload-fig04", "latency of one", seconds, "s", source, **cells)


def by_sub_group() -> Iterator[Row]:
    """Yield Fig. 5: the bandwidth that one of the four ranks sees.

    It is the bytes of a transfer over the time since the rank's last transfer of that kind ended.
    """
    exhibit, events = "mlpoffload-fig05", made(ZERO, "40B").simulated.events
    for way in ("read", "write"):
        mine = [e for e in events if e.resource == f"nvme.{way}" and e.name.startswith(f"{way} 0.")]
        last = mine[0].begin_s
        for number, event in enumerate(mine):
            cells = {"series": way, "model": "40B", "x": ("part of the update", number)}
            rate, last = event.amount / (event.end_s - last) / 1e9, event.end_s
            yield shown(exhibit, "bandwidth", rate, "GB/s", f"{SOURCE}, played", **cells)


LINES = {"gpu0": "GPU", "nvme": "NVMe", "pfs": "PFS", "cpu": "CPU"}


def line_and_part(event: Event) -> tuple[str, str] | None:
    """Return the line and the bar of an event in Fig. 6; None for an event that is not drawn."""
    resource, _, way = event.resource.partition(".")
    line = LINES.get(resource)
    if line is None or event.begin_s == event.end_s:
        return None
    name = {"forward": "F", "backward": "B"}.get(event.phase, "")
    if line in ("NVMe", "PFS"):
        name = "gradients" if event.phase == "backward" else way
    elif line == "CPU":
        name = "Adam"
    where = event.name.rpartition(" ")[2] if event.phase == "optimizer" else ""
    return line, f"{name} {where}".strip()


def four_sub_groups() -> Iterator[Row]:
    """Yield Fig. 6: one step of four sub-groups of the 40B model's size; MLP-Offload finds two of
    them in host memory."""
    exhibit = "mlpoffload-fig06"
    for system, arm in (("ZeRO-3", "zero3"), (OURS, "as_published")):
        made_step = Step(work(arm, "four sub-groups", cached=2, ranks=1), machine(ONE), PAPER.costs())
        schedule(made_step)
        events = simulate(made_step.tasks, resources_for(made_step)).events
        for (line, name), (begin, end) in spans(events, line_and_part).items():
            cells = {"series": f"{system}: {line}", "model": "four sub-groups", "x": ("begin (s)", begin)}
            yield shown(exhibit, name.split()[0], end - begin, "s", ONE_STEP, **cells)


def placement() -> Iterator[Row]:
    """Yield Fig. 10: percent of the states on each tier, by the authors' split, by Eq. 1 and by equal times."""
    exhibit, splits = "mlpoffload-fig10", {}
    for series, arm in ((OURS, "by_hand"), (f"{OURS}, Eq. 1", "as_published"), (f"{OURS}, balanced", "mlp_offload")):
        for model in MODELS:
            mine = work(arm, model, cached=cached_by(model))
            paths = {path.name: path.share for path in paths_of(Step(mine, machine(ONE), PAPER.costs()))}
            kept = cached_by(model) / len(mine.sub_groups())
            for tier, share in {"host": kept, **{name: (1 - kept) * part for name, part in paths.items()}}.items():
                metric = {"host": "host memory", "nvme": "NVMe", "pfs": "PFS"}[tier]
                yield shown(exhibit, metric, 100 * share, "%", SOURCE, series=series, model=model)
            splits[series] = paths["nvme"] / paths["pfs"]
    for model in MODELS:
        for metric, share in {"host memory": 0.0, "NVMe": 100.0, "PFS": 0.0}.items():
            yield shown(exhibit, metric, share, "%", "all of it is read and written", series=ZERO, model=model)
    for series, ratio in splits.items():
        yield shown(exhibit, "split", ratio, "to 1", "shares of the two paths", series=f"NVMe:PFS, {series}")
    yield from sizes()


def sizes() -> Iterator[Row]:
    """Yield 4.2 and 4.3: the bytes that ZeRO-3 swaps, and its host memory besides the swap buffers."""
    exhibit, kinds = "mlpoffload-fig10", {ZERO: "", ZERO + ALONE: " as printed"}
    for series, ending in kinds.items():
        found = []
        for model in MODELS:
            mine, cells = work("zero3", model + ending, cached=LEAST_CACHED), {"series": series, "model": model}
            swapped = 4 * mine.ranks * sum(map(sum, mine.sub_groups())) * 4
            source = "masters, moments and gradients in fp32 of all sub-groups"
            yield shown(exhibit, "optimizer state", swapped / 1e12, "TB", source, **cells)
            yield shown(exhibit, "optimizer state (TiB)", swapped / 2**40, "TiB", source, **cells)
            found.append(runtime_bytes(mine) / 1e9)
            source = "memascend.planner.footprint.plan: all but the buffers that sub-groups are swapped through"
            yield shown(exhibit, "host memory of the runtime", found[-1], "GB", source, **cells)
        for end, value in (("min", min(found)), ("max", max(found))):
            yield shown(exhibit, f"host memory of the runtime, {end}", value, "GB", "over five models", series=series)


SCALED = {"40B": 1, "70B": 2, "100B": 3, "130B": 4, "280B": 8}


def cluster(nodes: int, shared: bool) -> MachineSpec:
    """Return the nodes as one machine: each has its drive, and the four GPUs of a node share a model's products.

    With `shared`, each node has Table 1's rates of Lustre; otherwise Lustre is left out.
    """
    one = machine(TWO)
    paths = [
        {**path, **{f"{way}_gb_per_s": nodes * path[f"{way}_gb_per_s"]["value"] for way in ("read", "write")}}
        for path in one.described["paths"]
        if shared or path["name"] == "nvme"
    ]
    whole = {"gpus": 4 * nodes, "gpu_flops_per_s": 4 * one.gpu_flops_per_s, "described": {"paths": paths}}
    return replace(one, memory_bytes_per_s=nodes * one.memory_bytes_per_s, **whole)


def weak_scaling() -> Iterator[Row]:
    """Yield Figs. 11 and 12: Testbed-2, four GPUs per node, with the three sub-groups of 4.1 in host memory."""
    kinds = {ZERO: ("zero3", True), OURS: ("as_published", True), f"{OURS}, PFS idle": ("exclusive", False)}
    seconds: dict[str, list[float]] = {series: [] for series in kinds}
    for model, nodes in SCALED.items():
        for series, (arm, shared) in kinds.items():
            mine = work(arm, model, cached=LEAST_CACHED, ranks=4 * nodes)
            simulated = step_time(mine, cluster(nodes, shared), calibrations=PAPER.costs())
            source = f"{SOURCE}; Lustre's rates of Table 1 for each node, or none; three sub-groups held"
            cells = {"series": series, "model": model, "testbed": TWO, "x": ("nodes", nodes)}
            seconds[series].append(simulated.seconds)
            yield shown("mlpoffload-fig11", "iteration_time", simulated.seconds, "s", source, **cells)
            rate = PAPER.spec(model).parameters / phase(simulated, "optimizer") / 1e6
            yield shown("mlpoffload-fig12", "update_throughput", rate, "M params/s", source, **cells)
    for series, found in seconds.items():
        most, metric = max(b / a for a, b in pairwise(found)), "iteration_time of the next larger system, most of four"
        yield shown("mlpoffload-fig11", metric, most, "x", SOURCE, series=series, testbed=TWO)


def accumulation() -> Iterator[Row]:
    """Yield Fig. 13: eight sequences per GPU, with one to sixteen micro-batches per update."""
    exhibit = "mlpoffload-fig13"
    for ending in ("", ALONE):
        gains = []
        for batches in (1, 2, 4, 8, 16):
            mine = (ZERO + ending, OURS + ending)
            seconds = [made(series, "40B", batch=8, batches=batches).seconds for series in mine]
            for series, value in zip(mine, seconds, strict=True):
                cells = {"series": series, "model": "40B", "x": ("batch", 32 * batches)}
                yield shown(exhibit, "iteration_time", value, "s", **cells)
            gains.append(100 * (seconds[0] / seconds[1] - 1))
        cells = {"series": f"{OURS} / ZeRO-3{ending}", "model": "40B"}
        yield shown(exhibit, "speedup_min", min(gains), "% faster", f"{SOURCE}: least of five batches", **cells)
    for series, model in ((ZERO, "40B"), (ZERO + ALONE, "40B as printed")):
        sizes = (
            gpu_memory(work("zero3", model, cached=LEAST_CACHED, batch=batch)).device_bytes for batch in range(1, 129)
        )
        most, source = sum(size <= GPU_BYTES for size in sizes), "memascend.planner.gpu_memory against 80 GB"
        yield shown(exhibit, "largest mini-batch", most, "sequences", source, series=series, model="40B")


def ablations() -> Iterator[Row]:
    """Yield Figs. 14 and 15. The model always has one process at a time, so that part changes nothing in it."""
    best: dict[tuple[str, str], float] = {}
    for exhibit, bars in BARS.items():
        for model in ("40B", "70B", "100B"):
            for ending in ("", ALONE):
                for name, arm in bars.items():
                    mine = arm if name != OURS else "as_published" if ending else "by_hand"
                    printed = f"{model} as printed"
                    at = (printed, cached_alone(printed)) if ending else (model, cached_by(model))
                    best[f"{name}{ending}", model] = seconds = step(mine, *at).seconds
                    yield shown(exhibit, "iteration_time", seconds, "s", series=f"{name}{ending}", model=model)
    for ending in ("", ALONE):
        for (exhibit, series, metric), (slow, fast) in RATIOS.items():
            found = [best[slow + ending, model] / best[fast + ending, model] for model in ("40B", "70B", "100B")]
            cells = {"series": f"{series}{ending}", "model": "40B/70B/100B"}
            yield shown(exhibit, metric, max(found), "x", f"{SOURCE}: largest of three models", **cells)


def equation_1() -> Iterator[Row]:
    """Yield Eq. 1: how many of a hundred sub-groups are on each path, and how many would make the
    paths' times equal."""
    exhibit = "mlpoffload-eq01"
    for testbed in (ONE, TWO):
        paths = machine(testbed).described["paths"]
        rates = [Rates(path["read_gb_per_s"]["value"], path["write_gb_per_s"]["value"]) for path in paths]
        for series, rule in (("Eq. 1", "as_published"), ("equal times", "balanced")):
            shares, found = weights(rule, rates), counts(100, rule, rates)
            for path, number, share in zip(paths, found, shares, strict=True):
                x, model = ("path", path["name"]), f"Testbed-{testbed[-1]}"
                cells = {"series": series, "testbed": testbed, "model": model, "x": x}
                source = "memascend.storage.placement.counts"
                yield shown(exhibit, f"sub-groups on {path['name']}", number, "of 100", source, **cells)
                yield shown(exhibit, f"exact share of {path['name']}", 100 * share / sum(shares), "%", source, **cells)

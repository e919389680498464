"""Run records to the measured lane's tidy table.

Bytes of a twin are given twice: as measured, and, under the metric's name with `` (x k^2)``, at the original's size.
Runs that differ in nothing but the seed are joined by the median. What a line through measured points says of sizes
that were not run is in the lane ``modelled``. A record that does not fit its schema stops the derivation.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from workflows.scripts import check_latency, derive_sweeps, derive_times, nvme_latency, tidy
from workflows.scripts.records import Run, last_check, load, read_trace, without_temporaries
from workflows.scripts.tidy import AS_PUBLISHED, DENSE, GIB, MEMASCEND, SCALED

RUN_COLUMNS = [
    "key",
    "run_id",
    "kind",
    "status",
    "series",
    "model",
    "k",
    "dtype",
    "ranks",
    "seed",
    "steps",
    "commit",
    "dirty",
    "started_at",
    "host",
    "cpu",
    "cores",
    "memory_gib",
    "locked",
    "explained_share",
    "loss_checksum",
    "last_loss",
    "master_weights_sha256",
    "seconds_per_step",
    "shims",
]
PEAKS = {  # metric -> field of the record's memory section
    "peak system memory": "host_peak_net_bytes",
    "raw resident peak": "raw_peak_bytes",
    "start-up resident peak": "startup_peak_bytes",
    "training resident peak": "training_peak_bytes",
    "device-role peak": "device_peak_bytes",
    "process baseline": "baseline_bytes",
}
SCALING_PEAKS = ("peak system memory", "device-role peak")
METHODS = {  # bench-overflow method -> series
    "chain": AS_PUBLISHED,
    "aminmax": "torch.aminmax",
    "fused": MEMASCEND,
    "sum": "tensor.sum (read limit)",
}
TABLE2_MODELS = ("Llama3.2-1B", "Llama3.2-3B", "Llama3.1-8B")
FAILED = {"oom": "N/A (out of memory)", "timeout": "N/A (time-out)"}


def row(
    exhibit: str, series: str, metric: str, value: float | str, unit: str, testbed: str, source: str, **more: Any
) -> dict[str, Any]:
    """One row of the measured lane."""
    value = value if isinstance(value, str) else f"{value:.9g}"
    return {
        "exhibit_id": exhibit,
        "series": series,
        "metric": metric,
        "value": value,
        "unit": unit,
        "lane": "measured",
        "testbed": testbed,
        "source": source,
        **more,
    }


def run_row(exhibit: str, run: Run, metric: str, value: float | str, unit: str, **more: Any) -> dict[str, Any]:
    return {**row(exhibit, run.series, metric, value, unit, run.testbed, run.record["key"]), "model": run.model, **more}


def byte_rows(exhibit: str, run: Run, metric: str, nbytes: float, **more: Any) -> Iterator[dict[str, Any]]:
    """A twin's bytes in GiB, as they are and at the original's size."""
    yield run_row(exhibit, run, metric, nbytes / GIB, "GiB", **more)
    yield run_row(exhibit, run, metric + SCALED, nbytes * run.k**2 / GIB, "GiB", **more)


def peak_rows(exhibit: str, runs: list[Run]) -> Iterator[dict[str, Any]]:
    """Host peak, and what is reported beside it."""
    for run in runs:
        if not run.ok:
            yield run_row(exhibit, run, "peak system memory", FAILED.get(run.record["status"], "N/A"), "GiB")
            continue
        for metric, field in PEAKS.items():
            if metric in SCALING_PEAKS:
                yield from byte_rows(exhibit, run, metric, run.memory(field))
            else:
                yield run_row(exhibit, run, metric, run.memory(field) / GIB, "GiB")
        yield run_row(exhibit, run, "ledger explained share", 100 * run.memory("ledger_explained_share"), "%")


def pairs(runs: list[Run]) -> Iterator[tuple[Run, Run]]:
    """(as published, MemAscend) runs that differ in nothing else."""

    def same(run: Run) -> tuple:
        return run.testbed, run.dtype, run.record["seed"], run.record["sequence"], run.record["batch"]

    memascend = {same(run): run for run in runs if run.series == MEMASCEND and run.ok}
    for run in runs:
        if run.series == AS_PUBLISHED and run.ok and same(run) in memascend:
            yield run, memascend[same(run)]


def reduction_rows(exhibit: str, runs: list[Run], metric: str, amount: Any) -> Iterator[dict[str, Any]]:
    """Reduction from as published to MemAscend in percent; the mean where all four models of the paper are there."""
    for device in sorted({run.device for run in runs}):
        yield from reductions_on(device, exhibit, [run for run in runs if run.device == device], metric, amount)


def reductions_on(device: str, exhibit: str, runs: list[Run], metric: str, amount: Any) -> Iterator[dict[str, Any]]:
    found = defaultdict(list)
    for before, after in pairs(runs):
        percent = 100 * (1 - amount(after) / amount(before))
        source = f"{before.record['key']} {after.record['key']}"
        found[before.model].append((percent, before.k, source))
        yield row(exhibit, MEMASCEND, metric, percent, "%", before.testbed, source, model=before.model)
    if all(model in found for model in DENSE):
        best = [[p for p, k, _ in found[m] if k == min(k for _, k, _ in found[m])] for m in DENSE]
        place = runs[0].record["host"]["name"] + ("" if device == "cpu" else f"/{device}")
        sources = " ".join(source for m in DENSE for _, _, source in found[m])
        mean = sum(median(b) for b in best) / len(best)
        yield row(exhibit, MEMASCEND, f"average {metric}", mean, "%", f"{place}/twins", sources, model="4 dense models")


def fig04(runs: list[Run]) -> Iterator[dict[str, Any]]:
    """What MemAscend needs is required, the rest of the baseline's peak is overhead."""
    for before, after in pairs(runs):
        whole, required = before.memory("host_peak_net_bytes"), after.memory("host_peak_net_bytes")
        parts = {"peak system memory": whole, "required": required, "overhead": whole - required}
        for metric, nbytes in parts.items():
            yield from byte_rows("memascend-fig04", before, metric, nbytes)
        yield run_row("memascend-fig04", before, "wasted share", 100 * (whole - required) / whole, "%")


def fig08(runs: list[Run]) -> Iterator[dict[str, Any]]:
    exhibit = "memascend-fig08"
    for run in (r for r in runs if r.model == "Qwen2.5-7B" and r.ok):
        components = run.components()
        for metric, nbytes in components.items():
            yield from byte_rows(exhibit, run, metric, nbytes)
        peak = run.memory("host_peak_net_bytes")
        yield from byte_rows(exhibit, run, "not in the ledger", peak - sum(components.values()))
        yield from byte_rows(exhibit, run, "peak system memory", peak)
        for metric in ("process baseline", "start-up resident peak", "training resident peak"):
            yield run_row(exhibit, run, metric, run.memory(PEAKS[metric]) / GIB, "GiB")
        yield run_row(exhibit, run, "ledger explained share", 100 * run.memory("ledger_explained_share"), "%")
        if run.series == MEMASCEND:
            least = components["parameter buffer pool"] + components["gradient flat buffer"]
            yield from byte_rows(exhibit, run, "peak system memory", least, series=tidy.MINIMUM)
            for metric in ("parameter buffer pool", "gradient flat buffer"):
                yield from byte_rows(exhibit, run, metric, components[metric], series=tidy.MINIMUM)
    seven = [r for r in runs if r.model == "Qwen2.5-7B"]
    yield from reduction_rows(exhibit, seven, "reduction", lambda r: r.memory("host_peak_net_bytes"))


def fig11(runs: list[Run]) -> Iterator[dict[str, Any]]:
    for run in (r for r in runs if r.ok):
        yield from byte_rows("memascend-fig11", run, "parameter buffer pool", run.owned("parameter_pool"))
    yield from reduction_rows("memascend-fig11", runs, "reduction", lambda r: r.owned("parameter_pool"))


def fig13(runs: list[Run]) -> Iterator[dict[str, Any]]:
    for run in (r for r in runs if r.ok):
        yield from byte_rows("memascend-fig13", run, "overflow check overhead", run.memory("overflow_spike_bytes"))
        yield from byte_rows("memascend-fig13", run, "gradient flat buffer", run.owned("gradient_flat_buffer"))


def tab02(runs: list[Run]) -> Iterator[dict[str, Any]]:
    chosen = [
        r for r in runs if r.model in TABLE2_MODELS and r.series in (AS_PUBLISHED, tidy.ZERO_OFFLOAD, tidy.ALL_IN_GPU)
    ]
    yield from peak_rows("memascend-tab02", chosen)


def fig03(runs: list[Run], benches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Memory during the check, from the largest twin; the check's time from the micro-benchmark of the same machine."""
    exhibit = "memascend-fig03"
    ok = [r for r in runs if r.ok and r.record["ranks"] == 1 and r.model in DENSE]
    for run in (r for r in ok if r.series == AS_PUBLISHED and r.model == "Llama3.1-8B"):
        flat = run.owned("gradient_flat_buffer")
        yield from byte_rows(exhibit, run, "gradient flat buffer", flat)
        yield from byte_rows(exhibit, run, "peak during overflow check", flat + run.memory("overflow_spike_bytes"))
    candidates = [before for before, _ in pairs(ok)]
    if candidates:
        chosen = min(candidates, key=lambda r: (r.k, r.model != "Qwen2.5-7B", r.record["seed"]))
        for run in ok:
            if (run.testbed, run.record["seed"]) == (chosen.testbed, chosen.record["seed"]):
                yield from check_timeline(exhibit, run)
    for bench in benches:
        for point in bench["points"]:
            if point["dtype"] == "fp32":
                yield row(
                    exhibit,
                    METHODS[point["method"]],
                    "overflow check latency",
                    1e3 * median(point["seconds"]),
                    "ms",
                    bench["host"]["name"],
                    bench["key"],
                    x_name="elements",
                    x_value=str(point["numel"]),
                )


def check_timeline(exhibit: str, run: Run) -> Iterator[dict[str, Any]]:
    """Memory relative to the flat buffer through the last check: from the ledger's events, and as the kernel saw it."""
    flat = run.owned("gradient_flat_buffer")
    if not flat:
        return
    if run.series == AS_PUBLISHED:
        peak = (flat + run.memory("overflow_spike_bytes")) / flat
        yield run_row(exhibit, run, "peak relative to tensor", peak, "x", x_name="step", x_value="isinf")
    seconds = run.record.get("overflow_check_seconds") or [0.0]
    elements = {"x_name": "gradient elements", "x_value": str(flat // 4)}
    yield run_row(exhibit, run, "overflow check latency", 1e3 * median(seconds), "ms", **elements)
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
        at = {"x_name": "time in ms", "x_value": f"{1e3 * t:.3f}"}
        yield run_row(exhibit, run, "live tensors relative to the flat buffer", 1 + level / flat, "x", **at)
    yield from resident_rows(exhibit, run, trace, (begin, end), flat)


def resident_rows(
    exhibit: str, run: Run, trace: pd.DataFrame, span: tuple[float, float], flat: int
) -> Iterator[dict[str, Any]]:
    """The sampled host-resident memory around the check, its level before the check taken as 1."""
    begin, end = span
    margin = 0.25 * (end - begin) + 0.02
    window = trace[(trace["t_s"] >= begin - margin) & (trace["t_s"] <= end + margin)]
    before = window[window["t_s"] < begin]
    if before.empty:
        return
    level = (before["rss_anon"] + before["rss_file"]).iloc[-1]
    for sample in window.iloc[:: max(1, len(window) // 400)].itertuples():
        relative = 1 + (sample.rss_anon + sample.rss_file - level) / flat
        at = {"x_name": "time in ms", "x_value": f"{1e3 * (sample.t_s - begin):.3f}"}
        yield run_row(exhibit, run, "resident memory relative to the flat buffer", relative, "x", **at)


def bench_memory(benches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Extra memory of each way to check, as a multiple of the checked buffer."""
    size = {"fp32": 4, "fp16": 2, "bf16": 2}
    for bench in benches:
        largest = (
            max(p["numel"] for p in bench["points"] if p["dtype"] == "fp32")
            if any(p["dtype"] == "fp32" for p in bench["points"])
            else 0
        )
        for point in bench["points"]:
            if point["dtype"] == "fp32" and point["numel"] == largest and point["method"] != "sum":
                factor = point["extra_bytes"] / (largest * size["fp32"])
                yield row(
                    "memascend-fig13",
                    METHODS[point["method"]],
                    "extra memory relative to the buffer",
                    factor,
                    "x",
                    bench["host"]["name"],
                    bench["key"],
                    x_name="elements",
                    x_value=str(largest),
                )


def machine(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The probed machine, in the rows of Tables III and V."""
    for record in (r for r in records if r["kind"] == "testbed"):
        name, probed = record["host"]["name"], record["testbed"]
        sockets = f"{probed['sockets']} × " if (probed["sockets"] or 1) > 1 else ""
        parts = {
            "CPU": f"{sockets}{probed['cpu']}, {probed['cores']} cores",
            "CPU Memory": f"{probed['memory_gib']:g} GiB",
            "PCIe": probed["pcie"] or "not visible",
            "GPU": listed(probed["gpus"], "memory_gib", "GiB") or "none",
            "SSD": listed(probed["ssds"], "capacity_tb", "TB") or "none visible",
        }
        for exhibit in ("memascend-tab03", "memascend-tab05"):
            for component, text in parts.items():
                at = {"x_name": "component", "x_value": component}
                series = f"This machine ({name})"
                yield row(exhibit, series, "specification", text, "text", name, record["key"], **at)


def listed(devices: list[dict[str, Any]], size: str, unit: str) -> str:
    """Devices as the paper's tables write them: count, model, size."""
    texts = []
    for device in devices:
        amount = f" ({device[size]:.3g} {unit})" if device.get(size) else ""
        texts.append(f"{device.get('count') or 1} × {device['model']}{amount}")
    return ", ".join(texts)


def derive(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row of the measured lane."""
    every = [Run(r, r["_path"]) for r in records if r["kind"] == "training"]
    training = [run for run in every if not derive_sweeps.is_sweep(run) and not derive_sweeps.is_curve(run)]
    benches = [r for r in records if r["kind"] == "bench-overflow" and r["status"] == "ok"]
    paired = [
        r for r in training if r.series not in (tidy.ZERO_OFFLOAD, tidy.ALL_IN_GPU) and r.model not in TABLE2_MODELS[:2]
    ]
    fp16, bf16 = ([r for r in paired if r.dtype == dtype] for dtype in ("fp16", "bf16"))
    rows = [*fig03(fp16, benches), *fig04(fp16), *fig08(fp16), *fig11(fp16), *fig13(fp16), *bench_memory(benches)]
    for exhibit, runs in (("memascend-fig15", fp16), ("memascend-fig21", bf16)):
        rows += [
            *peak_rows(exhibit, runs),
            *reduction_rows(exhibit, runs, "reduction", lambda r: r.memory("host_peak_net_bytes")),
        ]
    rows += [*tab02([r for r in training if r.dtype == "fp16"]), *machine(records)]
    kernels = [r for r in records if r["kind"] == "bench" and r["status"] == "ok"]
    checks = [r for r in kernels if r["benchmark"] == "overflow"]
    rows += derive_sweeps.rows(every)
    rows += derive_times.rows([r for r in records if r["kind"] == "step-times" and r["status"] == "ok"])
    disks = [r for r in kernels if r["benchmark"] == "nvme"]
    kernel_rows = [each for bench in checks for each in check_latency.rows(bench)]
    return join_seeds(rows) + kernel_rows + [each for bench in disks for each in nvme_latency.rows(bench)]


def join_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in value and source alone become their median; a text (a failure) stands over numbers."""
    same = defaultdict(list)
    for each in rows:
        same[tuple((c, each.get(c, "")) for c in tidy.COLUMNS if c not in ("value", "source"))].append(each)
    out = []
    for group in same.values():
        numbers = [tidy.numeric(each["value"]) for each in group]
        texts = [each["value"] for each, number in zip(group, numbers, strict=True) if number is None]
        value = texts[0] if texts else f"{median(n for n in numbers if n is not None):.9g}"
        sources = dict.fromkeys(key for each in group for key in each["source"].split())
        out.append({**group[0], "value": value, "source": " ".join(sources)})
    return out


def run_summary(record: dict[str, Any]) -> dict[str, Any]:
    """What a figure's footer and the report say of a run."""
    host = record["host"]
    out = {
        **{name: record.get(name, "") for name in RUN_COLUMNS},
        "host": host["name"],
        "cpu": host["cpu"],
        "cores": host["cores"],
        "memory_gib": f"{host['memory_bytes'] / GIB:.1f}",
        "dirty": str(record["dirty"]).lower(),
    }
    if record["kind"] == "step-times":
        return out | {"k": record["twin"]["k"]}
    if record["kind"] != "training":
        return out
    run = Run(record, record["_path"])
    steps = [p["seconds"] for p in record.get("phases", []) if re.fullmatch(r"step(?!1-)\d+-.*", p["name"])]
    out |= {
        "series": run.series,
        "model": run.model,
        "k": run.k,
        "shims": " ".join(record.get("shims", [])),
        "last_loss": (record.get("losses") or [""])[-1],
        "seconds_per_step": f"{sum(steps) / (record['steps'] - 1):.2f}" if steps and record["steps"] > 1 else "",
        "locked": str(any(e.get("locked") for e in record.get("ledger", []))).lower(),
    }
    if run.ok:
        out["explained_share"] = f"{run.memory('ledger_explained_share'):.4f}"
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, nargs="*", default=[], help="run records (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="tidy table of the measured lane")
    parser.add_argument("--runs-out", type=Path, help="one line a run: what it was, where and when")
    args = parser.parse_args()
    try:
        records = load(args.records)
        tidy.write_table(derive(records), args.out)
        if args.runs_out:
            tidy.write_table(map(run_summary, records), args.runs_out, RUN_COLUMNS)
    except (tidy.TableError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()

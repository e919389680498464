"""Invented run records and modelled rows for tests: shaped as the run
programs write them, never kept outside a test."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from workflows import registry

ROOT = Path(__file__).resolve().parents[2]

GIB = 2**30
HOST = {"name": "local", "cpu": "Example CPU", "cores": 2, "memory_bytes": 16 * GIB, "kernel": "6.1", "system": "Linux"}
# Display name -> (key, k, parameters of the original, elements of its embedding)
MODELS = {
    "Llama3.1-8B": ("llama3.1-8b", 16, 8_030_261_248, 525_336_576),
    "Qwen2.5-7B": ("qwen2.5-7b", 8, 7_615_616_512, 544_997_376),
    "Qwen2.5-14B": ("qwen2.5-14b", 16, 14_770_033_664, 778_567_680),
    "Qwen2.5-32B": ("qwen2.5-32b", 16, 32_763_876_352, 778_567_680),
}
SMALL = {
    "Llama3.2-1B": ("llama3.2-1b", 16, 1_235_814_400, 262_668_288),
    "Llama3.2-3B": ("llama3.2-3b", 16, 3_212_749_824, 394_002_432),
}
ARMS = {
    "as_published": ("zero_infinity", "as_published"),
    "today": ("zero_infinity", "today"),
    "memascend": ("memascend", "memascend"),
    "zero_offload": ("zero_offload", "today"),
}


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def header(run_id: str, kind: str, number: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "key": f"{number:064x}",
        "run_id": run_id,
        "kind": kind,
        "lane": "measured",
        "status": "ok",
        "host": HOST,
        "versions": {"python": "3.11.7", "deepspeed": "0.19.8"},
        "code_digest": "0" * 64,
        "commit": "c0ffee1234567890",
        "dirty": False,
        "started_at": "2026-01-02T03:04:05Z",
    }


def entry(
    owner: str, requested: int, reserved: int, born: float = 1.0, died: float | None = None, at_peak: bool = True
) -> dict[str, Any]:
    return {
        "name": owner,
        "owner": owner,
        "role": "host",
        "allocator": "test",
        "requested_bytes": requested,
        "reserved_bytes": reserved,
        "touched_bytes": reserved,
        "address": 4096,
        "locked": True,
        "born_s": born,
        "died_s": died,
        "at_peak": at_peak,
    }


def ledger(arm: str, dtype: str, parameters: int, embedding: int) -> list[dict[str, Any]]:
    """Return the buffers of a twin by the paper's formulas."""
    rounded = power_of_two if arm == "as_published" else int
    flat, e = 4 * parameters, 2 * embedding
    pool = [e] * 9 if arm != "memascend" else [e, e, e // 2]
    entries = [entry("parameter_pool", b, rounded(b)) for b in pool]
    entries += [entry("optimizer_buffers", 2 * e, rounded(2 * e)) for _ in range(5)]
    entries += [entry("swap_out_buffer", e, rounded(e)), entry("gradient_flat_buffer", flat, rounded(flat))]
    if dtype == "fp16" and arm != "memascend":
        for begin in (5.0, 9.0):  # two steps' checks: the copy, then its bools
            entries.append(entry("overflow_check", flat, flat, begin, begin + 0.30, begin == 9.0))
            entries.append(entry("overflow_check", flat // 4, flat // 4, begin + 0.20, begin + 0.35, begin == 9.0))
            entries.append(entry("overflow_check", flat // 4, flat // 4, begin + 0.40, begin + 0.60, False))
    return entries


def training(
    model: str, arm: str, dtype: str, number: int, steps: int = 3, seed: int = 0, k: int | None = None
) -> dict[str, Any]:
    """Make a record of one run, by display name of the model."""
    key, factor, parameters, embedding = {**MODELS, **SMALL}[model]
    factor = k or factor
    system, name = ARMS[arm]
    entries = ledger(arm, dtype, parameters // factor**2, embedding // factor**2)
    spike = int(1.25 * 4 * (parameters // factor**2)) if dtype == "fp16" and arm != "memascend" else 0
    net = sum(e["reserved_bytes"] for e in entries if e["at_peak"])
    phases = [f"step{i + 1}-{p}" for i in range(steps) for p in ("forward", "backward", "optimizer")]
    return {
        **header(f"train-{key}-k{factor}-{dtype}-{arm}" + (f"-s{seed}" if seed else ""), "training", number),
        "system": system,
        "arm": name,
        "parts": {"pool": "adaptive" if arm == "memascend" else "monolithic_separate"},
        "model": key,
        "twin": {"k": factor, "parameters": parameters // factor**2},
        "dtype": dtype,
        "ranks": 1,
        "sequence": 32,
        "batch": 1,
        "steps": steps,
        "seed": seed,
        "mode": "memory",
        "shims": ["gather-clone"],
        "phases": [{"name": n, "seconds": 0.5, "hwm_bytes": net} for n in ("init-model", *phases)],
        "memory": {
            "baseline_bytes": 103 << 20,
            "raw_peak_bytes": net + (600 << 20),
            "startup_peak_bytes": net + (500 << 20),
            "training_peak_bytes": net + (600 << 20),
            "host_peak_bytes": net + (103 << 20),
            "host_peak_net_bytes": net,
            "device_peak_bytes": 131 << 20,
            "locked_bytes": net,
            "ledger_peak_bytes": net,
            "ledger_explained_share": 0.99,
            "overflow_spike_bytes": spike,
        },
        "overflow_check_seconds": [0.6] * steps,
        "losses": [10.1, 10.0, 9.9],
        "loss_checksum": "a" * 64,
        "ledger": entries,
    }


def bench(number: int) -> dict[str, Any]:
    speed = {"chain": 4e-9, "aminmax": 8e-11, "fused": 6e-11, "sum": 5e-11}
    points = [
        {
            "method": m,
            "dtype": "fp32",
            "numel": n,
            "seconds": [s * n, 1.1 * s * n, 1.05 * s * n],
            "extra_bytes": 5 * n if m == "chain" else 0,
        }
        for n in (1_000_000, 8_000_000, 64_000_000)
        for m, s in speed.items()
    ]
    return {**header("bench-overflow-test", "bench-overflow", number), "points": points}


KERNEL_SPEED = {"chain": 4e-9, "deepspeed": 4.1e-9, "isfinite": 2e-9, "aminmax": 8e-11, "fused": 6e-11, "sum": 5e-11}


def kernel_bench(number: int, numels: tuple[int, ...] = (1_000_000, 64_000_000, 300_000_000)) -> dict[str, Any]:
    """Make a record of memascend bench overflow; each method takes 20 us and a constant time per element."""
    points = [
        {
            "method": m,
            "dtype": "fp32",
            "numel": n,
            "seconds": [f * (2e-5 + s * n) for f in (1.0, 1.3, 1.1)],
            "bytes": 4 * n,
        }
        for n in numels
        for m, s in KERNEL_SPEED.items()
    ]
    more = {"benchmark": "overflow", "conditions": {"threads": 2}, "points": points, "summary": [{}]}
    return {**header("kernel-overflow-test", "bench", number), **more}


NVME_SPEED = {"engine": (1e-4, 2e9), "DeepNVMe": (2e-4, 2e9), "DeepNVMe, file per tensor": (3e-4, 1.6e9)}


def nvme_bench(number: int, sizes: tuple[int, ...] = (2097152, 33554432, 3114270720)) -> dict[str, Any]:
    """Make a record of memascend bench nvme; each method takes a
    constant time and then moves so many bytes per second."""
    points = [
        {"question": "sizes", "method": m, "op": op, "bytes": n,
         "seconds": [f * (start + n / speed) for f in (1.0, 1.3, 1.1)], "device_share": [1.0] * 3}
        for n in sizes for op in ("write", "read") for m, (start, speed) in NVME_SPEED.items()
    ]  # fmt: skip
    more = {"benchmark": "nvme", "target": "loop", "conditions": {"threads": 2}, "points": points, "summary": [{}]}
    return {**header("kernel-nvme-test", "bench", number), **more}


def probed(number: int) -> dict[str, Any]:
    drive = {"model": "virtual drive", "count": 1, "capacity_tb": 0.2749}
    testbed = {
        "cpu": "Example CPU",
        "sockets": 1,
        "cores": 2,
        "memory_gib": 16,
        "pcie": None,
        "gpus": [],
        "ssds": [drive],
    }
    return {**header("testbed-local", "testbed", number), "testbed": testbed}


def write_trace(path: Path, record: dict[str, Any]) -> None:
    """Write resident memory, sampled every 10 ms through the last check."""
    checks = [e for e in record.get("ledger", []) if e["owner"] == "overflow_check"]
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["t_s", "phase", "rss", "rss_anon", "rss_file", "rss_shmem", "locked"])
        for i in range(850, 1000):
            t = i / 100
            live = sum(e["reserved_bytes"] for e in checks if e["born_s"] <= t < e["died_s"])
            out.writerow(
                [
                    f"{t:.4f}",
                    "step2-optimizer" if i >= 900 else "step2-backward",
                    10**9 + live,
                    9 * 10**8 + live,
                    10**8,
                    0,
                    10**8,
                ]
            )


def write_records(folder: Path, records: list[dict[str, Any]]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for record in records:
        path = folder / f"{record['run_id']}.json"
        path.write_text(json.dumps(record))
        if record["kind"] == "training":
            write_trace(path.with_suffix(".trace.csv"), record)
        paths.append(path)
    return paths


def full_set() -> list[dict[str, Any]]:
    """Return the records of the quick profile."""
    runs = [(m, a, "fp16") for m in MODELS for a in ("as_published", "memascend")]
    runs += [(m, a, "bf16") for m in MODELS for a in ("as_published", "memascend")]
    runs += [("Qwen2.5-7B", a, "fp16") for a in ("today", "zero_offload")]
    runs += [(m, a, "fp16") for m in SMALL for a in ("as_published", "zero_offload")]
    return [
        bench(1),
        kernel_bench(99),
        nvme_bench(98),
        probed(0),
        *(training(m, a, d, 2 + i) for i, (m, a, d) in enumerate(runs)),
    ]


def smoke_set() -> list[dict[str, Any]]:
    """Return the records of the smoke profile: one model."""
    runs = [("Qwen2.5-7B", a, d) for d in ("fp16", "bf16") for a in ("as_published", "memascend")]
    runs += [("Llama3.2-1B", a, "fp16") for a in ("as_published", "zero_offload")]
    return [
        bench(1),
        kernel_bench(99, (1_000_000, 4_000_000)),
        nvme_bench(98, (2097152, 8388608)),
        probed(0),
        *(training(m, a, d, 2 + i) for i, (m, a, d) in enumerate(runs)),
    ]


def modelled_rows() -> list[dict[str, str]]:
    """Return a modelled lane by the paper's formulas, for the series and metrics that the claims read."""
    rows: list[dict[str, str]] = []

    def add(exhibit: str, series: str, model: str, metric: str, value: float, unit: str = "GiB", **more: str) -> None:
        cells = {"exhibit_id": exhibit, "series": series, "model": model, "metric": metric, "value": f"{value:.6g}"}
        rows.append(
            {**cells, "unit": unit, "lane": "modelled", "testbed": "memascend-c1", "source": "test formula", **more}
        )

    for model, (_, _, parameters, embedding) in {**SMALL, **MODELS}.items():
        flat, e = 4 * parameters, 2 * embedding
        spike, optimizer = 1.25 * flat, 11 * e
        rounding = power_of_two(flat) - flat + 20 * (power_of_two(e) - e)
        before, after = (
            flat + spike + 9 * e + optimizer + rounding + 1.63 * GIB,
            flat + 2.4 * e + optimizer + 1.63 * GIB,
        )
        baseline = "ZeRO-Infinity (as published)"
        for at in ("", ", batch 1 of 2048 tokens", ", batch 8 of 4096 tokens"):
            add("memascend-tab02", baseline, model, f"peak system memory{at}", before / GIB)
            add("memascend-tab02", "ZeRO-Offload", model, f"peak system memory{at}", 16.5 * parameters / GIB)
            add("memascend-tab02", "All in GPU", model, f"peak system memory{at}", 4.2)
            add("memascend-tab02", "All in GPU", model, f"peak device memory{at}", 18 * parameters / GIB)
        if model in SMALL:
            continue
        for metric, value in (("peak system memory", before), ("required", after), ("overhead", before - after)):
            add("memascend-fig04", baseline, model, metric, value / GIB)
        for series, pool, peak, extra in ((baseline, 9 * e, before, spike), ("MemAscend", 2.4 * e, after, 0)):
            add("memascend-fig11", series, model, "parameter buffer pool", pool / GIB)
            add("memascend-fig13", series, model, "overflow check overhead", extra / GIB)
            add("memascend-fig13", series, model, "gradient flat buffer", flat / GIB)
            add("memascend-fig15", series, model, "peak system memory", peak / GIB)
            add("memascend-fig21", series, model, "peak system memory", (peak - extra) / GIB)
            if model == "Qwen2.5-7B":
                parts = {"parameter buffer pool": pool, "overflow check overhead": extra, "gradient flat buffer": flat}
                parts |= {"optimizer-state and swap-out buffers": optimizer, "process overhead": 1.63 * GIB}
                parts |= {"pinned memory overhead": rounding if extra else 0, "peak system memory": peak}
                for metric, value in parts.items():
                    add("memascend-fig08", series, model, metric, value / GIB)
    seven = MODELS["Qwen2.5-7B"]
    least = {"gradient flat buffer": 4 * seven[2], "parameter buffer pool": 4.8 * seven[3]}
    for metric, value in {**least, "peak system memory": sum(least.values())}.items():
        add("memascend-fig08", "theoretical minimum", "Qwen2.5-7B", metric, value / GIB)
    for step, peak in (("isinf", 2.25), ("isnan", 1.25)):
        cells = {"x_name": "step", "x_value": step}
        add("memascend-fig03", "ZeRO-Infinity (as published)", "", "peak relative to tensor", peak, "x", **cells)
    return rows


def built_exhibits() -> list[str]:
    """Return the exhibits that are built by the registry."""
    entries = [entry for entry in registry.exhibits() if entry["status"] == "built" and entry["paper"] == "memascend"]
    return [entry["id"] for entry in entries if "measured" in entry["lanes"]]

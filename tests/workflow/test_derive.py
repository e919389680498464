"""From run records to the measured lane."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from workflow_fixtures import bench, full_set, probed, training, write_records

from workflows import cases, tidy
from workflows.derive import table
from workflows.derive.table import measured_rows, twin_k
from workflows.records import FIG08_METRICS, Run, apart, last_check, load, measured_on

ROOT = Path(__file__).resolve().parents[2]


def rows_of(records: list[dict], tmp_path: Path) -> pd.DataFrame:
    loaded = load(write_records(tmp_path, records))
    return measured_rows("memascend", loaded)


def test_modelled_lane_of_a_mistyped_paper_is_one_line(tmp_path: Path, monkeypatch) -> None:
    words = ["table", "--modelled-lane-of", "memasend", "--out", str(tmp_path / "x.csv")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"no paper 'memasend' \(did you mean memascend\?\)"):
        table.main()


def number(table: pd.DataFrame, **where: str) -> float:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, table
    return float(table["value"].iloc[0])


def test_records_of_two_machines_under_one_name_are_refused(tmp_path: Path) -> None:
    """Two nodes of a cluster may leave such records; a table would mix their numbers."""
    mine, theirs = training("Qwen2.5-7B", "as_published", "fp16", 1), training("Qwen2.5-7B", "as_published", "bf16", 1)
    theirs["host"] = {**theirs["host"], "cpu": "another processor"}
    with pytest.raises(tidy.TableError, match=r"fp16\S+json and \S+bf16\S+json are of two machines .*\(--config host="):
        apart(load(write_records(tmp_path, [mine, theirs])))
    theirs["host"]["name"] = "genoa"
    assert len(apart(load(write_records(tmp_path, [mine, theirs])))) == 2


def test_twin_bytes_are_given_raw_and_at_the_originals_size(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "as_published", "fp16", 1)
    table = rows_of([record], tmp_path)
    where = {"exhibit_id": "memascend-fig15", "series": tidy.AS_PUBLISHED}
    raw = number(table, metric="peak system memory", **where)
    assert raw == pytest.approx(record["memory"]["host_peak_net_bytes"] / tidy.GIB)
    assert number(table, metric="peak system memory (x k^2)", **where) == pytest.approx(64 * raw)


def test_components_and_unlisted_memory_add_up_to_the_peak(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "as_published", "fp16", 1)
    record["memory"]["host_peak_net_bytes"] += 5_000_000
    table = rows_of([record], tmp_path)
    mine = table[(table["exhibit_id"] == "memascend-fig08") & (table["series"] == tidy.AS_PUBLISHED)]
    parts = [*FIG08_METRICS, "not in the ledger"]
    total = sum(number(mine, metric=metric) for metric in parts)
    assert total == pytest.approx(number(mine, metric="peak system memory"))
    assert number(mine, metric="not in the ledger") == pytest.approx(5_000_000 / tidy.GIB)


def test_allocator_rounding_counts_as_pinned_memory_overhead(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "as_published", "bf16", 1)
    surplus = sum(e["reserved_bytes"] - e["requested_bytes"] for e in record["ledger"])
    components = Run(record, tmp_path / "x.json").components()
    assert components["pinned memory overhead"] == surplus > 0


def test_components_ignore_device_entries_and_those_dead_at_peak(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "memascend", "fp16", 1)
    before = Run(record, tmp_path / "x.json").components()
    for change in ({"role": "device"}, {"at_peak": False}):
        record["ledger"].append({**record["ledger"][0], **change})
    assert Run(record, tmp_path / "x.json").components() == before


def test_average_reduction_is_the_mean_over_four_models(tmp_path: Path) -> None:
    table = rows_of(full_set(), tmp_path)
    mine = table[(table["exhibit_id"] == "memascend-fig15") & (table["series"] == tidy.MEMASCEND)]
    singles = [number(mine, metric="reduction", model=model) for model in tidy.DENSE]
    assert number(mine, metric="average reduction") == pytest.approx(sum(singles) / 4)


def test_average_reduction_needs_all_four_models(tmp_path: Path) -> None:
    records = [training("Qwen2.5-7B", arm, "fp16", i) for i, arm in enumerate(("as_published", "memascend"))]
    table = rows_of(records, tmp_path)
    assert "average reduction" not in set(table["metric"])


def test_seeds_are_joined_by_the_median(tmp_path: Path) -> None:
    records = [training("Qwen2.5-7B", "memascend", "fp16", seed, seed=seed) for seed in range(3)]
    for record, extra in zip(records, (0, 1 << 20, 50 << 20), strict=True):
        record["memory"]["host_peak_net_bytes"] += extra
    table = rows_of(records, tmp_path)
    mine = table[(table["exhibit_id"] == "memascend-fig15") & (table["metric"] == "peak system memory")]
    assert number(mine) == pytest.approx(records[1]["memory"]["host_peak_net_bytes"] / tidy.GIB)
    assert len(mine["source"].iloc[0].split()) == 3


@pytest.mark.parametrize(("field", "other"), [("device", "cuda"), ("matmul", "fp32")])
def test_runs_with_different_device_or_matmul_are_never_joined(tmp_path: Path, field: str, other: str) -> None:
    records = [training("Qwen2.5-7B", arm, "fp16", i) for i, arm in enumerate(("as_published", "memascend") * 2)]
    for i, record in enumerate(records[2:]):
        record |= {field: other, "run_id": f"{record['run_id']}-{other}"}
        record["memory"]["host_peak_net_bytes"] += (i + 1) << 20
    mine = rows_of(records, tmp_path)
    mine = mine[mine["exhibit_id"] == "memascend-fig15"]
    peaks = mine[(mine["metric"] == "peak system memory") & (mine["series"] == tidy.MEMASCEND)]
    sizes = [record["memory"]["host_peak_net_bytes"] for record in records[1::2]]
    assert sorted(float(value) * tidy.GIB for value in peaks["value"]) == pytest.approx(sizes, rel=1e-6)
    reductions = mine[mine["metric"] == "reduction"]
    assert [len(source.split()) for source in reductions["source"]] == [2, 2]
    assert reductions["testbed"].nunique() == 2


def test_average_reduction_never_mixes_devices(tmp_path: Path) -> None:
    pairs = [training(m, arm, "fp16", i) for i, m in enumerate(tidy.DENSE) for arm in ("as_published", "memascend")]
    for record in pairs[-2:]:
        record["device"] = "cuda"
    assert "average reduction" not in set(rows_of(pairs, tmp_path)["metric"])


def test_series_names_follow_the_labels_of_systems_and_arms(tmp_path: Path) -> None:
    """Claims and figures select by these names."""
    named = {
        ("zero_infinity", "as_published"): "ZeRO-Infinity (as published)",
        ("zero_infinity", "aminmax"): "ZeRO-Infinity (aminmax)",
        ("zero_infinity", "today"): "ZeRO-Infinity (DeepSpeed 0.19.8)",
        ("zero_infinity", "today_016"): "ZeRO-Infinity (DeepSpeed 0.19.8)",
        ("memascend", "memascend"): "MemAscend",
        ("zero_offload", "today"): "ZeRO-Offload",
        ("all_in_gpu", "today"): "All in GPU",
        ("in_memory", "torch_adamw"): "In memory (torch AdamW)",
    }
    record = training("Qwen2.5-7B", "memascend", "fp16", 1)
    for (system, arm), series in named.items():
        assert Run(record | {"system": system, "arm": arm}, tmp_path / "x.json").series == series


@pytest.mark.parametrize(("system", "arm"), [("lohann", "as_published"), ("zero_infinity", "as_publishedd")])
def test_record_of_an_unknown_system_or_arm_is_refused(tmp_path: Path, system: str, arm: str) -> None:
    record = training("Qwen2.5-7B", "memascend", "fp16", 1) | {"system": system, "arm": arm}
    with pytest.raises(tidy.TableError, match=r"x\.json: .*(unknown system 'lohann'|no arm 'as_publishedd')"):
        _ = Run(record, tmp_path / "x.json").series


def test_a_run_out_of_memory_is_a_result(tmp_path: Path) -> None:
    record = training("Llama3.2-1B", "zero_offload", "fp16", 1)
    for field in ("memory", "ledger", "losses", "phases"):
        del record[field]
    record["status"] = "oom"
    table = rows_of([record], tmp_path)
    mine = table[(table["exhibit_id"] == "memascend-tab02")]
    assert list(mine["value"]) == ["N/A (out of memory)"]


def test_timeline_covers_the_last_check_and_peaks_at_its_spike(tmp_path: Path) -> None:
    records = [training("Qwen2.5-7B", arm, "fp16", i) for i, arm in enumerate(("as_published", "memascend"))]
    table = rows_of(records, tmp_path)
    live = table[table["metric"] == "live tensors relative to the flat buffer"].assign(
        x=lambda t: t["value"].astype(float)
    )
    assert live.loc[live["series"] == tidy.AS_PUBLISHED, "x"].max() == pytest.approx(2.25, abs=1e-3)
    assert live.loc[live["series"] == tidy.AS_PUBLISHED, "x_value"].astype(float).max() == pytest.approx(600, abs=1)
    assert set(live.loc[live["series"] == tidy.MEMASCEND, "x"]) == {1.0}
    resident = table[table["metric"] == "resident memory relative to the flat buffer"]
    assert resident["value"].astype(float).max() == pytest.approx(2.25, abs=1e-3)


def test_benchmark_rows_have_median_latency_and_relative_memory(tmp_path: Path) -> None:
    table = rows_of([bench(1)], tmp_path)
    chain = table[(table["metric"] == "overflow check latency") & (table["series"] == tidy.AS_PUBLISHED)]
    assert number(chain, x_value="1000000") == pytest.approx(1.05 * 4e-9 * 1e6 * 1e3)
    assert number(table, metric="extra memory relative to the buffer", series=tidy.AS_PUBLISHED) == 1.25


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"status": "burnt"}, "status"),
        ({"key": "abc"}, "key"),
        ({"memory": {}}, "memory"),
    ],
)
def test_record_that_breaks_the_schema_is_refused_naming_the_field(tmp_path: Path, change: dict, place: str) -> None:
    paths = write_records(tmp_path, [training("Qwen2.5-7B", "memascend", "fp16", 1) | change])
    with pytest.raises(tidy.TableError, match=place):
        load(paths)


def test_ledger_entry_owned_by_other_is_refused(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "memascend", "fp16", 1)
    record["ledger"][0]["owner"] = "other"
    with pytest.raises(tidy.TableError, match="ledger/0/owner"):
        load(write_records(tmp_path, [record]))


def test_truncated_record_gives_one_error_line(tmp_path: Path) -> None:
    path = tmp_path / "train-x.json"
    path.write_text(json.dumps(training("Qwen2.5-7B", "memascend", "fp16", 1))[:500])
    words = ["-m", "workflows.derive.table", "--exhibit", "memascend-fig15", "--published", "results/published"]
    words += ["--records", str(path), "--out", str(tmp_path / "out.csv")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


def test_probed_machine_appears_in_both_testbed_tables(tmp_path: Path) -> None:
    table = rows_of([probed(1)], tmp_path)
    assert set(table["exhibit_id"]) == {"memascend-tab03", "memascend-tab05"}
    mine = table[table["exhibit_id"] == "memascend-tab05"].set_index("x_value")["value"]
    assert dict(mine) == {
        "CPU": "Example CPU, 2 cores",
        "CPU Memory": "16 GiB",
        "PCIe": "not visible",
        "GPU": "none",
        "SSD": "1 × virtual drive (0.275 TB)",
    }


def test_last_check_is_distinguished_from_one_shortly_before(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "as_published", "fp16", 1)
    for entry in record["ledger"]:
        if entry["owner"] == "overflow_check" and entry["born_s"] < 9:
            entry["born_s"], entry["died_s"] = entry["born_s"] + 3.2, entry["died_s"] + 3.2
    changes = last_check(record)
    assert len(changes) == 6
    assert changes[0][0] == 9.0


def test_different_time_twins_and_path_kinds_are_never_joined() -> None:
    base = {"model": "llama3.1-8b", "twin": {"k": 4}, "host": {"name": "here"}}
    cells = [("memascend-c1", 80, 0), ("memascend-c2", 8, 0), ("memascend-c2", 8, 0.4)]
    twins = [base | {"time_twin": {"testbed": t, "cell": {"batch": b}, "cpu_share": s}} for t, b, s in cells]
    places = [measured_on(record) for record in (base, *twins, base | {"duplex": True}, base | {"duplex": False})]
    assert len(set(places)) == len(places)
    assert {twin_k(place) for place in places} == {4}
    rows = [cases.row("x", "step time", 1.0 + n, "s", "measured", "key", testbed=p) for n, p in enumerate(places)]
    assert cases.join_seeds(rows) == rows

"""CXL-aware allocation, measured rows: DRAM's curves of Figs. 4 and 5, and Fig. 2 at the original's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from workflow_fixtures import header, training, write_records

from workflows.derive.table import measured_rows
from workflows.records import load
from workflows.tidy import SCALED

GIB = 2**30


def bench(benchmark: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    more = {"benchmark": benchmark, "conditions": {"threads": 2}, "points": points, "summary": [{}]}
    return header(f"kernel-{benchmark}-test", "bench", 7) | more


def rows_of(folder: Path, record: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return the values by (metric, series, x)."""
    rows = measured_rows("cxl", load(write_records(folder, [record])))
    assert set(rows["lane"]) <= {"measured"}
    return {(r.metric, r.series, r.x_value): float(r.value) for r in rows.itertuples()}


def test_fig_4_shows_median_latency_of_local_dram_only(tmp_path: Path) -> None:
    node = {"method": "node 0", "node": 0, "memory_only": False}
    points = [node | {"bytes": 32 << 10, "seconds": [1e-9, 2e-9, 9e-9]}, node | {"bytes": 1 << 28, "seconds": [1.2e-7]}]
    points += [{"method": "node 1", "node": 1, "memory_only": True, "bytes": 1 << 28, "seconds": [3e-7]}]
    found = rows_of(tmp_path, bench("latency", points))
    assert found == {
        ("access latency", "local DRAM", "32"): pytest.approx(2.0),
        ("access latency", "local DRAM", "262144"): pytest.approx(120.0),
    }


def test_fig_5_shows_deepspeeds_adam_and_ours_by_element_count(tmp_path: Path) -> None:
    ways = {"deepspeed": 0.5, "fp32": 0.4, "torch_mul": 0.1}
    points = [{"method": m, "numel": 10**7, "bytes": 1, "seconds": [s, s, 9.0]} for m, s in ways.items()]
    assert rows_of(tmp_path, bench("adamw", points)) == {
        ("optimizer time", "local DRAM", "10000000"): pytest.approx(500.0),
        ("optimizer time", "local DRAM, our AdamW", "10000000"): pytest.approx(400.0),
    }


def test_fig_2_scales_the_twins_peak_by_k_squared(tmp_path: Path) -> None:
    record = training("Qwen2.5-7B", "zero_offload", "bf16", 5, k=32)
    record |= {"model": "mistral-nemo-12b", "system": "cxl", "arm": "baseline", "gpus": 2}
    none = {"checkpoint_store_requested_bytes": 0, "checkpoint_store_reserved_bytes": 0}
    points = [
        none | {"sequence": context // 32, "batch": 10, "memory": record["memory"] | {"host_peak_net_bytes": nbytes}}
        for context, nbytes in ((512, GIB // 4), (32768, GIB // 2))
    ]
    record |= {"points": points, "points_requested": [[16, 10], [1024, 10]]}
    found = rows_of(tmp_path, record)
    assert found["system memory", "12B", "512"] == pytest.approx(0.25)
    assert found["system memory" + SCALED, "12B", "512"] == pytest.approx(256.0)
    assert found["system memory" + SCALED, "12B", "32768"] == pytest.approx(512.0)
    for measured in ("points", "memory", "ledger", "losses", "phases"):
        record.pop(measured)
    record["status"] = "timeout"
    assert rows_of(tmp_path, record) == {}

"""MemAscend Fig. 14: medians, gains over the sizes, and their reference."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from workflow_fixtures import NVME_SPEED, nvme_bench, write_records

from workflows import tidy
from workflows.derive.table import measured_rows
from workflows.papers.memascend.rows import nvme as nvme_latency
from workflows.records import load

SIZES = (2097152, 33554432, 3114270720)


def table_of(record: dict, folder: Path) -> pd.DataFrame:
    derived = measured_rows("memascend", load(write_records(folder, [record])))
    table = pd.DataFrame(derived).reindex(columns=tidy.COLUMNS, fill_value="").fillna("")
    return table[table["exhibit_id"] == nvme_latency.EXHIBIT]


def number(table: pd.DataFrame, **where: str) -> float:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, table
    return float(table["value"].iloc[0])


def seconds(way: str, size: int) -> float:
    start, speed = NVME_SPEED[way]
    return 1.1 * (start + size / speed)


def test_each_size_has_the_median_and_quartiles_of_its_rounds(tmp_path: Path) -> None:
    table = table_of(nvme_bench(1), tmp_path)
    where = {"series": tidy.MEMASCEND, "x_value": "2097152"}
    assert number(table, metric="write latency", **where) == pytest.approx(1e6 * seconds("engine", SIZES[0]))
    low, high = (number(table, metric=f"write latency{end}", **where) for end in nvme_latency.ENDS[::2])
    assert (low, high) == pytest.approx(tuple(1e6 * seconds("engine", SIZES[0]) * f / 1.1 for f in (1.05, 1.2)))
    rate = number(table, metric="read bandwidth", series=nvme_latency.ZERO_INFINITY, x_value="3114270720")
    assert rate == pytest.approx(SIZES[2] / seconds("DeepNVMe, file per tensor", SIZES[2]) / 1e9)
    assert set(table["subfigure"]) == set("abcd")


def test_gains_are_relative_to_one_file_per_tensor_and_averaged(tmp_path: Path) -> None:
    table = table_of(nvme_bench(1), tmp_path)
    ratios = [seconds("DeepNVMe, file per tensor", size) / seconds("engine", size) for size in SIZES]
    assert number(table, metric=f"{nvme_latency.GAIN}, up to") == pytest.approx(max(ratios))
    average = number(table, metric=f"{nvme_latency.GAIN}, average")
    assert average == pytest.approx(100 * (sum(ratios) / len(ratios) - 1))
    assert number(table, metric=nvme_latency.READS) > 1


def test_record_without_deepnvme_gives_times_but_no_gains(tmp_path: Path) -> None:
    record = nvme_bench(1)
    record["points"] = [p for p in record["points"] if p["method"] == "engine"]
    table = table_of(record, tmp_path)
    assert not table["metric"].str.contains("improvement|relative").any()
    assert len(table) == 2 * 2 * 3 * len(SIZES)


def test_results_of_further_workers_are_ignored(tmp_path: Path) -> None:
    record = nvme_bench(1)
    record["points"] += [{**p, "method": "engine, 2 workers"} for p in record["points"] if p["method"] == "engine"]
    assert table_of(record, tmp_path).equals(table_of(nvme_bench(1), tmp_path / "plain"))

"""MemAscend Fig. 12: measured values, extrapolation by a line, and that both are distinguished."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from workflow_fixtures import KERNEL_SPEED, MODELS, kernel_bench, write_records

from workflows import tidy
from workflows.derive.table import measured_rows
from workflows.papers.memascend.rows import checks as check_latency
from workflows.records import load


def rows_of(record: dict, folder: Path) -> pd.DataFrame:
    derived = measured_rows("memascend", load(write_records(folder, [record])))
    return pd.DataFrame(derived).reindex(columns=tidy.COLUMNS, fill_value="").fillna("")


def number(table: pd.DataFrame, **where: str) -> float:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, table
    return float(table["value"].iloc[0])


def test_a_measured_size_has_its_median_and_quartiles(tmp_path: Path) -> None:
    table = rows_of(kernel_bench(1), tmp_path)
    where = {"series": tidy.AS_PUBLISHED, "lane": "measured", "x_value": "1000000"}
    once = 1e3 * (2e-5 + 4e-9 * 1e6)
    assert number(table, metric=check_latency.LATENCY, **where) == pytest.approx(1.1 * once)
    assert number(table, metric=check_latency.LOW, **where) == pytest.approx(1.05 * once)
    assert number(table, metric=check_latency.HIGH, **where) == pytest.approx(1.2 * once)


def test_todays_deepspeed_is_a_separate_series_named_with_its_release(tmp_path: Path) -> None:
    table = rows_of(kernel_bench(1), tmp_path)
    assert "ZeRO-Infinity (DeepSpeed 0.19.8)" in set(table["series"])


def test_unmeasured_model_is_extrapolated_and_its_source_says_so(tmp_path: Path) -> None:
    record = kernel_bench(1)
    table = rows_of(record, tmp_path)
    mine = table[(table["model"] == "Qwen2.5-14B") & (table["metric"] == check_latency.LATENCY)]
    assert set(mine["lane"]) == {"modelled"}
    parameters = MODELS["Qwen2.5-14B"][2]
    for series, method in ((tidy.AS_PUBLISHED, "chain"), (tidy.MEMASCEND, "fused")):
        expected = 1.1 * 1e3 * (2e-5 + KERNEL_SPEED[method] * parameters)
        assert number(mine, series=series) == pytest.approx(expected, rel=1e-6)
        source = mine.loc[mine["series"] == series, "source"].iloc[0]
        assert "line through 3 measured sizes up to 3e+08 elements" in source
        assert record["key"] in source


def test_measured_rows_stop_at_the_largest_measured_size(tmp_path: Path) -> None:
    table = rows_of(kernel_bench(1), tmp_path)
    measured = table[(table["lane"] == "measured") & table["x_value"].str.isdigit()]
    assert measured["x_value"].astype(int).max() == 300_000_000
    assert set(measured["model"]) == {""}


def test_reductions_are_averaged_over_sizes_beyond_the_caches(tmp_path: Path) -> None:
    table = rows_of(kernel_bench(1), tmp_path)
    measured = table[table["lane"] == "measured"]
    each = [number(measured, metric=check_latency.REDUCTION, x_value=n) for n in ("64000000", "300000000")]
    assert each[0] == pytest.approx(100 * (1 - (2e-5 + 6e-11 * 64e6) / (2e-5 + 4e-9 * 64e6)))
    assert number(measured, metric=check_latency.AVERAGE) == pytest.approx(sum(each) / 2)
    assert number(table, metric=check_latency.AVERAGE, lane="modelled") == pytest.approx(98.5, abs=0.01)


def test_small_sizes_give_no_growth_exponent_and_no_average(tmp_path: Path) -> None:
    table = rows_of(kernel_bench(1, (1_000_000, 4_000_000)), tmp_path)
    measured = set(table.loc[table["lane"] == "measured", "metric"])
    assert not measured & {check_latency.AVERAGE, check_latency.EXPONENT}


@pytest.mark.parametrize("exponent", [1.0, 1.3])
def test_growth_exponent_is_fitted_beyond_the_caches(exponent: float) -> None:
    line = {n: 1e-9 * n**exponent for n in (1_000_000, 64_000_000, 128_000_000, 300_000_000)}
    line[1_000_000] *= 100  # in the caches, so it must be ignored
    assert check_latency.growth_exponent(line) == pytest.approx(exponent)


def test_one_size_gives_no_line() -> None:
    assert check_latency.straight_line({64_000_000: 1.0}) is None

"""From sweeps, stacks, curves and step times to the measured lane."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from sweep_fixtures import POINTS, curve, stacks, step_times, sweep
from workflow_fixtures import write_records

from workflows import tidy
from workflows.derive.table import measured_rows
from workflows.papers.memascend.rows import sweeps
from workflows.records import load


def rows_of(records: list[dict], folder: Path) -> pd.DataFrame:
    derived = measured_rows("memascend", load(write_records(folder, records)))
    return pd.DataFrame(derived).reindex(columns=tidy.COLUMNS, fill_value="").fillna("")


def number(table: pd.DataFrame, **where: str) -> float:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, table
    return float(table["value"].iloc[0])


@pytest.fixture
def seven(tmp_path: Path) -> pd.DataFrame:
    return rows_of([sweep("Qwen2.5-7B", "as_published", 1), sweep("Qwen2.5-7B", "memascend", 2)], tmp_path)


def test_sweep_point_is_placed_at_the_originals_context_and_size(seven: pd.DataFrame) -> None:
    where = {"exhibit_id": "memascend-fig16", "series": tidy.MEMASCEND, "x_name": "context (tokens)"}
    small, large = (
        number(seven, metric="peak system memory" + tidy.SCALED, x_value=x, **where) for x in ("4096", "131072")
    )
    assert large - small == pytest.approx(2 * (131_072 - 4096) * 28 * 3584 * 2 / tidy.GIB)  # Eq. 1 on two GPUs


def test_context_sweep_fixes_the_batch_and_batch_sweep_the_context(seven: pd.DataFrame) -> None:
    where = seven[(seven["metric"] == "peak system memory") & (seven["series"] == tidy.MEMASCEND)]
    found = {e: set(where.loc[where["exhibit_id"] == f"memascend-{e}", "x_value"]) for e in ("fig09", "fig10")}
    assert found["fig09"] == {str(context) for context, batch in POINTS if batch == 1}
    assert found["fig10"] == {str(batch) for context, batch in POINTS if context == 4096}


def test_as_published_peaks_plateau_and_memascend_peaks_do_not(seven: pd.DataFrame) -> None:
    where = {"exhibit_id": "memascend-fig09", "metric": "peak system memory"}
    for series, same in ((tidy.AS_PUBLISHED, True), (tidy.MEMASCEND, False)):
        peaks = [number(seven, series=series, x_value=x, **where) for x in ("16384", "20480")]
        assert (peaks[0] == peaks[1]) is same


def test_memascend_growth_equals_equation_1(seven: pd.DataFrame) -> None:
    where = {"exhibit_id": "memascend-fig09", "metric": "growth relative to Equation 1"}
    assert number(seven, series=tidy.MEMASCEND, **where) == pytest.approx(1.0)
    assert number(seven, series=tidy.AS_PUBLISHED, **where) > 1.2


def test_largest_context_is_given_only_if_the_sweep_reaches_it(tmp_path: Path) -> None:
    record = sweep("Qwen2.5-7B", "memascend", 1)
    largest = {"exhibit_id": "memascend-fig09", "metric": "largest context", "x_value": "128"}
    assert number(rows_of([record], tmp_path / "whole"), **largest) == 131_072
    record["points"] = [p for p in record["points"] if p["sequence"] * 32 < 100_000]
    short = rows_of([record], tmp_path / "short")
    assert short[short["metric"] == "largest context"].empty


def test_two_real_ranks_match_one_with_both_sequences(tmp_path: Path) -> None:
    one, two = sweep("Qwen2.5-7B", "memascend", 1), sweep("Qwen2.5-7B", "memascend", 2, ranks=2)
    table = rows_of([one, two], tmp_path)
    where = {"exhibit_id": "memascend-fig09", "metric": "peak system memory", "x_value": "16384"}
    alone, pair = (number(table, testbed=f"local/qwen2.5-7b-k32{end}", **where) for end in ("", "-r2"))
    assert pair == pytest.approx(alone)


def test_sweep_contributes_to_no_exhibit_of_plain_runs(seven: pd.DataFrame) -> None:
    assert not set(seven["exhibit_id"]) & {"memascend-fig04", "memascend-fig15", "memascend-fig08"}


def test_each_stack_has_its_device_peak_at_both_contexts(tmp_path: Path) -> None:
    table = rows_of([stacks(1)], tmp_path)
    mine = table[table["metric"] == "peak device memory"]
    assert dict(mine.groupby("series").size()) == dict.fromkeys(sweeps.STACK_NAMES.values(), 2)
    assert set(mine["x_value"]) == {"512", "32768"}
    assert number(table, metric="batch size", series="+GC", x_value="32768") == 1


@pytest.mark.parametrize("nudge", [0.0, 1e-6])
def test_the_largest_difference_of_two_curves_is_found(tmp_path: Path, nudge: float) -> None:
    table = rows_of([curve("as_published", 1), curve("memascend", 2, nudge)], tmp_path)
    found = number(table, metric="largest difference in training loss", series=tidy.MEMASCEND)
    assert found == pytest.approx(nudge, rel=1e-6)
    assert number(table, metric="largest difference in evaluation loss") == 0


def test_one_curve_alone_has_no_difference(tmp_path: Path) -> None:
    table = rows_of([curve("memascend", 2)], tmp_path)
    assert not table["metric"].str.startswith("largest").any()


def test_improvement_is_the_median_of_ratios_within_rounds(tmp_path: Path) -> None:
    table = rows_of([step_times("qwen2.5-7b", 1)], tmp_path)
    where = {
        "exhibit_id": "memascend-tab04",
        "metric": "throughput improvement",
        "series": "MemAscend vs ZeRO-Infinity",
    }
    for batch in (1, 4):
        ratios = [(3 * batch + 1.1 * f) / (3 * batch + f) for f in (1, 1, 1.3)]
        assert number(table, x_value=str(batch), **where) == pytest.approx(100 * (sorted(ratios)[1] - 1))
    gains = {"exhibit_id": "memascend-tab04", "metric": "smallest gain from the smaller batch"}
    assert number(table, **gains) > 0


def test_old_arm_direct_only_is_read_as_as_published_direct(tmp_path: Path) -> None:
    record, older = step_times("qwen2.5-7b", 1), step_times("qwen2.5-7b", 1)
    for point in older["points"]:
        if point["arm"] == "as_published_direct":
            point |= {"system": "memascend", "arm": "direct_only"}
    now, then = (rows_of([each], tmp_path / name) for name, each in (("now", record), ("then", older)))
    assert now.equals(then)
    assert "zero_infinity as_published_direct fp16" in set(now["series"])


def test_other_deepspeed_in_the_same_rounds_is_compared_with_memascend(tmp_path: Path) -> None:
    """An arm of the same name in two environments counts as two arms.
    MemAscend's own seconds are rows of another record."""
    record = step_times("qwen2.5-7b", 1)
    mine = next(p for p in record["points"] if p["arm"] == "memascend" and p["dtype"] == "fp16" and p["batch"] == 1)
    old = mine | {"system": "zero_infinity", "arm": "as_published", "forward_s": [2.0, 2.0, 8.0]}
    record["points"] = [mine, old | {"environment": "deepspeed_016"}, old | {"forward_s": [1.5] * 3}]
    table = rows_of([record], tmp_path)
    where = {"exhibit_id": "memascend-tab04", "metric": "step time over MemAscend's", "x_value": "1"}
    step = 3 + mine["optimizer_s"][0]
    for series, more in (
        ("zero_infinity as_published fp16", 0.5),
        ("zero_infinity as_published fp16 deepspeed_016", 1),
    ):
        assert number(table, series=series, **where) == pytest.approx((step + more) / step)
    assert not (table["series"] == "memascend memascend fp16").any()


def test_scattered_rounds_give_no_smallest_improvement(tmp_path: Path) -> None:
    record = step_times("qwen2.5-7b", 1)
    busy = next(p for p in record["points"] if p["arm"] == "memascend" and p["dtype"] == "fp16")
    busy["backward_s"] = [2.0, 6.0, 2.0]
    table = rows_of([record], tmp_path)
    mine = table[(table["exhibit_id"] == "memascend-tab04") & (table["metric"] == "smallest improvement")]
    assert mine["value"].str.startswith("N/A (quartiles").all()
    assert len(mine) == 1
    quiet = table[(table["exhibit_id"] == "memascend-tab06") & (table["metric"] == "smallest improvement")]
    assert float(quiet["value"].iloc[0]) > 0


def test_io_is_given_per_parameter_and_at_the_originals_size(tmp_path: Path) -> None:
    table = rows_of([step_times("qwen2.5-7b", 1)], tmp_path)
    where = {"exhibit_id": "memascend-fig20", "series": "MemAscend + bf16 optimizer"}
    assert number(table, metric="I/O per parameter", **where) == pytest.approx(22.0)
    twin, whole = (number(table, metric="I/O volume per iteration" + s, **where) for s in ("", tidy.SCALED))
    assert whole == pytest.approx(32**2 * twin)

"""Figs. 6, 7 and 8a measured: from a record of `memascend bench activations` to rows, calculated manually."""

import pytest

from workflows.papers.ssdtrain.rows import measured

GIB = 2**30
PEAKS = {"keep": 1.0, "recompute": 0.4, "ssd": 0.5}
SECONDS = {"keep": 2.0, "recompute": 2.5, "ssd": 2.1}


def record(model="H12288 L3", k=16, batches=(1, 8, 16), **changes):
    points = [
        {
            "batch": batch,
            "method": way,
            "seconds": [SECONDS[way] * batch] * 3,
            "peak_bytes": [PEAKS[way] * batch * 2**20] * 3,
            "update_s": [0.5] * 3,
            "written_bytes": [2**20 * batch] * 3,
            "waited_s": [0.0 if way == "keep" else 0.042 * batch] * 3,
        }
        for batch in reversed(batches)
        for way in PEAKS
    ]
    made = {"kind": "bench", "status": "ok", "benchmark": "activations", "key": "k" * 64, "host": {"name": "here"}}
    asked = {"points_requested": {"model": model}, "options": {"twin": k, "context": 64}}
    summary = [{"batch": batch, "way": "ssd", "predicted_peak_reduction": 0.48} for batch in batches]
    return made | asked | {"points": points, "summary": summary} | changes


def found(rows, exhibit, metric, series="SSDTrain", **cells):
    mine = [r for r in rows if (r["exhibit_id"], r["metric"], r["series"]) == (exhibit, metric, series)]
    return [r for r in mine if all(r[name] == value for name, value in cells.items())]


def number(rows, *args, **cells):
    (row,) = found(rows, *args, **cells)
    assert (row["lane"], row["source"]) == ("measured", "k" * 64)
    return float(row["value"])


def test_fig_6_compares_peak_seconds_and_waits_at_batch_16():
    rows = list(measured([record()]))
    assert number(rows, "ssdtrain-fig06", "activation peak reduction") == 50
    assert number(rows, "ssdtrain-fig06", "step time overhead") == pytest.approx(5)
    assert number(rows, "ssdtrain-fig06", "waits for the cache") == pytest.approx(2)
    # 16 MiB of the twin are 16 * 256 MiB of the original, on two GPUs.
    assert number(rows, "ssdtrain-fig06", "activation peak (x k^2)", "No offloading") == 2
    assert found(rows, "ssdtrain-fig06", "step time overhead")[0]["testbed"] == "here/H12288 L3-k16"
    assert number(rows, "ssdtrain-fig06", "activation peak reduction, predicted") == 48
    assert number(rows, "ssdtrain-tab03", "offloaded_amount (GiB)") == 2  # 16 MiB of the twin, as above
    assert number(rows, "ssdtrain-tab03", "offloaded_amount") == pytest.approx(2 * GIB / 1e9)
    deeper = record("H8192 L12") | {"key": "d" * 64}  # shown, but not one of the paper's three
    both = list(measured([record(), record("H8192 L4"), deeper]))
    (least,) = found(both, "ssdtrain-fig06", "activation_peak_reduction_min")
    assert (least["value"], least["testbed"], least["source"]) == ("50", "here/twins", f"{'k' * 64} {'k' * 64}")


def test_fig_7_has_one_point_per_batch_and_claimed_ratios():
    rows = list(measured([record()]))
    points = found(rows, "ssdtrain-fig07a", "model throughput of the twin")
    assert [point["x_value"] for point in points] == ["0.0625", "0.5", "1"]
    assert number(rows, "ssdtrain-fig07a", "throughput over keeping") == pytest.approx(1 / 1.05)
    assert number(rows, "ssdtrain-fig07a", "peak over recomputing") == pytest.approx(1.25)
    assert number(rows, "ssdtrain-fig07a", "batch_size_gain", "SSDTrain vs keep") == 2
    other = {row["exhibit_id"] for row in measured([record("H14336 L3", batches=(8, 16))])}
    assert other == {"ssdtrain-fig07b"}


def test_fig_8a_shows_cost_per_sequence_by_batch():
    rows, base = list(measured([record()])), "No offloading"
    assert number(rows, "ssdtrain-fig08a", "weights update of the twin", base, model="batch 8") == 1000 * 0.5 / 8
    gain = number(rows, "ssdtrain-fig08a", "throughput improvement over batch 1", base, model="batch 8")
    assert gain == pytest.approx(100 * (2.5 / (2 + 0.5 / 8) - 1))
    share = "share of the gain that is the update's"
    # the other time per sequence is the same
    assert number(rows, "ssdtrain-fig08a", share, base, model="batch 16") == 100


@pytest.mark.parametrize("changes", [{"status": "timeout"}, {"benchmark": "nvme"}, {"kind": "training"}])
def test_other_records_give_no_rows(changes):
    assert list(measured([record(**changes)])) == []


def test_record_without_recomputation_still_gives_rows():
    short = record()
    short["points"] = [point for point in short["points"] if point["method"] in ("keep", "ssd")]
    rows = list(measured([short]))
    assert number(rows, "ssdtrain-fig06", "activation peak reduction") == 50
    assert not found(rows, "ssdtrain-fig07a", "peak over recomputing")

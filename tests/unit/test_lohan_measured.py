"""Figs. 3, 7a, 9b, 10b and 12 measured: from a record of `memascend bench engine` to rows, calculated manually."""

import pytest

from workflows import registry
from workflows.papers.lohan.rows import measured, settings, twins

WAYS = {"memory": 4.0, "optimized": 5.0, "naive": 6.0, "none": 8.0}


def record(ways, points, **more):
    made = {"kind": "bench", "status": "ok", "benchmark": "engine", "key": "k" * 64, "host": {"name": "here"}}
    return (
        made
        | {"options": {"model": "13B-padded.json", "path_rate": 1e9, "twin": 16, "ways": list(ways)}, "points": points}
        | more
    )


def point(context, way, seconds, **more):
    # a machine that slows down: ratios are taken within a round
    rounds = [seconds * factor for factor in (1.0, 2.0, 1.5)]
    phases = {"forward_s": [seconds / 4] * 3, "backward_s": [3 * seconds / 4] * 3}
    return {
        "context": context,
        "method": way,
        "seconds": rounds,
        **phases,
        "read": [2e9] * 3,
        "written": [1e9] * 3,
    } | more


def found(*records):
    return {(row["metric"], row["series"], row.get("x_value", ""), row["lane"]): row for row in measured(list(records))}


@pytest.mark.parametrize("key", ["predicted", "foretold"])  # the latter is in older records
def test_arms_give_throughput_and_ratios_next_to_predictions(key):
    points = [point(c, way, s * c / 768) for c in (384, 768) for way, s in WAYS.items()]
    said = [{"context": c, "method": way, "seconds": 4.5 * c / 768} for c in (384, 768) for way in WAYS]
    made = record(WAYS, points, **{key: said})
    made["options"]["path_rate"] = 1.63e9
    rows = found(made)

    def value(metric, series, at, lane="measured"):
        return float(rows[metric, series, at, lane]["value"])

    ratio = rows["throughput_ratio", "LoHan Optimized / Naive", "64", "measured"]
    assert float(ratio["value"]) == pytest.approx(1.2)
    assert ratio["exhibit_id"] == "lohan-fig07a"
    assert value("throughput_ratio", "LoHan Optimized / LoHan+ZeRO", "32") == pytest.approx(1.6)
    assert value("throughput of the twin", "LoHan Naive", "32") == pytest.approx(384 / 4.5)
    assert value("throughput of the twin", "LoHan Naive", "32", "modelled") == pytest.approx(384 / 2.25)
    assert value("ratio of seconds of the twin", "device / SSD", "64") == pytest.approx(4 / (3 / 1.63))
    assert value("ratio of seconds", "device / SSD", "64", "modelled") == pytest.approx(2.17, rel=0.03)


@pytest.mark.parametrize(("rate", "is_met"), [(1.45e9, False), (1.5e9, True), (1.75e9, True), (1.85e9, False)])
def test_twin_with_another_device_ssd_ratio_has_no_throughput_ratio(rate, is_met):
    made = record(WAYS, [point(768, way, seconds) for way, seconds in WAYS.items()])
    made["predicted"] = [{"context": 768, "method": way, "seconds": 4.5} for way in WAYS]
    made["options"]["path_rate"] = rate
    rows = {name: row for name, row in found(made).items() if name[0] == "throughput_ratio"}
    assert len(rows) == 2
    for row in rows.values():
        assert row["value"].startswith("N/A (device : SSD is ") != is_met


def test_ratio_whose_rounds_scatter_is_no_number():
    points = [point(768, way, seconds) for way, seconds in WAYS.items()]
    naive = next(each for each in points if each["method"] == "naive")
    naive["seconds"] = [a * b for a, b in zip(naive["seconds"], (1.0, 1.5, 2.0), strict=True)]
    made = record(WAYS, points, predicted=[{"context": 768, "method": way, "seconds": 4.5} for way in WAYS])
    made["options"]["path_rate"] = 1.63e9
    rows = found(made)
    of = "throughput_ratio", "LoHan Optimized / Naive", "64", "measured"
    assert rows[of]["value"] == "N/A (quartiles 1.50 and 2.10: the machine was busy)"
    of = "throughput_ratio", "LoHan Optimized / LoHan+ZeRO", "64", "measured"
    assert float(rows[of]["value"]) == pytest.approx(1.6)


@pytest.mark.parametrize(("rate", "drives"), [(500e6, {"6", "12"}), (335e6, {"3"}), (112e6, {"1"}), (150e6, set())])
def test_path_rate_determines_how_many_drives_it_represents(rate, drives):
    points = [point(768, "memory", 4.0), point(768, "optimized", 5.0)]
    made = record(["memory", "optimized"], points, predicted=[{"context": 768, "method": "optimized", "seconds": 5.0}])
    made["options"]["path_rate"] = rate
    rows = found(made)
    assert {at for _, _, at, _ in rows} == drives
    for at in drives:
        assert float(rows["throughput of the twin", "bsz=64", at, "measured"]["value"]) == pytest.approx(768 / 7.5)
        assert float(rows["throughput of the twin", "bsz=64", at, "modelled"]["value"]) == pytest.approx(768 / 5)


def test_diffusion_rows_use_model_size_and_feasible_fast_dit_batch():
    points = [point(images, way, images / 4) for images in (8, 16) for way in ("memory", "optimized")]
    made = record(["memory", "optimized"], points)
    made["options"]["model"] = "dit:28x1152x192"
    rows = found(made)
    assert {row["model"] for row in rows.values()} == {"0.67B"}
    assert float(rows["throughput of the twin", "Fast-DiT", "", "measured"]["value"]) == pytest.approx(8 / 3)
    assert float(rows["throughput of the twin", "LoHan", "", "measured"]["value"]) == pytest.approx(16 / 6)
    made["options"]["model"] = "dit:48x7168x192"  # does not fit on a GPU of 24 GiB
    assert {series for _, series, _, _ in found(made)} == {"LoHan"}
    made["options"]["model"] = "dit:2x64x8"
    assert not found(made)


def test_swap_rows_give_shares_and_choice_relative_to_best():
    def swaps(way, seconds, share):
        decision = {"more_bytes": share, "offered_bytes": 200, "seconds": seconds / 2}
        return point(64, way, seconds, swapping=[decision] * 3)

    points = [point(64, "memory", 1.0), swaps("swap0", 4.0, 0), swaps("swap100", 3.0, 200), swaps("swapped", 3.3, 150)]
    rows = found(record(["memory", "swap0", "swap100", "swapped"], points, predicted=[]))
    assert float(rows["iteration time of the twin", "LoHan", "100", "measured"]["value"]) == pytest.approx(4.5)
    assert float(rows["iteration time of the twin", "LoHan", "0", "modelled"]["value"]) == 2.0
    assert float(rows["predicted optimum of the twin", "LoHan", "75", "measured"]["value"]) == pytest.approx(4.95)
    over = next(row for key, row in rows.items() if key[0].startswith("predicted optimum over"))
    assert float(over["value"]) == pytest.approx(1.1)


def test_events_become_bars_of_blocks_without_reads_of_weights():
    def event(name, resource, begin, end, phase="backward"):
        times = {"begin_s": begin, "end_s": end}
        return {"name": name, "phase": phase, "resource": resource, "rank": 0, "amount": 0.0, **times}

    events = [
        event("transformer.h.3", "ssd.read", 0.0, 9.0),
        event("transformer.h.3/0", "ssd.read", 1.0, 2.0),
        event("transformer.h.3/1", "ssd.read", 2.0, 4.0),
        event("AdamW transformer.h.3.mlp.c_fc.weight", "cpu", 4.0, 4.5),
        event("transformer.h.3/0", "ssd.write", 4.5, 6.0),
        event("block 3", "gpu0", 0.0, 0.5, "forward"),
        event("block 3", "gpu0", 1.5, 2.5),
    ]
    rows = list(measured([record(["memory", "naive"], [], traces={"naive": events})]))
    bars = {row["series"]: (row["metric"], float(row["x_value"]), float(row["value"])) for row in rows}
    assert {row["exhibit_id"] for row in rows} == {"lohan-fig03a"}
    assert bars == {
        "SSD read": ("4", 0.0, 3.0), "CPU Adam": ("4", 3.0, 0.5), "SSD write": ("4", 3.5, 1.5), "GPU": ("4", 0.5, 1.0)
    }  # fmt: skip


def test_record_without_a_limited_path_rate_has_no_rows():
    other = record(WAYS, [point(96, way, s) for way, s in WAYS.items()])
    other["options"]["path_rate"] = 0
    assert list(measured([other])) == []


def test_steps_of_a_twin_become_phases_and_gain_parts():
    """Ratios and differences are taken within a round: the second round takes twice as long."""
    arms = {
        ("zero_infinity", "as_published"): 16.0,
        ("zero_infinity", "today"): 15.0,
        ("zero_infinity", "today_pipelined"): 14.0,
        ("memascend", "memascend"): 13.0,
        ("zero_offload", "today"): 9.0,
        ("lohan", "none"): 8.0,
        ("lohan", "naive"): 7.0,
        ("lohan", "optimized"): 5.0,
        ("lohan", "as_published"): 4.0,
    }
    made = {"kind": "step-times", "status": "ok", "key": "k" * 64, "host": {"name": "here"}, "model": "qwen2.5-7b"}
    points = [
        {"system": system, "arm": arm, "sequence": 64, "batch": batch}
        | {"forward_s": [s / 4, s / 2], "backward_s": [s / 2, s], "optimizer_s": [s / 4, s / 2]}
        for batch in (2, 8)
        for (system, arm), s in arms.items()
    ]
    rows = found(made | {"twin": {"k": 16}, "points": points})

    def value(metric, series, at):
        return float(rows[f"{metric} of the twin", series, at, "measured"]["value"])

    assert value("throughput", "LoHan", "8") == pytest.approx(512 / 6)
    assert value("stage_time", "ZeRO-Infinity", "backward") == pytest.approx(12)
    assert value("throughput_ratio", "LoHan / DeepSpeed 0.19.8, pipelined", "2") == pytest.approx(3.5)
    parts = ("runtime", "gradients used as they come", "stages overlapped", "less computed again")
    assert [value("gain", part, "2") for part in parts] == pytest.approx([9.0, 1.5, 3.0, 1.5])
    assert {row["exhibit_id"] for row in rows.values()} == {"lohan-fig05a"}
    assert rows["gain of the twin", "runtime", "2", "measured"]["testbed"] == "here/qwen2.5-7b-k16"
    other = {"system": "zero_infinity", "arm": "today_016"}  # as in a record of another comparison
    assert found(made | {"twin": {"k": 16}, "points": [*points, points[0] | other]}) == {}


def test_runs_aim_at_the_original_device_to_ssd_ratios():
    """The ratios are those in the list of runs, at the last of their contexts."""
    profiles = registry.read(registry.ROOT / "workflows/config/experiments.yaml")["profiles"]
    runs = [run["options"] for name in ("quick", "paper") for run in profiles[name]["bench"]]
    aimed = [options for options in runs if "device-to-ssd" in options]
    assert len(aimed) == 3
    for options in aimed:
        model, _, tokens = twins.OF_ARMS[options["model"].removeprefix("lohan:")]
        step = settings.step("LoHan Optimized", model, options["contexts"][-1] // tokens)
        ratio = step.of_resource("GPU products") / step.of_resource("SSD")
        assert options["device-to-ssd"] == pytest.approx(ratio, rel=0.01)

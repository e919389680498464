"""MLP-Offload's measured rows, from a record of workflows.run.path_twin, and the options of that program."""

from __future__ import annotations

import contextlib
import shlex

import pytest

from workflows.experiments import Experiments
from workflows.papers.mlpoffload import rows
from workflows.run import path_twin

STEP_S = {"zero3": 16, "caching": 12, "skip_gradients": 9, "exclusive": 8, "caching_only_all_paths": 10}
STEP_S["mlp_offload"] = 4


def record(**others):
    points = [
        {"arm": arm, "forward_s": [0.0] * 3, "backward_s": [1.0] * 3, "optimizer_s": [seconds - 1.0, 99.0, 0.5]}
        | {
            "bytes_read": [900.0] * 3,
            "bytes_written": [900.0] * 3,
            "paths": [[[600, 69e6, 53e6], [300, 36e6, 36e6]]] * 3,
        }
        for arm, seconds in STEP_S.items()
    ]
    made = {"kind": "step-times", "lane": "measured", "status": "ok", "key": "k", "model": "40B-L4", "duplex": True}
    made |= {
        "rates": ["69/53", "36/36"],
        "host": {"name": "here"},
        "twin": {"k": 4, "parameters": 100},
        "points": points,
    }
    return made | others


def values(*records):
    return {(r["exhibit_id"], r["series"], r["metric"], r["x_value"]): r for r in rows.measured(list(records))}


def test_ratios_and_bars_are_of_the_median_iteration():
    found = values(record())
    assert found["mlpoffload-fig14", "Enable Caching", "iteration_time", ""]["value"] == "12"
    assert found["mlpoffload-fig15", "MLP-Offload / ZeRO-3", "speedup", ""]["value"] == "4"
    assert found["mlpoffload-fig14", "all opts, NVMe only / ZeRO-3", "speedup_max", ""]["value"] == "2"
    assert {row["testbed"] for row in found.values()} == {"here/40B-L4-duplex-k4"}


def test_unwritten_states_are_counted_as_host_memory():
    found = values(record())
    shares = {
        m: float(found["mlpoffload-fig10", "MLP-Offload", m, ""]["value"]) for m in ("host memory", "NVMe", "PFS")
    }
    assert shares == pytest.approx({"host memory": 25, "NVMe": 50, "PFS": 25})


def of_two_ranks():
    """Return the values of a record with two ranks.

    The second rank's transfers of the last update end at 4 s in turns, and at 2 s without them.
    """
    made = record(ranks=2)
    for point in made["points"]:
        late = 4.0 if point["arm"] in ("exclusive", "mlp_offload") else 2.0
        point["transfers"] = [[[0, "write", 0.0, 4.0, 8], [1, "write", 0.0, late, 8]]] * 3
    zero = next(point for point in made["points"] if point["arm"] == "zero3")
    read = [
        [0, "read", 0.0, 1.0, 1e9],
        [0, "read", 0.0, 1.001, 1e9],
        [1, "read", 0.0, 1.5, 5e9],
        [0, "read", 1, 3.001, 1e9],
    ]
    zero |= {"host_s": [1.5, 9.9, 0.0], "optimizer_s": [15.0, 99.0, 1.0], "transfers": [[]] * 2 + [read]}
    free = {**made["points"][-1], "arm": "free", "optimizer_s": [7.0] * 3, "transfers": made["points"][1]["transfers"]}
    memory = {"system": "zero_offload", "arm": "today", "optimizer_s": [0.5] * 3, "host_s": [0.5] * 3}
    made["points"] += [free, memory]
    return values(made)


def test_turn_taking_ranks_are_compared_with_ranks_without_turns():
    found = of_two_ranks()
    assert found["mlpoffload-fig14", "one rank at a time, one path", "speedup", ""]["value"] == "1.125"
    assert found["mlpoffload-fig14", "one rank at a time, all paths", "speedup", ""]["value"] == "2"
    assert found["mlpoffload-fig14", "in turns, one path", "fairness", ""]["value"] == "1"
    assert found["mlpoffload-fig14", "as it comes, all paths", "fairness", ""]["value"] == "0.5"
    assert {row["model"] for row in found.values()} == {"40B-L4, 2 ranks", "40B-L4, 2 ranks, in memory"}
    # the names of bars omit the number of ranks
    assert {row["testbed"] for row in found.values()} == {"here/40B-L4-duplex-k4"}


def test_io_share_is_what_the_training_thread_waits_for():
    found = of_two_ranks()
    assert found["mlpoffload-fig03", "offloaded to the SSD", "I/O share", ""]["value"] == "90"
    assert found["mlpoffload-fig03", "offloaded to the SSD", "update time", ""]["value"] == "15"
    assert found["mlpoffload-fig03", "in host memory", "I/O share", ""]["value"] == "0"


def test_bandwidth_divides_jointly_ended_bytes_by_time_since_last_end():
    found = of_two_ranks()
    seen = [float(found["mlpoffload-fig05", "read", "bandwidth", str(n)]["value"]) for n in range(2)]
    assert seen == pytest.approx([2 / 1.001, 1 / 2.0])
    assert ("mlpoffload-fig05", "read", "bandwidth", "2") not in found


def test_accumulated_batches_appear_only_in_figure_13():
    points = [
        {"arm": arm, "accumulation": batches, "forward_s": [0.0], "backward_s": [batches], "optimizer_s": [seconds]}
        for batches in (1, 4)
        for arm, seconds in (("zero3", 11.0), ("mlp_offload", 4.0))
    ]
    found = values(record(points=points))
    seconds = {key[1::2]: row["value"] for key, row in found.items() if key[2] == "iteration_time"}
    assert seconds[rows.ZERO, "1"] == "12"
    assert seconds[rows.OURS, "4"] == "8"
    assert float(found["mlpoffload-fig13", "MLP-Offload / ZeRO-3", "speedup_min", ""]["value"]) == 87.5
    assert {exhibit for exhibit, *_ in found} == {"mlpoffload-fig13"}


def test_each_accumulation_is_a_separate_point():
    line = Experiments("workflows/config/experiments.yaml", "paper").runs["times-mlpoffload-accumulation"]["words"]
    args = path_twin.parse(["--run-id", "x", "--out", "x.json", *shlex.split(line)])
    assert [at[2:] for at in path_twin.points_of(args)] == [(1,), (4,), (16,)]
    args.accumulate = []
    assert [len(at) for at in path_twin.points_of(args)] == [2]


def test_processes_sharing_a_drive_give_rows_of_raw_rates():
    apart = [{"processes": 2, "direction": "read", "bytes_per_second": [1e9, 3e9, 2e9], "latency_s": [0.1, 0.3, 0.2]}]
    found = values(record(kind="bench", apart=apart))
    assert found["mlpoffload-fig04", "NVMe read", "bandwidth of all", "2"]["value"] == "2"
    assert found["mlpoffload-fig04", "NVMe read", "latency of one", "2"]["value"] == "0.2"
    assert values(record(kind="bench", apart=apart, lane="modelled")) == {}


def test_predictions_and_other_step_time_records_give_no_rows():
    other = {name: value for name, value in record().items() if name != "duplex"}
    assert values(record(lane="modelled"), other) == {}


def test_short_run_has_only_its_arms_and_their_ratio():
    short = record()
    short["points"] = [point for point in short["points"] if point["arm"] in ("zero3", "mlp_offload")]
    found = values(short)
    assert {series for exhibit, series, *_ in found if exhibit == "mlpoffload-fig15"} == {
        "DeepSpeed ZeRO-3",
        "MLP-Offload",
        "MLP-Offload / ZeRO-3",
    }
    assert found["mlpoffload-fig07", "MLP-Offload", "iteration_time", ""]["value"] == "4"


def test_run_without_mlp_offload_adds_bars_to_another_run():
    more = record(duplex=False)
    more["points"] = [{**point, "arm": "gradients_only"} for point in more["points"] if point["arm"] == "caching"]
    more["points"] += [point for point in record()["points"] if point["arm"] == "zero3"]
    found = rows.measured([more, record(duplex=False)])
    seconds = [
        (r["series"], r["value"]) for r in found if (r["metric"], r["model"]) == ("iteration_time", "40B-L4, simplex")
    ]
    assert seconds.count(("Skip Gradients alone", "12")) == 1
    assert {value for series, value in seconds if series == rows.ZERO} == {"16"}
    assert [r["exhibit_id"] for r in rows.measured([more])] == ["mlpoffload-fig14"]


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_path_twin_runs_have_the_machine_to_themselves(profile):
    runs = Experiments("workflows/config/experiments.yaml", profile).runs
    assert [run["alone"] for run in runs.values() if run["module"] == "path_twin"] == [True]


def test_long_profiles_use_the_testbed_ratio_and_every_arm():
    config = "workflows/config/experiments.yaml"
    runs = {name: run for profile in ("paper", "full") for name, run in Experiments(config, profile).runs.items()}
    twins = {
        name: "simplex" in name for name in runs if name.startswith(("times-mlpoffload-dup", "times-mlpoffload-sim"))
    }
    arms = [word.split(":")[1] for name in twins for word in shlex.split(runs[name]["words"]) if word.endswith(":bf16")]
    assert set(arms) == {*rows.twins.ARMS.values()}
    for name, simplex in twins.items():
        assert runs[name]["module"] == "path_twin"
        args = path_twin.parse(["--run-id", name, "--out", "x.json", *shlex.split(runs[name]["words"])])
        (read, write), (other_read, other_write) = path_twin.rates_of(args)
        assert args.simplex is simplex
        assert (read / write, other_read / other_write) == pytest.approx((6.9 / 5.3, 1.0), rel=0.01)
        assert read / other_read == pytest.approx(6.9 / 3.6, rel=0.01)


def test_malformed_rate_is_refused():
    words = ["--run-id", "x", "--out", "x", "--model", "40B-L4", "--k", "4", "--arms", "a:b:bf16", "--points", "16x1"]
    with pytest.raises(ValueError, match="expected READ/WRITE in MB/s"):
        path_twin.rates_of(path_twin.parse([*words, "--rates", "69"]))


def test_run_that_times_out_is_recorded_without_rows(monkeypatch, tmp_path):
    class Slow:
        name = "slow"

        def wait_until_ready(self, deadline):
            raise TimeoutError

    written = {}
    monkeypatch.setattr(path_twin, "places", lambda args, size: contextlib.nullcontext(([tmp_path], {}, [])))
    monkeypatch.setattr(path_twin, "started", lambda *args, **how: contextlib.nullcontext([Slow()]))
    monkeypatch.setattr(path_twin, "predicted", lambda *args: [])
    monkeypatch.setattr(path_twin, "write", lambda *args, **fields: written.update(fields))
    words = ["--run-id", "x", "--out", "x", "--model", "40B-L4", "--k", "4", "--arms", "a:b:bf16", "--points", "16x1"]
    assert path_twin.main([*words, "--rates", "69/53"]) == 0
    assert written["status"] == "timeout"
    assert "points" not in written
    assert values(record(status="timeout")) == {}


def test_prediction_uses_this_machines_rates_or_reports_their_absence(monkeypatch, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/validation.json").write_text('{"rates": {"points": []}}')
    monkeypatch.setattr(path_twin, "REFERENCE", tmp_path)
    monkeypatch.setattr(path_twin.provenance, "host", lambda: {"name": "there"})
    assert path_twin.rates_here() == {"points": []}
    monkeypatch.setattr(path_twin.provenance, "host", lambda: {"name": "local"})
    with pytest.raises(ValueError, match=r"^nothing is predicted: this machine has no .*local/validation.json; name"):
        path_twin.rates_here()


MEGA = 1e6


def of_share(share, slower=(1.0, 1.0, 1.0), idle_s=0.0):
    """Return a record of a twin on paths that reads and writes share.

    DeepSpeed's drive is busy for 16 of its 16 s and `idle_s`.
    """
    made, parameters = record(duplex=False, ranks=1), 25 * 64.0
    made["twin"] = {"k": 8, "parameters": parameters}
    for point in made["points"]:
        seconds = [STEP_S[point["arm"]] * each for each in slower] if point["arm"] == "zero3" else [8.0] * 3
        of_drive = {"bytes_read": [8 * 69 * MEGA] * 3, "bytes_written": [8 * 53 * MEGA] * 3}
        point |= {"forward_s": [idle_s] * 3, "backward_s": [0.0] * 3, "optimizer_s": seconds} | of_drive
        if point["arm"] == "mlp_offload":
            point["bytes_written"] = [12 * parameters * (1 - share)] * 3
    return made


def of_originals(*records):
    found = [row for row in rows.measured(list(records)) if row["metric"].endswith(" of the twin")]
    return {(row["exhibit_id"], row["series"], row["model"]): row["value"] for row in found}


def test_twin_represents_models_with_its_share_in_host_memory():
    shares = {(each.model, each.ending): each.resident_share for each in rows.originals()}
    found = of_originals(of_share(shares["40B", ""]))
    assert found["mlpoffload-fig15", "MLP-Offload / ZeRO-3", "40B"] == "2"
    assert ("mlpoffload-fig15", "MLP-Offload / ZeRO-3, paper alone", "40B") not in found
    assert {model for *_, model in found} == {
        m for (m, _), share in shares.items() if abs(shares["40B", ""] / share - 1) < 0.1
    }
    assert of_originals(of_share(0.6)) == of_originals(record(duplex=True)) == {}


def test_twin_with_the_closer_share_represents_a_model():
    share = next(each.resident_share for each in rows.originals() if (each.model, each.ending) == ("40B", rows.ALONE))
    close, far = of_share(share), of_share(1.05 * share, slower=(2.0, 2.0, 2.0))
    for records in ((close, far), (far, close)):
        assert of_originals(*records)["mlpoffload-fig07", "MLP-Offload / ZeRO-3, paper alone", "40B"] == "2"


@pytest.mark.parametrize(
    ("twin", "why"),
    [
        ({"idle_s": 4.0}, "N/A (the drive is busy for 80% of the twin's iteration, for 100% of the original's)"),
        ({"slower": (1.0, 1.08, 1.3)}, "N/A (quartiles 2.08 and 2.38: the machine was busy)"),
    ],
)
def test_twin_of_other_proportions_or_busy_machine_has_no_number(twin, why):
    share = next(each.resident_share for each in rows.originals() if (each.model, each.ending) == ("40B", rows.ALONE))
    found = of_originals(of_share(share, **twin))
    assert found["mlpoffload-fig07", "MLP-Offload / ZeRO-3, paper alone", "40B"] == why

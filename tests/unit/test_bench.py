"""The benchmarks as commands: what they record, not how fast anything is."""

import json
import math

import pytest
import torch

from memascend.bench.rounds import alternate, alternate_groups, ratios, spread
from memascend.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_spread_gives_quartiles_and_ratios_are_paired():
    assert vars(spread([4.0, 1.0, 3.0, 2.0, 5.0])) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert vars(spread([7.0])) == {"median": 7.0, "low": 7.0, "high": 7.0}
    assert ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]).median == 2.0  # ratios cancel whatever slows down a round


def test_each_round_times_every_way_once_after_a_warmup():
    calls = []
    seconds = alternate({name: lambda name=name: calls.append(name) for name in "abc"}, 4)
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert calls[::2] == calls[1::2]
    assert len({tuple(calls[i : i + 6]) for i in range(0, 24, 6)}) > 1  # the order changes
    with pytest.raises(ValueError, match="at least one"):
        alternate({}, 0)


def test_each_round_runs_the_ways_of_a_group_together():
    calls = []
    groups = {g: {w: lambda g=g, w=w: calls.append((g, w)) for w in "ab"} for g in (1, 2, 3)}
    seconds = alternate_groups(groups, 5)
    assert {g: {w: len(taken) for w, taken in ways.items()} for g, ways in seconds.items()} == {
        g: {"a": 5, "b": 5} for g in (1, 2, 3)
    }
    for begin in range(0, len(calls), 12):
        one_round = [g for g, _ in calls[begin : begin + 12]]
        assert sorted(one_round[::4]) == [1, 2, 3]
        assert one_round == [g for g in one_round[::4] for _ in range(4)]


OVERFLOW_WAYS = {"fused", "sum", "read_loop", "aminmax", "isfinite", "chain"}


def test_overflow_records_every_reader_and_writes_the_same_json(capsys, tmp_path):
    out = tmp_path / "record.json"
    status, text, _ = run(
        capsys, "overflow", "--dtypes", "fp32,bf16", "--numels", "5e3", "--repeats", "2", "--json", "--out", str(out)
    )
    made = json.loads(text)
    assert status == 0
    assert json.loads(out.read_text()) == made
    assert {p["method"] for p in made["points"]} | set(made["missing"]) == OVERFLOW_WAYS | {"deepspeed"}
    assert all(len(p["seconds"]) == 2 for p in made["points"])
    assert {p["bytes"] for p in made["points"] if p["dtype"] == "bf16"} == {10_000}
    for row in made["summary"]:
        assert row["limit"] in ("sum", "read_loop", "aminmax")
        assert row["share_of_limit"] == row["times_faster_than"][row["limit"]]


@pytest.mark.deepspeed
def test_deepspeed_overflow_check_works_and_leaves_no_process_group():
    from memascend.integrations.deepspeed.stock_ops import stage3_check

    buffer = torch.zeros(1000)
    with stage3_check() as check:
        assert check(buffer) is False
        for bad in (math.nan, math.inf, -math.inf):
            buffer[777] = bad
            assert check(buffer) is True
        buffer[777] = 3.4e38
        assert check(buffer) is False  # the verdict before it is discarded
    assert not torch.distributed.is_initialized()
    with stage3_check() as check:
        assert check(buffer) is False


@pytest.mark.deepspeed
def test_overflow_benchmark_includes_deepspeed(capsys):
    _, text, _ = run(capsys, "overflow", "--dtypes", "fp16", "--numels", "3000", "--repeats", "1", "--json")
    made = json.loads(text)
    assert made["missing"] == {}
    assert set(made["summary"][0]["times_faster_than"]) == OVERFLOW_WAYS - {"fused"} | {"deepspeed"}


def test_overflow_without_deepspeed_reports_it_missing(capsys, monkeypatch):
    from memascend.bench import overflow

    monkeypatch.setattr(overflow, "_STOCK_OPS", "memascend.no_such_peers")
    _, text, _ = run(capsys, "overflow", "--dtypes", "fp32", "--numels", "4096", "--repeats", "1")
    assert "without deepspeed: not installed" in text


@pytest.mark.deepspeed
def test_unscale_reports_its_limit_and_comparisons_with_torch(capsys):
    _, text, _ = run(capsys, "unscale", "--dtypes", "fp32,fp16", "--numels", "5000,7000", "--repeats", "2", "--json")
    made = json.loads(text)
    assert {(row["dtype"], row["numel"]) for row in made["summary"]} == {
        (dtype, numel) for dtype in ("fp32", "fp16") for numel in (5000, 7000)
    }
    for row in made["summary"]:
        assert row["limit"] in ("mul", "neg")
        assert set(row["times_faster_than"]) == {"torch", "chain"}
    assert {(p["dtype"], p["numel"], p["bytes"]) for p in made["points"]} == {
        ("fp32", 5000, 40_000),
        ("fp32", 7000, 56_000),
        ("fp16", 5000, 20_000),
        ("fp16", 7000, 28_000),
    }


def test_adamw_reports_its_limit_and_both_peers(capsys):
    _, text, _ = run(capsys, "adamw", "--numels", "4096", "--repeats", "1", "--json")
    made = json.loads(text)
    assert made["missing"] == {}
    assert {row["method"] for row in made["summary"]} == {"fp32", "fp32_half_gradient_and_copy", "bf16", "int8"}
    for row in made["summary"]:
        assert set(row["times_faster_than"]) == {"deepspeed", "torch_fused"}
        per_element = {"bf16": 14, "int8": 10.125}.get(row["method"], 28)
        assert row["limit_seconds"] == pytest.approx(4096 * per_element / row["limit_gb_s"] / 1e9)


def test_adamw_without_deepspeed_reports_it_missing(capsys, monkeypatch):
    from memascend.bench import adamw

    monkeypatch.setattr(adamw, "_STOCK_OPS", "memascend.no_such_peers")
    _, text, _ = run(capsys, "adamw", "--numels", "4096", "--repeats", "1")
    assert "without deepspeed: not installed" in text


def test_pinned_reports_the_reserved_share_of_each_allocator(capsys):
    _, text, _ = run(capsys, "pinned", "--mib", "3", "--repeats", "1", "--json")
    shares = {row["method"]: row["reserved_share"] for row in json.loads(text)["summary"]}
    assert shares == {
        "page_aligned": 1.0,
        "page_aligned, huge pages": 1.0,
        "power_of_two": pytest.approx(4 / 3),
    }


def test_adaptive_pool_reserves_under_a_third_of_monolithic(capsys):
    _, text, _ = run(capsys, "pool", "--model", "llama3.2-1b", "--repeats", "1", "--json")
    taken = {row["method"]: row["reserved_bytes"] for row in json.loads(text)["summary"]}
    embedding = 128_256 * 2048 * 2
    assert taken["monolithic, separate"] == 9 * 2**29  # 501 MiB rounds to 512, nine times
    assert taken["monolithic"] >= 9 * embedding
    assert taken["adaptive"] < taken["monolithic"] / 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["overflow", "--numels", "5,x"], "'x' is not a number of elements"),
        (["overflow", "--numels", "1e30"], "'1e30' is not a number of elements"),
        (["adamw", "--numels", "1.55e1"], "'1.55e1' is not a number of elements"),
        (["overflow", "--dtypes", "fp64"], "unknown 'fp64': use fp32, fp16, bf16"),
        (["unscale", "--dtypes", "int8"], "unknown 'int8': use fp32, fp16, bf16"),
        (["adamw", "--repeats", "0"], "'0' is not a positive whole number"),
        (["pool", "--out", "no/such/folder/record.json"], "the folder no/such/folder does not exist"),
        (["nvm"], "'nvm' is unknown (did you mean nvme?)"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, arguments, says):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1

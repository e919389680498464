"""`memascend bench tiers`: passes over several paths, by one process and by two that share them."""

from __future__ import annotations

import json

import pytest

from memascend.cli import main


def bench(tmp_path, capsys, processes: str, *more: str, groups: int = 4) -> dict:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        (tmp_path / path).mkdir()
    size = ["--groups", str(groups), "--mib", "1", "--repeats", "1"]
    assert main(["bench", "tiers", "--tiers", *paths, "--processes", processes, *size, "--json", *more]) == 0
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_one_process_uses_both_paths_and_leaves_nothing_behind(tmp_path, capsys):
    result = bench(tmp_path, capsys, "1")
    (row,) = result["summary"]
    assert sum(row["groups_by_path"][0].values()) == 4
    assert row["bytes_per_second"] > 0
    assert row["fairness"] == 1
    assert set(result["rates"]) == set(result["paths"])


@pytest.mark.slow
def test_two_processes_run_in_exclusive_and_free_mode(tmp_path, capsys):
    rows = bench(tmp_path, capsys, "1..2")["summary"]
    assert [(row["processes"], row["way"]) for row in rows] == [(1, "free"), (2, "exclusive"), (2, "free")]
    assert all(0 < row["fairness"] <= 1 for row in rows)


@pytest.mark.slow
def test_each_direction_is_measured_alone_for_every_process_count(tmp_path, capsys):
    result = bench(tmp_path, capsys, "1,2", "--apart", "--simplex", "40,20")
    rows = {(row["processes"], row["direction"]): row for row in result["apart"]}
    assert set(rows) == {(1, "read"), (1, "write"), (2, "read"), (2, "write")}
    # Four sub-groups of a MiB over two paths of these rates: the token bucket does not let a transfer end early.
    assert rows[1, "read"]["bytes_per_second"][0] < 41e6
    assert rows[1, "write"]["latency_s"][0] > 0.05


@pytest.mark.slow
def test_four_processes_share_two_paths_and_each_gets_its_bytes(tmp_path, capsys):
    rows = bench(tmp_path, capsys, "4", "--simplex", "100,100")["summary"]
    assert [row["way"] for row in rows] == ["exclusive", "free"]
    for row in rows:
        assert [sum(each.values()) for each in row["groups_by_path"]] == [4] * 4
        assert 0 < row["share_of_formula"]["simplex"] <= 1.01  # the token bucket does not let a transfer end early
        assert 0 < row["fairness"] <= 1


@pytest.mark.slow
def test_sub_groups_move_away_from_a_path_halved_midway(tmp_path, capsys):
    result = bench(tmp_path, capsys, "1", "--simplex", "10,10", "10,10", "--halve", "3", groups=12)
    (row,) = result["halved"]
    assert row["path"] == result["paths"][0]
    assert len(row["seconds"]) == len(row["share_of_formula"]) == 3
    assert row["groups_of_first"][0] > row["groups_of_first"][-1] >= 3


def test_predicted_time_for_unequal_paths_matches_the_formula(tmp_path, capsys):
    (row,) = bench(tmp_path, capsys, "1", "--predict", "--simplex", "200,200", "100,100", groups=12)["summary"]
    # includes filling and draining the pipeline
    assert row["share_of_formula"]["simplex"] == pytest.approx(1, rel=0.25)
    assert row["seconds"]["median"] >= 8 * 2 * (1 << 20) / 200e6


def test_simulated_processes_share_a_simplex_path_at_full_rate(tmp_path, capsys):
    rows = bench(tmp_path, capsys, "1,2", "--predict", "--simplex", "200,100")["summary"]
    assert [row["way"] for row in rows] == ["free", "exclusive", "free"]
    one, exclusive, free = (row["seconds"]["median"] for row in rows)
    busy = 2 * (1 << 20) * (1 / 200e6 + 1 / 100e6)  # time of a path with two of four sub-groups
    assert busy <= 1.001 * one < 1.5 * busy  # includes filling and draining the pipeline
    assert exclusive == free
    assert 2 * busy <= 1.001 * free < 2.5 * busy
    assert 0.8 < rows[2]["fairness"] <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predict"], "--predict: give the rates of the paths with --simplex, without --apart and --halve"),
        (["--predict", "--apart", "--simplex", "2,1"], "without --apart and --halve"),
        (["--predict", "--halve", "2", "--simplex", "2,1"], "without --apart and --halve"),
        (["--halve", "2"], "--halve: give the rates of the paths with --simplex"),
        (["--simplex", "2,1", "3,1"], "once or per folder, such as 69,53; got 2,1 3,1"),
        (["--simplex", "2"], "once or per folder, such as 69,53; got 2"),
        (["--simplex", "2,x"], "--simplex: "),
    ],
)
def test_invalid_option_combinations_are_refused(tmp_path, capsys, words, said):
    assert main(["bench", "tiers", "--tiers", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_missing_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "tiers", "--tiers", str(tmp_path / "none")]) == 2
    assert "create it first" in capsys.readouterr().err

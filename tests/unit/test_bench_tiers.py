"""`memascend bench tiers`: passes over several paths, by one process and by two that share them."""

from __future__ import annotations

import json

import pytest

from memascend.cli import main


def bench(tmp_path, capsys, processes: str, *more: str) -> dict:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        (tmp_path / path).mkdir()
    options = ["--tiers", *paths, "--processes", processes, "--groups", "4", "--mib", "1", "--repeats", "1", "--json"]
    assert main(["bench", "tiers", *options, *more]) == 0
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
def test_two_processes_take_turns_or_do_as_they_like(tmp_path, capsys):
    rows = bench(tmp_path, capsys, "1..2")["summary"]
    assert [(row["processes"], row["way"]) for row in rows] == [(1, "free"), (2, "exclusive"), (2, "free")]
    assert all(0 < row["fairness"] <= 1 for row in rows)


@pytest.mark.slow
def test_each_direction_alone_is_shared_by_processes(tmp_path, capsys):
    result = bench(tmp_path, capsys, "1,2", "--apart", "--simplex", "40,20")
    rows = {(row["processes"], row["direction"]): row for row in result["apart"]}
    assert set(rows) == {(1, "read"), (1, "write"), (2, "read"), (2, "write")}
    # Four sub-groups of a MiB over two paths of these rates: a bucket lets nothing through sooner.
    assert rows[1, "read"]["bytes_per_second"][0] < 41e6
    assert rows[1, "write"]["latency_s"][0] > 0.05


def test_the_simulator_gives_a_simplex_path_to_processes_at_its_whole_rate(tmp_path, capsys):
    rows = bench(tmp_path, capsys, "1,2", "--predict", "--simplex", "200,100")["summary"]
    assert [row["way"] for row in rows] == ["free", "exclusive", "free"]
    one, exclusive, free = (row["seconds"]["median"] for row in rows)
    busy = 2 * (1 << 20) * (1 / 200e6 + 1 / 100e6)  # of a path, with two of four sub-groups
    assert busy <= 1.001 * one < 1.5 * busy  # it fills and drains
    assert exclusive == free
    assert 2 * busy <= 1.001 * free < 2.5 * busy
    assert 0.8 < rows[2]["fairness"] <= 1


@pytest.mark.parametrize("words", [["--predict"], ["--predict", "--apart", "--simplex", "2,1"]])
def test_what_cannot_be_played_is_refused(tmp_path, capsys, words):
    assert main(["bench", "tiers", "--tiers", str(tmp_path), *words]) == 2
    assert "--predict: say with --simplex how fast the paths are, and leave --apart out" in capsys.readouterr().err


def test_what_is_no_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "tiers", "--tiers", str(tmp_path / "none")]) == 2
    assert "make it first" in capsys.readouterr().err

"""`memascend bench tiers`: passes over several paths, by one process and by two that share them."""

from __future__ import annotations

import json

import pytest

from memascend.cli import main


def bench(tmp_path, capsys, processes: str) -> dict:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        (tmp_path / path).mkdir()
    options = ["--tiers", *paths, "--processes", processes, "--groups", "4", "--mib", "1", "--repeats", "1", "--json"]
    assert main(["bench", "tiers", *options]) == 0
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


def test_what_is_no_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "tiers", "--tiers", str(tmp_path / "none")]) == 2
    assert "make it first" in capsys.readouterr().err

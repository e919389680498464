"""`memascend bench saves`: how long training pauses for a checkpoint, written in the background or waited for."""

from __future__ import annotations

import json

import pytest

from memascend.cli import main


@pytest.mark.slow
def test_every_round_has_each_way_and_leaves_no_files(tmp_path, capsys):
    small = ["--twin", "32", "--context", "16", "--steps", "1", "--repeats", "2", "--json"]
    assert main(["bench", "saves", "--folder", str(tmp_path), *small]) == 0
    assert list(tmp_path.iterdir()) == []
    result = json.loads(capsys.readouterr().out)
    assert [point["method"] for point in result["points"]] == ["none", "foreground", "background"]
    assert {len(series) for point in result["points"] for name, series in point.items() if name != "method"} == {2}
    assert result["checkpoint_bytes"] > 14 * result["parameters"]
    without, foreground, background = result["summary"]
    assert without.keys() == {"method", "seconds"}
    assert foreground["stood_still_s"] == foreground["save_s"]
    assert 0 < background["stood_still_s"]["median"] <= background["save_s"]["median"]


def test_missing_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "saves", "--folder", str(tmp_path / "none")]) == 2
    assert "create it first" in capsys.readouterr().err

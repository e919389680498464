"""`memascend bench checkpoints`: what train's checkpoints write with and without shared blocks."""

from __future__ import annotations

import json

import pytest

from memascend.cli import main
from tests import reflinks

SMALL = ["--twin", "16", "--context", "16", "--repeats", "1", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", reflinks.KINDS)
def test_states_are_shared_through_reflinks_or_copied_on_request(tmp_path, capsys, kind):
    with reflinks.file_system_with_reflinks(tmp_path, kind) as folder:
        assert main(["bench", "checkpoints", "--folder", str(folder), *SMALL]) == 0
        assert [path.name for path in folder.iterdir() if path.name != "lost+found"] == []
    result = json.loads(capsys.readouterr().out)
    shared, copied = result["summary"]
    assert result["file_system"] == kind
    assert copied["shared_bytes"] == 0 < shared["shared_bytes"]
    assert len({point["checkpoint_bytes"] for point in result["points"]}) == 1
    assert 0 < shared["limit_s"] < copied["limit_s"]
    assert shared["written_bytes"] < shared["shared_bytes"] < copied["written_bytes"] < 2 * shared["shared_bytes"]


def test_missing_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "checkpoints", "--folder", str(tmp_path / "none")]) == 2
    assert "create it first" in capsys.readouterr().err

"""A committed reference's verdicts on claims are those that its records decide."""

import json
from pathlib import Path

import pytest

from workflows import registry
from workflows.derive import claims, reference

FOLDERS = sorted({path.parent for path in (registry.ROOT / "results/reference").glob("*/*.json")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_committed_verdicts_are_those_that_the_records_decide(folder: Path) -> None:
    verdicts = reference.decided_by(folder)
    assert verdicts == claims.read_verdicts(folder / "claims.csv"), "python -m workflows.derive.reference --records ..."
    assert {verdict.lane for verdict in verdicts} <= {"measured"}  # there are none if the records belong to no claim


def test_option_times_only_keeps_run_durations_without_records(tmp_path: Path) -> None:
    """On a busy machine the minutes of a run are useful, but none of its numbers may be a reference."""
    kept = json.loads((registry.ROOT / "results/reference/xeon-amx-2core/bench-saves.json").read_text())
    path = tmp_path / "bench-saves.json"
    path.write_text(json.dumps({**kept, "dirty": True, "wall_s": 61.26}))
    reference.main(["--records", str(path), "--out-dir", str(tmp_path / "out"), "--times-only"])
    (folder,) = (tmp_path / "out").iterdir()
    assert [each.name for each in folder.iterdir()] == ["times.json"]
    assert json.loads((folder / "times.json").read_text()) == {"bench-saves": 61.3}
    with pytest.raises(SystemExit):
        reference.main(["--records", str(path), "--out-dir", str(tmp_path / "out")])
    path.write_text(json.dumps({**kept, "dirty": False}))
    reference.main(["--records", str(path), "--out-dir", str(tmp_path / "out")])
    assert {"bench-saves.json", "claims.csv"} <= {each.name for each in folder.iterdir()}

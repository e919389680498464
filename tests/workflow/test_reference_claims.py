"""What a committed reference says of claims is what its records decide."""

from pathlib import Path

import pytest

from workflows import registry
from workflows.derive import claims, reference

FOLDERS = sorted({path.parent for path in (registry.ROOT / "results/reference").glob("*/*.json")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_claims_of_a_reference_are_those_that_its_records_decide(folder: Path) -> None:
    verdicts = reference.decided_by(folder)
    assert verdicts == claims.read_verdicts(folder / "claims.csv"), "python -m workflows.derive.reference --records ..."
    assert {verdict.lane for verdict in verdicts} <= {"measured"}  # none where the records are of no claim

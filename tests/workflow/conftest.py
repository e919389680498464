"""Records and tables that the workflow tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_fixtures import full_sweeps, modelled, smoke_sweeps
from workflow_fixtures import built_exhibits, full_set, modelled_rows, smoke_set, write_records

from workflows.scripts import derive_measured, exhibit_table, tidy
from workflows.scripts.records import load

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, records: list[dict]) -> Path:
    """Records, derived lanes and exhibit tables in ``folder``."""
    loaded = load(write_records(folder / "raw", records))
    tidy.write_table(derive_measured.derive(loaded), folder / "measured.csv")
    tidy.write_table(map(derive_measured.run_summary, loaded), folder / "runs.csv", derive_measured.RUN_COLUMNS)
    tidy.write_table([*modelled_rows(), *modelled()], folder / "modelled.csv")
    for exhibit in built_exhibits():
        paths = (folder / "modelled.csv", folder / "measured.csv")
        table = exhibit_table.assemble(exhibit, ROOT / "results" / "published", *paths)
        tidy.write_table(table, folder / "exhibits" / f"{exhibit}.csv")
    return folder


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quick profile would leave."""
    return build(tmp_path_factory.mktemp("full"), [*full_set(), *full_sweeps()])


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the smoke profile would leave: one model."""
    return build(tmp_path_factory.mktemp("smoke"), [*smoke_set(), *smoke_sweeps()])

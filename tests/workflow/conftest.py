"""Records and tables that the workflow tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_fixtures import Page, filled
from sweep_fixtures import full_sweeps, smoke_sweeps
from workflow_fixtures import built_exhibits, full_set, modelled_rows, smoke_set, write_records

from tests.modelled_lane import swept_and_timed
from workflows import registry, tidy
from workflows.derive import table
from workflows.records import RUN_COLUMNS, load, run_summary

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, records: list[dict]) -> Path:
    """Make records, derived lanes and exhibit tables in ``folder``."""
    loaded = load(write_records(folder / "raw", records))
    measured = table.measured_rows("memascend", loaded)
    tidy.write_table(map(run_summary, loaded), folder / "runs.csv", RUN_COLUMNS)
    tidy.write_table([*modelled_rows(), *swept_and_timed()], folder / "modelled.csv")
    planned = tidy.read_table(folder / "modelled.csv")
    for exhibit in built_exhibits():
        whole = table.assemble(exhibit, ROOT / "results" / "published", planned, measured)
        tidy.write_table(whole, folder / "exhibits" / f"{exhibit}.csv")
    claimed = {claim["exhibit_id"] for claim in registry.claims()}
    for exhibit in sorted(claimed - set(built_exhibits())):  # only published values of the other papers
        rows = table.published_rows(ROOT / "results" / "published", exhibit)
        tidy.write_table(rows, folder / "exhibits" / f"{exhibit}.csv")
    return folder


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the quick profile would leave."""
    return build(tmp_path_factory.mktemp("full"), [*full_set(), *full_sweeps()])


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the smoke profile would leave: one model."""
    return build(tmp_path_factory.mktemp("smoke"), [*smoke_set(), *smoke_sweeps()])


@pytest.fixture(scope="session")
def report_folder(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `figures` with the report of the smoke set; its parent folder has claims.csv and the lists of runs."""
    return filled(tmp_path_factory.mktemp("report"), smoke)


@pytest.fixture(scope="session")
def report_pages(report_folder: Path) -> dict[str, Page]:
    """Return the pages of the report by their path in it."""
    figures = report_folder / "figures"
    return {path.relative_to(figures).as_posix(): Page(path) for path in sorted(figures.rglob("*.html"))}

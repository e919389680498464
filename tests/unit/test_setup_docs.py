"""The pages in docs/ keep up with the project: every built exhibit has its row, every named file exists."""

import re
from pathlib import Path

import pytest

from workflows import registry

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def built_exhibits() -> list[str]:
    return [entry["id"] for entry in registry.exhibits() if entry["status"] == "built"]


def test_every_built_exhibit_has_its_row_and_command_in_the_artifact_page():
    rows = re.findall(
        r"^\| `([\w.-]+)` \|.*`snakemake --cores all ([\w.-]+)`", (ROOT / "docs/ARTIFACT.md").read_text(), re.M
    )
    assert rows == [(exhibit, exhibit) for exhibit in built_exhibits()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_exists(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_make_target_named_in_a_page_exists():
    targets = set(re.findall(r"^([a-z_0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z_0-9-]+)", page.read_text(), re.MULTILINE)
    }
    assert named
    assert named - targets == set()

"""The pages in docs/ are up to date: every built exhibit has its row, every named file exists."""

import re
from pathlib import Path

import pytest

from workflows import registry

DRAWN = {f"memascend-{name}" for name in ("fig05", "fig06", "fig07", "tab01", "alg01")}
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def built_exhibits() -> list[str]:
    return [entry["id"] for entry in registry.exhibits() if entry["status"] == "built"]


def computed_exhibits() -> list[str]:
    """Return MemAscend's exhibits with rows of their own, which runs measure."""
    measured = {entry["id"] for entry in registry.exhibits() if "measured" in entry["lanes"]}
    mine = [name for name in built_exhibits() if name.startswith("memascend-") and name not in DRAWN]
    return [name for name in mine if name in measured]


def test_artifact_page_lists_command_of_every_measured_memascend_exhibit():
    rows = re.findall(
        r"^\| `([\w.-]+)` \|.*`snakemake --cores all ([\w.-]+)`", (ROOT / "docs/ARTIFACT.md").read_text(), re.M
    )
    assert rows == [(exhibit, exhibit) for exhibit in computed_exhibits()]


def test_status_and_readme_say_how_many_exhibits_are_built():
    """Counts by paper and lane: tests/workflow/test_experiments.py."""
    built = len(built_exhibits())
    assert f"Built: {built} of {len(registry.exhibits())} exhibits." in (ROOT / "docs/status.md").read_text()
    assert built == len(registry.exhibits())
    assert re.search(rf"All {built} exhibits of the \w+ papers are drawn", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_linked_file_exists(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_module_named_in_contributing_exists():
    named = set(re.findall(r"`([\w/]+/\w+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) > 20
    assert [
        name for name in sorted(named) if not ((ROOT / name).exists() or (ROOT / "memascend" / name).exists())
    ] == []


def test_every_make_target_named_in_a_page_exists():
    targets = set(re.findall(r"^([a-z_0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z_0-9-]+)", page.read_text(), re.MULTILINE)
    }
    assert named
    assert named - targets == set()

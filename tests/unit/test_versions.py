"""There is one version, in pyproject.toml and in the changelog; names that it promises are on the page of the API."""

import datetime
import importlib.metadata
import re
import tomllib
from pathlib import Path

import memascend

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def released() -> list[tuple[str, str]]:
    """Return (version, date) of each release in the changelog, in its order."""
    return re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", CHANGELOG, re.MULTILINE)


def test_version_is_semantic_and_the_newest_in_the_changelog():
    version = project()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version)
    assert released()[0][0] == version.partition("rc")[0]


def test_changelog_lists_releases_newest_first_with_dates():
    versions = [tuple(map(int, version.split("."))) for version, _ in released()]
    assert versions == sorted(set(versions), reverse=True)
    assert [datetime.date.fromisoformat(date).isoformat() for _, date in released()] == [date for _, date in released()]
    assert re.findall(r"^## .*$", CHANGELOG, re.MULTILINE)[0] == "## [Unreleased]"
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= KINDS


def test_library_reports_the_installed_version():
    assert memascend.__version__ == importlib.metadata.version("memascend")
    assert "__version__ =" not in (ROOT / "memascend/__init__.py").read_text()


def test_uninstalled_library_reports_an_unknown_version(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert memascend.__version__ == "unknown (not installed)"


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs/reference/api.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (memascend\.[\w.]+)$", page, re.MULTILINE)}
    assert {*memascend.__all__} - shown == {"__version__"}

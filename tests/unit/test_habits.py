"""Lint, hooks, hosted CI, templates: they load, and name tools, targets and programs that exist."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
NOT_STRICT = 27  # modules that mypy does not check yet: this number may only fall


def hooks() -> dict[str, dict]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    return {hook["id"]: hook for hook in repository["hooks"]}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z_0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def lint_tools() -> set[str]:
    return set(project()["project"]["optional-dependencies"]["lint"])


def recipe(target: str) -> str:
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]


def test_hooks_need_no_network_and_run_the_pinned_tools():
    entries = [hook["entry"].split()[0] for hook in hooks().values() if hook["language"] == "system"]
    assert {hook["language"] for hook in hooks().values()} == {"system", "pygrep"}
    assert {Path(entry).name for entry in entries} == lint_tools()
    assert {str(Path(entry).parent) for entry in entries} == {".venv/bin"}


def test_lint_runs_every_tool_of_its_extra():
    assert {tool for tool in lint_tools() if not re.search(rf"\b{tool}\b", recipe("lint"))} == set()


@pytest.mark.parametrize(
    ("message", "good"),
    [
        ("storage: fix lost wake-up in PathLock\n\nWhy, in a long line " + 80 * "x", True),
        ("plan, train: name what fits", True),
        ("area: " + 66 * "x", True),
        ("area: " + 67 * "x", False),
        ("A sentence without an area", False),
        ("Fix: the area is in lower case", False),
    ],
)
def test_commit_subject_hook_accepts_only_valid_subjects(message, good):
    hook = hooks()["commit-subject"]
    assert hook["args"] == ["--multiline", "--negate"]  # as pre-commit's pygrep expects it
    assert bool(re.search(hook["entry"], message, re.MULTILINE | re.DOTALL)) is good


def test_hosted_ci_runs_what_a_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert set(re.findall(r"^timed make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)) - targets() == set()


@pytest.mark.parametrize("form", [path.name for path in FORMS if path.name != "config.yml"])
def test_issue_form_is_complete(form):
    found = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())
    assert {"name", "description", "body"} <= found.keys()
    assert {part["type"] for part in found["body"]} <= {"dropdown", "input", "markdown", "textarea"}
    fields = [part for part in found["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)


def test_deviation_form_shows_an_existing_claim():
    found = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/paper-deviation.yml").read_text())
    (claim,) = [part for part in found["body"] if part.get("id") == "claim"]
    shown = claim["attributes"]["placeholder"]
    files = (ROOT / "workflows/papers").glob("*/claims.yaml")
    assert any(f"- id: {shown}\n" in file.read_text() for file in files)


def test_make_targets_named_in_contributor_documents_exist():
    files = [ROOT / "CONTRIBUTING.md", ROOT / ".github/pull_request_template.md", ROOT / ".pre-commit-config.yaml"]
    named = {word for file in files for word in re.findall(r"\bmake ([a-z][\w-]*)", file.read_text())}
    assert named - targets() - {"these"} == set()
    assert {"lint", "format", "test"} <= named


def test_list_of_modules_without_strict_typing_only_shrinks():
    (left,) = [entry for entry in project()["tool"]["mypy"]["overrides"] if entry.get("ignore_errors")]
    assert len(left["module"]) <= NOT_STRICT
    assert left["module"] == sorted(set(left["module"]))
    names = [name.removesuffix(".*") for name in left["module"]]
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


def test_package_ships_its_type_annotations():
    assert (ROOT / "memascend/py.typed").exists()
    assert "py.typed" in project()["tool"]["setuptools"]["package-data"]["*"]

"""The documentation site: its navigation, its generated pages, and the tutorial that adds a system, executed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import forked
from workflows.derive import gallery

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def entries(nav: list) -> list[str]:
    """Return the pages of a navigation in its order."""
    found: list[str] = []
    for each in nav:
        inner = next(iter(each.values())) if isinstance(each, dict) else each
        found += entries(inner) if isinstance(inner, list) else [inner]
    return found


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    """Return the Markdown by command, as the site has it."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "site/commands.py")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_navigation_lists_every_page_exactly_once(commands: dict[str, str]) -> None:
    shown = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages |= {"about.md", "changelog.md", "contributing.md"}
    pages |= {f"records/{path.parent.name}.md" for path in ROOT.glob("results/reference/*/README.md")}
    pages |= {f"reference/commands/{name}.md" for name in commands}
    assert sorted(shown) == sorted(pages)


def test_docs_readme_links_to_every_page_of_the_folder() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (DOCS / "README.md").read_text())) - {"../README.md"}
    assert linked == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}


@pytest.mark.parametrize("words", ["train", "plan", "storage format", "bench engine"])
def test_command_page_has_every_option_of_its_help(commands: dict[str, str], words: str) -> None:
    done = forked.run([sys.executable, "-m", "memascend.cli", *words.split(), "--help"], env=dict(os.environ))
    options = set(re.findall(r"^ +(--[\w-]+)", done.stdout, re.MULTILINE))
    page = commands[words.split()[0]]
    section = page[page.index(f"# memascend {words}\n") :]
    assert options
    assert {option for option in options if f"`{option}" not in section} == set()


# -- tutorials/add-a-system.md -----------------------------------------------------------------------------------------

TUTORIAL = (DOCS / "tutorials/add-a-system.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.fixture
def typed(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shell in a folder where the tutorial's files were saved."""
    for name, text in re.findall(r"^Save as `([^`]+)`:\n\n```\w+\n(.*?)^```", TUTORIAL, re.M | re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").symlink_to(DOCS)
    return {**os.environ, "MEMASCEND_SYSTEMS": str(tmp_path / "systems"), "PYTHONPATH": str(ROOT)}


def outputs(environment: dict[str, str], folder: Path, beginning: str) -> list[subprocess.CompletedProcess[str]]:
    """Run the tutorial's commands that begin like this, in its order; return their results."""
    commands = [shlex.split(line) for line in LINES if line.startswith(beginning)]
    assert commands
    start = {"memascend": [sys.executable, "-m", "memascend.cli"], "PYTHONPATH=.": [sys.executable]}
    rest = {"memascend": 1, "PYTHONPATH=.": 2}
    return [
        forked.run([*start[words[0]], *words[rest[words[0]] :]], env=environment, cwd=folder, timeout=280)
        for words in commands
    ]


def test_tutorial_system_is_planned_compared_and_simulated(typed: dict[str, str], tmp_path: Path) -> None:
    own, others, simulated = outputs(typed, tmp_path, "memascend plan")
    assert [done.returncode for done in (own, others, simulated)] == [0, 0, 0]
    size = re.search(r"It takes ([0-9.]+) GiB", TUTORIAL)[1]
    assert f" {size} " in own.stdout
    assert re.search(r"^  Toy \(wooden\) +[0-9.]+ ", others.stdout, re.MULTILINE)
    assert "play" in simulated.stdout
    assert "fetch" in simulated.stdout


def test_tutorial_system_is_a_bar_in_a_figure(typed: dict[str, str], tmp_path: Path) -> None:
    (done,) = outputs(typed, tmp_path, "PYTHONPATH=. python bar.py")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "toy.svg").read_text()
    assert "#123456" in drawn
    assert "Toy (wooden)" in drawn


@pytest.mark.slow
def test_tutorial_system_trains_and_refuses_two_ranks(typed: dict[str, str], tmp_path: Path) -> None:
    trained, refused = outputs(typed, tmp_path, "memascend train")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs/toy/model").exists()
    assert refused.returncode == 2
    assert refused.stderr == "memascend: error: a toy has one rank: leave --ranks out\n"


def test_gallery_page_and_folder_match_the_list_of_pictures() -> None:
    page = (ROOT / "docs/gallery.md").read_text()
    shown = re.findall(r"!\[[^]]*\]\(\.\./figures/gallery/([\w-]+)\.png\)", page)
    assert tuple(shown) == gallery.SHOWN
    assert {path.stem for path in (ROOT / "figures/gallery").iterdir()} == set(shown)


@pytest.mark.slow
def test_gallery_picture_is_redrawn_byte_for_byte(tmp_path: Path) -> None:
    gallery.draw(("memascend-fig08",), tmp_path)
    assert (tmp_path / "memascend-fig08.png").read_bytes() == (
        ROOT / "figures/gallery/memascend-fig08.png"
    ).read_bytes()

"""The pages' quotations of `memascend plan`, in blocks that begin with `$ memascend plan`, are what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memascend.cli import main
from workflows.registry import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def quotes() -> list[tuple[str, str, str]]:
    """Return (page, command, quoted text) of every such block."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            command, _, text = block.partition("\n")
            of_the_reader = "--ds-config" in command  # a file that the page does not have
            if not language and command.startswith("$ memascend plan ") and not of_the_reader:
                found.append((page.relative_to(ROOT).as_posix(), command[2:], text))
    return found


QUOTES = quotes()


def test_at_least_four_pages_quote_plans() -> None:
    assert len({page for page, _, _ in QUOTES}) >= 4


@pytest.mark.parametrize(
    ("page", "command", "quoted"), QUOTES, ids=[f"{Path(p).stem}: {c[15:50]}" for p, c, _ in QUOTES]
)
def test_quoted_plans_match_the_output_of_their_commands(
    page: str, command: str, quoted: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared piece by piece where dots mark an omission."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    said = capsys.readouterr()
    lines = [line.rstrip() for line in f"{said.out}{said.err}".splitlines()]
    pieces = [piece.strip("\n") for piece in re.split(r"^\.\.\.$", quoted, flags=re.MULTILINE)]
    missing = [line for piece in pieces for line in piece.splitlines() if line.rstrip() not in lines]
    assert missing == [], f"{page}: {command}"
    assert any(pieces)

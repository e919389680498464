"""Retired words and phrases stay out of the project's text. Single words: docs/retired-words.txt."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".cpp", ".h", ".html", ".json", ".md", ".py", ".pyi", ".sh", ".smk", ".toml", ".yaml", ".yml"}
# A claim stays as it was written, and so do quotations of papers.
QUOTED = {"claims.yaml", "numbers.yaml", Path(__file__).name}

AMOUNTS = "bytes|[KMGT]i?B|elements|tokens|sequences|samples|operations|batches|sub-?groups|units|pages"
WHOLES = "sequence|parameter|step|second|token|layer|block|rank|element|pass|sample|request|worker|core|GPU|thread|node"
PHRASES = {
    "in flight, in progress, current": r"\bunder\s+way\b",
    "unspecified, not given, unknown": r"\bnobody\s+(?:says|said|knows)\b(?!\s+how)",
    "this machine; given; after its result was known": r"\bat\s+hand\b",
    "per": rf"\b(?:{AMOUNTS})\s+an?\s+(?:{WHOLES})\b(?!\s+(?:holds|whose)|[-'])",
}
# Words that are being replaced: they may stay in these files, but must not appear in others.
FEWER = {
    "predicted": (
        r"\bforetold\b",
        # For older records: readers accept the old key, and a program its former option.
        # And a key of `bench engine --json`, which stays until 2.0.
        "bench/engine.py unit/test_bench_engine.py "
        "run/full_size.py workflows/records.py unit/test_lohan_measured.py workflow/test_full_size.py",
    ),
    "policy of a block": (
        r"\bfates?\b",
        "planner/workload.py unit/test_deprecated_names.py",
    ),
}


def texts() -> list[Path]:
    folders = ["baselines", "docs", "hardware", "memascend", "tests", "workflows"]
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    found = [path for path in (*ROOT.glob("*"), *inside) if path.suffix in TEXT and path.name not in QUOTED]
    assert len(found) > 500
    return found


def places(pattern: str) -> list[Path]:
    return sorted(path for path in texts() if re.search(pattern, path.read_text(), re.IGNORECASE))


@pytest.mark.parametrize("instead", PHRASES)
def test_no_retired_phrase_is_used(instead):
    found = [str(path.relative_to(ROOT)) for path in places(PHRASES[instead])]
    # Row keys of this paper's tables, of "activations" and "sequences" in a step.
    found = [path for path in found if not path.startswith("workflows/papers/ssdtrain/") or instead != "per"]
    assert found == [], f"say instead: {instead}"


@pytest.mark.parametrize("instead", FEWER)
def test_word_being_replaced_appears_in_no_other_file(instead):
    pattern, files = FEWER[instead]
    found = {"/".join(path.relative_to(ROOT).parts[-2:]) for path in places(pattern)}
    assert found - {"CHANGELOG.md", *files.split()} == set(), f"say: {instead}"  # the changelog names what was renamed

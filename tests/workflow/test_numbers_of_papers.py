"""Each paper's list of numeric statements (`numbers.yaml`) has all its claims, and nearly all results have a claim.

The papers' texts are not part of the repository. If MEMASCEND_PAPER_TEXTS names a folder with them (one .txt per
paper), every quote is also looked up, in order.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import Any

import pytest

from workflows import registry, tidy
from workflows.derive.claims import HELD_OUT, LANES, TWIN, basis_of

LISTED = [paper for paper in registry.PAPERS if registry.file_of(paper, "numbers.yaml").exists()]
LEAST_SHARE = 0.95
TEXTS = os.environ.get("MEMASCEND_PAPER_TEXTS", "")


def plain(text: str) -> str:
    """Return letters, digits, points and percent signs, without words that text extraction spells in several ways."""
    return re.sub(r"[^a-z0-9.%]+", "", re.sub(r"times|tildelow", "", text.lower()))


def overlap(one: str, other: str) -> bool:
    return plain(one) in plain(other) or plain(other) in plain(one)


def entries(paper: str) -> list[dict[str, Any]]:
    return registry.read(registry.file_of(paper, "numbers.yaml"))["numbers"]


def claims_of(paper: str) -> dict[str, dict[str, Any]]:
    return {claim["id"]: claim for claim in registry.claims() if claim["exhibit_id"].startswith(f"{paper}-")}


def pointed_at(entry: dict[str, Any]) -> list[str]:
    found = entry.get("same_as", [])
    return [found] if isinstance(found, str) else found


def distinct(listed: list[dict[str, Any]], way: str) -> int:
    """Return the number of distinct results of the entries that have `claims`, or `no_claim`."""
    return sum(entry.get("results", 1) for entry in listed if entry["kind"] == "result" and way in entry)


@pytest.mark.parametrize("paper", LISTED)
def test_list_fits_its_schema_and_repeats_no_quote(paper):
    listed = registry.read(registry.file_of(paper, "numbers.yaml"))
    tidy.check(listed, "numbers.schema.json", f"{paper}/numbers.yaml")
    quotes = [(entry["where"], plain(entry["quote"])) for entry in listed["numbers"]]
    assert len(set(quotes)) == len(quotes), f"twice: {sorted(quote for quote in quotes if quotes.count(quote) > 1)}"


@pytest.mark.parametrize("paper", LISTED)
def test_repeats_point_to_the_entry_that_counts(paper):
    named = [entry["id"] for entry in entries(paper) if "id" in entry]
    assert len(set(named)) == len(named), "an id names one entry"
    counted = {entry["id"] for entry in entries(paper) if "id" in entry and ("claims" in entry or "no_claim" in entry)}
    pointed = {name for entry in entries(paper) for name in pointed_at(entry)}
    assert pointed <= counted, f"no entry with claims, or with a reason for none: {sorted(pointed - counted)}"
    assert set(named) <= pointed, f"ids that nothing points at: {sorted(set(named) - pointed)}"


@pytest.mark.parametrize("paper", LISTED)
def test_every_claim_is_listed_with_a_matching_quote(paper):
    claims, quoted_at = claims_of(paper), {}
    for entry in entries(paper):
        for claim in entry.get("claims", []):
            quoted_at.setdefault(claim, []).append(entry["quote"])
    assert set(quoted_at) == set(claims), f"of one alone: {sorted(set(quoted_at) ^ set(claims))}"
    astray = [id for id, quotes in quoted_at.items() if not any(overlap(claims[id]["quote"], q) for q in quotes)]
    assert not astray, f"their own quotes are in none of their entries: {astray}"


@pytest.mark.parametrize("paper", LISTED)
def test_nearly_all_results_have_a_claim(paper):
    claimed, without = (distinct(entries(paper), way) for way in ("claims", "no_claim"))
    assert claimed >= LEAST_SHARE * (claimed + without), f"{claimed} of {claimed + without} results have a claim"


@pytest.mark.parametrize("paper", LISTED)
def test_claims_of_non_results_have_no_scored_lane(paper):
    claims, of_results = claims_of(paper), set()
    for entry in entries(paper):
        of_results |= set(entry.get("claims", [])) if entry["kind"] == "result" else set()
    for name in set(claims) - of_results:
        assert not {basis_of(claims[name], lane) for lane in LANES} & {HELD_OUT, TWIN}, name


def test_pages_count_claims_and_results_claimed_and_decidable():
    claimed = without = decided = 0
    for paper in LISTED:
        claims, listed = claims_of(paper), entries(paper)
        claimed, without = claimed + distinct(listed, "claims"), without + distinct(listed, "no_claim")
        for entry in (each for each in listed if each["kind"] == "result"):
            lanes = [lane for name in entry.get("claims", []) for lane in claims[name]["lanes"].values()]
            decided += entry.get("results", 1) if any("not_checkable" not in lane for lane in lanes) else 0
    said = f"Of {claimed + without} distinct results {claimed} have a claim, and {decided} one that a lane can decide"
    assert said in " ".join((registry.ROOT / "docs/status.md").read_text().split())
    number = sum(len(claims_of(paper)) for paper in LISTED)
    assert f"{number} claims on {claimed} results" in " ".join((registry.ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("paper", LISTED)
def test_every_published_number_is_on_the_list(paper):
    name = {"mlpoffload": "mlp_offload"}.get(paper, paper)
    with (registry.ROOT / f"results/published/{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["series"] != "axis"]  # ticks of an axis state nothing
    quotes = {row["quote"] for row in rows if re.search(r"\d", row["quote"])}
    listed = [entry["quote"] for entry in entries(paper)]
    missing = sorted(quote for quote in quotes if not any(overlap(quote, each) for each in listed))
    assert not missing, f"in results/published/{name}.csv, but in no entry: {missing}"


@pytest.mark.skipif(not TEXTS, reason="the papers' texts are not here: MEMASCEND_PAPER_TEXTS names no folder")
@pytest.mark.parametrize("paper", LISTED)
def test_every_quote_is_in_the_text_in_order(paper):
    texts = [plain(path.read_text(encoding="utf-8")) for path in sorted(Path(TEXTS).glob("*.txt"))]
    quotes = [plain(entry["quote"]) for entry in entries(paper)]
    text = max(texts, key=lambda text: sum(quote in text for quote in quotes))
    at, out_of_order = 0, []
    for quote in quotes:
        found = text.find(quote, at)
        out_of_order += [quote] if found < 0 else []
        at = max(at, found)
    assert not out_of_order, "not in the text, or before the entry above"

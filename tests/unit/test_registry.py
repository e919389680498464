"""Exhibits, claims and published numbers are complete, well-formed and agree with each other."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from workflows import registry
from workflows.derive import claims

ROOT = Path(__file__).parents[2]
EXHIBITS = {e["id"]: e for e in registry.exhibits()}
CLAIMS = registry.claims()
BUILT = {"fig03", "fig04", "fig08", "fig11", "fig13", "fig15", "fig21", "tab02", "tab03", "tab05"}
PAPERS = {"memascend": 29, "lohan": 45, "mlpoffload": 21, "cxl": 18, "ssdtrain": 17}
LANES = ["published", "author", "modelled", "measured"]
COLUMNS = [
    *("paper", "exhibit", "subfigure", "series", "model", "x_name", "x_value", "metric", "value", "unit"),
    *("quote", "note", "exhibit_id", "lane"),
]
OPERANDS = {
    "value": {"of"},
    "ratio": {"of", "to"},
    "difference": {"of", "minus"},
    "percent": {"of", "to"},
    "reduction_percent": {"from", "to"},
}
TIDY = {"subfigure", "series", "model", "x_name", "x_value", "metric"}


def published() -> list[dict[str, str]]:
    rows = []
    for path in sorted((ROOT / "results" / "published").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            assert reader.fieldnames == COLUMNS, path.name
            rows += [{**row, "_file": path.stem} for row in reader]
    return rows


PUBLISHED = published()


def test_all_exhibits_of_the_five_papers_are_registered():
    assert len(EXHIBITS) == sum(PAPERS.values())
    assert Counter(e["paper"] for e in EXHIBITS.values()) == PAPERS


def test_each_exhibit_id_is_listed_once():
    assert Counter(e["id"] for e in registry.exhibits()).most_common(1)[0][1] == 1
    for paper in PAPERS:
        drawn = registry.figures(paper)
        assert set(drawn) <= set(EXHIBITS)
        assert set(registry.read(registry.file_of(paper, "captions.yaml")) or {}) == set(drawn)


@pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=EXHIBITS)
def test_an_exhibit_is_built_or_says_what_it_waits_for(exhibit):
    assert set(exhibit) == {"id", "paper", "number", "title", "kind", "status", "waits_for", "lanes"}
    assert exhibit["id"].startswith(f"{exhibit['paper']}-")
    assert exhibit["lanes"] == [lane for lane in LANES if lane in exhibit["lanes"]]
    if exhibit["status"] == "built":
        assert exhibit["lanes"] or exhibit["kind"] == "diagram"
    else:
        assert exhibit["status"] == "planned"
        assert len(exhibit["waits_for"]) > 10


def test_required_memascend_exhibits_are_built():
    built = {e["id"].removeprefix("memascend-") for e in EXHIBITS.values() if e["status"] == "built"}
    assert built >= BUILT


def test_published_rows_name_registered_exhibits_of_their_own_paper():
    for row in PUBLISHED:
        assert row["lane"] == "published"
        assert row["quote"]
        assert row["_file"].replace("_", "") == row["paper"]
        if row["exhibit_id"]:
            assert EXHIBITS[row["exhibit_id"]]["paper"] == row["paper"]


def test_published_lane_exists_exactly_where_published_rows_exist():
    stated = {row["exhibit_id"] for row in PUBLISHED} - {""}
    assert stated == {e["id"] for e in EXHIBITS.values() if "published" in e["lanes"]}


def test_claim_ids_are_unique_and_start_with_their_exhibit():
    assert len({claim["id"] for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim["id"].startswith(claim["exhibit_id"] + "-")
        assert claim["exhibit_id"] in EXHIBITS  # built or not: claims are committed before the first run


def test_built_memascend_exhibits_have_claims_except_spec_tables_and_diagrams():
    claimed = {claim["exhibit_id"] for claim in CLAIMS}
    computed = {e["id"] for e in EXHIBITS.values() if e["status"] == "built" and e["paper"] == "memascend"}
    assert claimed >= {e for e in computed if EXHIBITS[e]["kind"] not in ("spec-table", "diagram")}


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_a_claim_has_the_documented_form(claim):
    required = {"id", "exhibit_id", "sentence", "quote", "unit", "quantity", "compute", "basis", "lanes"}
    optional = {"over", "join", "expected", "expected_range", "printed", "rests_on", "committed", "changed"}
    assert required <= set(claim) <= required | optional
    assert ("expected" in claim) != ("expected_range" in claim)
    assert ("over" in claim) == ("join" in claim)
    compute = claim["compute"]
    assert set(compute) - {"operation"} == OPERANDS[compute["operation"]]
    for name in OPERANDS[compute["operation"]]:
        selectors = compute[name] if isinstance(compute[name], list) else [compute[name]]
        for selector in selectors:
            assert set(selector) <= TIDY
            assert "metric" in selector
    assert set(claim["lanes"]) == {"modelled", "measured"}


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_a_lane_is_checked_or_says_why_not(claim):
    for lane in claim["lanes"].values():
        if "not_checkable" in lane:
            assert set(lane) == {"not_checkable"}
            assert len(lane["not_checkable"]) > 20
            continue
        known = {"tolerance", "tolerance_because", "expected", "expected_range", "why", "scale", "deviates_because"}
        assert set(lane) - {"compute"} <= known
        assert ("expected" in lane or "expected_range" in lane) == ("why" in lane)
    assert "compute" not in claim["lanes"]["modelled"]
    if other := claim["lanes"]["measured"].get("compute"):  # rows of a time twin, which are never held out, or memory
        of_memory = other.get("of", {}).get("metric") == "peak system memory"
        uncounted = ("alternate reading", "by construction")
        assert of_memory or claims.basis_of(claim, "measured") in (claims.TWIN, *uncounted)


# Times of one kernel or one drive alone, in which no resources have proportions to one another.
OF_ONE_RESOURCE = ("memascend-fig12-", "memascend-fig14-", "mlpoffload-fig04-constant")
OF_TIMES = re.compile(r"time|throughput|speedup|latency|bandwidth|improvement|gain from|growth exponent|split")


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_ratio_of_step_times_counts_only_with_a_time_twin(claim):
    lane = claim["lanes"]["measured"]
    if "not_checkable" in lane or claims.basis_of(claim, "measured") != claims.HELD_OUT:
        return
    read = claims.selectors(claim | {"compute": lane.get("compute", claim["compute"])})
    of_times = any(OF_TIMES.search(selector.get("metric", "")) for selector in read)
    assert not of_times or claim["id"].startswith(OF_ONE_RESOURCE)


def test_claim_quotes_appear_in_published_rows_or_listed_numbers():
    """A claim's quote overlaps with that of a published row or a listed
    statement: both were found in the paper's text."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.%]+", "", text.lower().replace("times", ""))

    for claim in CLAIMS:
        paper, mine = claim["exhibit_id"].rpartition("-")[0], plain(claim["quote"])
        quotes = [plain(row["quote"]) for row in PUBLISHED if row["paper"] == paper]
        listed = registry.read(registry.file_of(paper, "numbers.yaml")) or {"numbers": []}
        quotes += [plain(entry["quote"]) for entry in listed["numbers"]]
        assert any(mine in quote or quote in mine for quote in quotes), claim["id"]


def test_expected_values_are_printed_numbers():
    """The expected value of a claim is a published value of its exhibit, one in its
    paper's text without an exhibit, or a stated derivation."""
    derived = {
        "memascend-fig08-pinned-rounding",  # 24.90 - 1.63
        "memascend-fig08-pinned-memascend",  # 1.63 minus the process
        "memascend-fig13-fused-adds-nothing",
        "memascend-fig14-write-largest",  # 304,604,779 ns over 266,212.637 us
        "memascend-fig09-zero-infinity-plateau",  # "identical": no difference
        "memascend-fig19-training-loss",
        "memascend-fig19-evaluation-loss",
        "lohan-fig01a-recompute-share",  # stated in the introduction, not in an exhibit
        "lohan-fig01a-intra",  # stated in III-B, not in an exhibit
        "lohan-fig06a-zero-infinity",  # 276B / 2.04, and stated with Fig. 10a
        *(c["id"] for c in CLAIMS if c["id"].startswith(("lohan-tab04-size-", "lohan-tab06-size-"))),  # models' names
        *(c["id"] for c in CLAIMS if c["id"].startswith("memascend-fig11-text-")),  # stated in III-A, not in an exhibit
        *(c["id"] for c in CLAIMS if re.match(r"memascend-fig14-write-\w+-(zero|mem)", c["id"])),  # in seconds
        *(f"lohan-fig02a-{what}" for what in ("states-100b", "states-175b", "memory-175b")),  # introduction
        "lohan-fig01a-inter-share",  # introduction
        "lohan-fig01a-gpu-over-ssd",  # stated in III-B, not in an exhibit
        "lohan-fig01a-gpu-over-link",
        "lohan-fig01b-gpu-share-forward",  # stated in III-C, not in an exhibit
        "lohan-fig01b-gpu-share-overlapped",
        "lohan-tab05-cm-128",  # "Failed": no batch
        "cxl-fig05-knee",  # in millions
        "ssdtrain-fig01-memory-growth-models",  # 60 % slower
        "cxl-fig07-growth",  # 3.28 + 11.49 s against 3.37 + 11.8 s
        *(claim["id"] for claim in CLAIMS if claim.get("printed") == "in words"),  # "linearly", "the same"
    }
    values = {}
    for row in PUBLISHED:
        values.setdefault(row["exhibit_id"] or f"text of {row['paper']}", set()).add(row["value"])
    for claim in CLAIMS:
        if "expected" in claim and claim["id"].endswith("-growth") and "minus" in claim["compute"]:
            numbers = {float(v) for v in values[claim["exhibit_id"]] if re.fullmatch(r"[\d.]+", v)}
            assert any(abs(a - b - claim["expected"]) < 1e-6 for a in numbers for b in numbers), claim["id"]
        elif "expected" in claim and claim["id"] not in derived:
            paper = claim["exhibit_id"].rpartition("-")[0]
            printed = values.get(claim["exhibit_id"], set()) | values.get(f"text of {paper}", set())
            numbers = {float(v) for v in printed if re.fullmatch(r"\d+(\.\d+)?", v)}
            assert claim["expected"] in numbers, claim["id"]

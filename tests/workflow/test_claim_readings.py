"""Units, repeats and causes of claims: what counts is read alike, once, and for every host."""

import csv
import re
from itertools import combinations
from math import isclose

import pytest

from workflows import registry
from workflows.derive import claims

PAPERS = ("lohan", "mlpoffload", "ssdtrain")
CLAIMS = [claim for claim in registry.claims() if claim["exhibit_id"].partition("-")[0] in PAPERS]
COUNTED = [claim for claim in CLAIMS if claims.basis_of(claim, "modelled") == claims.HELD_OUT]


def test_counted_sizes_are_judged_in_the_printed_unit():
    everywhere = [claim for claim in registry.claims() if claims.basis_of(claim, "modelled") == claims.HELD_OUT]
    for claim in everywhere:
        if re.search(r"\d\s*[GT]B", claim["quote"]):
            assert claim["unit"] not in ("GiB", "GiB/s", "TiB"), claim["id"]


@pytest.mark.parametrize("paper", PAPERS)
def test_binary_reading_stands_beside_the_claim_it_reads(paper):
    ids = {claim["id"]: claim for claim in CLAIMS if claim["exhibit_id"].startswith(paper)}
    binary = [claim for claim in ids.values() if re.search(r"-[gt]ib$", claim["id"])]
    assert binary
    for claim in binary:
        printed = ids[re.sub(r"-[gt]ib$", "", claim["id"])]
        keys = ("quote", "expected", "expected_range")
        assert [printed.get(key) for key in keys] == [claim.get(key) for key in keys]
        assert claims.basis_of(claim, "modelled") == "alternate reading"


@pytest.mark.parametrize("paper", PAPERS)
def test_no_number_counts_twice(paper):
    """Neither the same rows with the same value, nor a value and its reciprocal."""
    with (registry.ROOT / f"results/reference/modelled/{paper}-claims.csv").open() as file:
        values = {line["claim_id"]: float(line["value"]) for line in csv.DictReader(file) if line["value"]}
    counted = [claim for claim in COUNTED if claim["id"] in values]
    for one, other in combinations(counted, 2):
        a, b = values[one["id"]], values[other["id"]]
        rows = [
            (claim["lanes"]["modelled"].get("compute", claim["compute"]), claim.get("over")) for claim in (one, other)
        ]
        assert a != b or rows[0] != rows[1], (one["id"], other["id"])
        assert not isclose(a * b, 1, rel_tol=1e-5) or a == 1, (one["id"], other["id"])


def test_causes_of_measured_deviations_quote_no_measured_value():
    measured = re.compile(r"\b\d+(\.\d+)? (%|times)|measures \d|\(\d+\.\d+\)")
    for claim in CLAIMS:
        assert not measured.search(claim["lanes"]["measured"].get("deviates_because", "")), claim["id"]

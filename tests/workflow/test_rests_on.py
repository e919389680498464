"""`rests on` lists the constants that move a claim's value: the groups of each paper's calibrations.yaml."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from workflows import registry
from workflows.derive import claims
from workflows.paper_models import constants

CLAIMS = {claim["id"]: claim for claim in registry.claims()}
C1, C2 = ("memascend-c1",), ("memascend-c2",)
STEP = {"gpu_efficiency", "host_seconds_per_parameter", "adam_memory_efficiency"}
CHECKS = {"chain_seconds_per_element", "chain_memory_bytes_per_s", "fused_memory_efficiency"}


def groups(paper: str) -> list[dict]:
    return registry.read(registry.file_of(paper, "calibrations.yaml"))["behind"]


@pytest.mark.parametrize("paper", registry.PAPERS)
def test_groups_name_existing_constants_exhibits_and_metrics(paper):
    mine = [claim for claim in CLAIMS.values() if claim["exhibit_id"].startswith(f"{paper}-")]
    metrics = {selector.get("metric") for claim in mine for selector in claims.selectors(claim)}
    exhibits = {exhibit["id"] for exhibit in registry.exhibits()}
    for group in groups(paper):
        assert set(group) <= {"testbed", "exhibits", "metrics", "rows_of", "constants", "planner"}
        assert set(group.get("constants", [])) <= set(constants(paper))
        assert set(group.get("planner", [])) <= set(claims.PLANNER)
        assert "testbed" in group or "constants" not in group, "captions list a constant with its testbed"
        assert {f"{paper}-{each}" for each in group["exhibits"]} <= exhibits
        assert set(group.get("metrics", [])) <= metrics


@pytest.mark.parametrize(
    ("claim", "testbeds", "listed"),
    [
        ("memascend-tab06-c1-qwen2.5-7b-8", C1, STEP),
        ("memascend-tab06-c2-qwen2.5-7b-8", C2, STEP | {"configuration_2_ssd_efficiency"}),
        ("memascend-tab04-c2-qwen2.5-7b-8", C2, STEP | CHECKS | {"configuration_2_ssd_efficiency"}),
        ("memascend-fig09-zero-infinity-largest-context", C1, {"process_overhead"}),
        ("memascend-fig11-text-pool", C1, set()),
    ],
)
def test_claim_lists_the_constants_of_its_own_rows_and_testbeds(claim, testbeds, listed):
    assert set(claims.constants_behind(CLAIMS[claim], testbeds)) == listed


def test_claim_that_read_no_row_lists_constants_of_all_testbeds():
    claim = CLAIMS["memascend-tab06-c1-qwen2.5-7b-8"]
    assert "configuration_2_ssd_efficiency" in claims.constants_behind(claim)


def test_verdict_lists_its_constants_and_how_they_were_found():
    path = registry.ROOT / "results/reference/modelled/memascend-claims.csv"
    found = {verdict.claim_id: verdict.rests_on for verdict in claims.read_verdicts(path)}
    assert found["memascend-tab06-c1-qwen2.5-7b-8"] == (
        "gpu efficiency (solved from fig17); host seconds per parameter (solved from fig17); "
        "adam memory efficiency (assumed)"
    )


@cache
def values(paper: str, *changed: str) -> dict[str, str]:
    """Return the paper's modelled lane from a separate process, since a process computes rows only once."""
    command = [sys.executable, "-m", "tests.workflow.perturbed", paper, *changed]
    return json.loads(subprocess.run(command, cwd=registry.ROOT, check=True, capture_output=True, text=True).stdout)


CHANGES = [(paper, name) for paper in registry.PAPERS for name in dict.fromkeys((*constants(paper), *claims.PLANNER))]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two processes of 15 s each on an idle core, minutes on a busy machine
@pytest.mark.parametrize(("paper", "name"), CHANGES)
def test_claims_moved_by_a_constant_list_it(paper, name):
    """The change is 5 %. A claim with its own text on what it rests on is not checked."""
    before, after = values(paper), values(paper, name, "1.05")
    verdicts = {
        verdict.claim_id: verdict
        for verdict in claims.read_verdicts(registry.ROOT / f"results/reference/modelled/{paper}-claims.csv")
    }
    silent = []
    for claim_id in before.keys() | after.keys():
        claim = CLAIMS[claim_id]
        own = claim.get("rests_on")
        if before.get(claim_id) != after.get(claim_id) and claims.basis_of(claim, "modelled") == claims.HELD_OUT:
            behind = claims.constants_behind(claim, verdicts[claim_id].testbed.split())
            silent += [claim_id] if not own and name not in behind else []
    assert not silent, f"`behind` of calibrations.yaml: {name} moves these"

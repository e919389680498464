"""The ledger explains the measured host peak, and each MemAscend part removes what the paper says it does."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.deepspeed

PUBLISHED, OURS = ("zero_infinity", "as_published"), ("memascend", "memascend")
EACH = [pytest.param(PUBLISHED, marks=pytest.mark.slow), OURS]  # each takes one training


@pytest.fixture(scope="module")
def record(runs):
    """Return a function that runs an arm at k = 16, where buffers are well above the
    few MiB by which the memory of a process of 450 MiB varies."""
    return lambda arm: runs.record(*arm, "--k", "16", "--steps", "3", "--mode", "memory")


def reserved(record, owner):
    return sum(e["reserved_bytes"] for e in record["ledger"] if e["at_peak"] and e["owner"] == owner)


@pytest.mark.parametrize("arm", EACH, ids="-".join)
def test_locked_buffers_match_memory_locked_by_the_kernel(record, arm):
    memory = record(arm)["memory"]
    assert memory["locked_bytes"] == pytest.approx(memory["locked_buffers_bytes"], rel=0.02)


@pytest.mark.parametrize("arm", EACH, ids="-".join)
def test_the_ledger_explains_the_measured_peak(record, arm):
    assert record(arm)["memory"]["ledger_explained_share"] == pytest.approx(1.0, abs=0.03)


def test_no_ledger_entry_is_called_other(record):
    assert not [e for e in record(OURS)["ledger"] if "other" in e["owner"]]


@pytest.mark.slow
def test_overflow_chain_takes_1_25_times_the_gradient_buffer(record):
    published = record(PUBLISHED)
    requested = next(
        e["requested_bytes"] for e in published["ledger"] if e["owner"] == "gradient_flat_buffer" and e["at_peak"]
    )
    assert published["memory"]["overflow_spike_bytes"] == pytest.approx(1.25 * requested, rel=0.01)


def test_the_fused_check_needs_no_memory(record):
    assert record(OURS)["memory"]["overflow_spike_bytes"] == 0


@pytest.mark.slow
def test_power_of_two_allocator_reserves_rounded_sizes(record):
    entries = [e for e in record(PUBLISHED)["ledger"] if e["allocator"] == "power_of_two"]
    assert entries
    assert all(
        e["reserved_bytes"] == 1 << (e["requested_bytes"] - 1).bit_length() or e["reserved_bytes"] == 4096
        for e in entries
    )


@pytest.mark.slow
def test_the_adaptive_pool_is_smaller_than_nine_embeddings(record):
    published, ours = record(PUBLISHED), record(OURS)
    assert reserved(ours, "parameter_pool") < 0.4 * reserved(published, "parameter_pool")
    assert ours["memory"]["host_peak_net_bytes"] < published["memory"]["host_peak_net_bytes"]

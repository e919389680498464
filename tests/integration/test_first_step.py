"""Start-up and the first step take no more host memory than the steps that follow."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


@pytest.fixture(scope="module")
def record(runs):
    return runs.record("memascend", "memascend", "--k", "16", "--steps", "3", "--mode", "memory")


def test_start_up_peak_stays_below_training_peak(record):
    memory = record["memory"]
    assert memory["startup_peak_bytes"] < memory["training_peak_bytes"]
    assert memory["kernel_hwm_startup_bytes"] < memory["kernel_hwm_training_bytes"]
    assert memory["startup_host_peak_bytes"] <= memory["host_peak_bytes"]


def test_no_pageable_sub_group_buffer_duplicates_page_locked_ones(record):
    """In stock DeepSpeed the gradient buffer has a pageable copy, and each
    sub-group's moments start as two pageable tensors."""
    largest = max(e["requested_bytes"] for e in record["ledger"] if e["owner"] == "optimizer_buffers")
    flat = next(e["born_s"] for e in record["ledger"] if e["owner"] == "gradient_flat_buffer")
    pageable = [e for e in record["ledger"] if e["role"] == "host" and not e["locked"]]
    large = [e for e in pageable if e["reserved_bytes"] > 0.75 * largest]
    assert [e for e in large if e["died_s"] is None or e["died_s"] > flat] == []

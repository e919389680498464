"""MemAscend's parts must not change training: same losses, same master weights, to the last bit.

The reference is ZeRO-3 with CPU offload, which uses no swap buffer: two NVMe runs can agree and both be wrong.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.deepspeed

NON_REENTRANT = ("--checkpointing", "non-reentrant")
# Stock NVMe is in test_matrix.py's quick cases too.
NVME_ARMS = [
    pytest.param(("zero_infinity", "today", *NON_REENTRANT), marks=pytest.mark.slow),
    pytest.param(("zero_infinity", "as_published"), marks=pytest.mark.slow),
    ("memascend", "memascend"),
]


@pytest.fixture(scope="module")
def reference(runs):
    return runs.record("zero_offload", "today")


@pytest.mark.parametrize("arm", NVME_ARMS, ids=lambda words: "-".join(words[:2]))
def test_losses_and_master_weights_equal_the_cpu_offload_reference(runs, reference, arm):
    record = runs.record(*arm)
    assert record["losses"] == reference["losses"]
    assert record["master_weights_sha256"] == reference["master_weights_sha256"]


def test_at_least_ten_steps_are_applied_and_none_is_skipped(reference):
    assert reference["skipped_steps"] == 0
    assert len(set(reference["losses"])) >= 10


@pytest.mark.slow
def test_without_the_gather_clone_stock_deepspeed_trains_wrongly(runs, reference):
    """The negative control: if this were equal, the comparison could not
    detect a buffer that is reused while it is read."""
    with_clone = runs.record("zero_infinity", "today", *NON_REENTRANT)
    without = runs.record("zero_infinity", "today", *NON_REENTRANT, "--steps", "4", "--no-gather-clone")
    assert with_clone["losses"] == reference["losses"]
    assert without["losses"] != reference["losses"][:4]
    assert "gather-clone" in with_clone["shims"]
    assert "gather-clone" not in without["shims"]


@pytest.mark.slow
def test_bf16_equals_its_own_reference(runs):
    options = ("--dtype", "bf16", "--steps", "4")
    reference = runs.record("zero_offload", "today", *options)
    record = runs.record("memascend", "memascend", *options)
    assert record["losses"] == reference["losses"]
    assert record["master_weights_sha256"] == reference["master_weights_sha256"]
    assert record["overflow_check_seconds"] == []  # DeepSpeed checks fp16 gradients only


@pytest.mark.slow
def test_two_ranks_equal_their_own_reference(runs):
    options = ("--ranks", "2", "--k", "32", "--steps", "3")
    reference = runs.record("zero_offload", "today", *options)
    record = runs.record("memascend", "memascend", *options)
    assert record["losses"] == reference["losses"]


def test_a_run_leaves_nothing_in_shared_memory(runs):
    runs.record("memascend", "memascend")
    assert any(buffers.made for buffers in runs.shared_buffers)
    assert [buffers.left for buffers in runs.shared_buffers if buffers.left] == []


def test_parameters_are_really_swapped_to_nvme(runs):
    record = runs.record("memascend", "memascend")
    assert record["parameters_on_nvme"] >= 7 * 28  # seven matrices in each of 28 blocks
    # Each step after the first (which has no Adam states yet) reads 16 bytes of states and gradients for each
    # parameter, and 2 bytes in forward and in backward, except for tensors below DeepSpeed's swap limit.
    assert min(record["io"]["read_bytes_per_step"][1:]) > 19 * record["twin"]["parameters"]

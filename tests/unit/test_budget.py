"""A hard budget for host memory: amounts, the share of a rank, and refusals that name owner, use and free space."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend import _C
from memascend.memory.budget import HostBudget, HostBudgetExceeded, local_ranks, parse_bytes
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import CountingAllocator, PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator

MIB = 2**20


@pytest.mark.parametrize(
    ("amount", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("512MiB", 512 * MIB),
        ("2TB", 2 * 10**12),
        ("100kB", 100_000),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        (2**60 + 1, 2**60 + 1),
    ],
)
def test_amounts_accept_binary_and_decimal_units(amount, nbytes):
    assert parse_bytes(amount) == nbytes


@pytest.mark.parametrize(
    "amount", ["24G", "GiB", "", "-1GiB", "1e3GiB", "24 gigs", "0", 0, -5, True, 1.5, None, "0.1B"]
)
def test_invalid_amounts_are_refused_with_key_and_example(amount):
    with pytest.raises(ValueError, match=r"^host_memory: .* is not an amount of memory: write 24GiB, 24GB") as refused:
        parse_bytes(amount)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("amount", ["4", 64, "1000"])
def test_tiny_amount_without_unit_suggests_a_forgotten_unit(amount):
    with pytest.raises(ValueError, match=rf"taken as bytes, which is too little to be meant: write {amount}GiB"):
        parse_bytes(amount)


@given(st.integers(1024, 2**62))
def test_integer_byte_amounts_are_exact(nbytes):
    assert parse_bytes(nbytes) == nbytes


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),
        ({"LOCAL_SIZE": "2", "WORLD_SIZE": "8"}, 2),
        ({"WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "no", "WORLD_SIZE": "0"}, 1),
    ],
)
def test_the_launcher_says_how_many_ranks_share_the_machine(environment, ranks):
    assert local_ranks(environment) == ranks


def test_a_machines_budget_is_divided_by_its_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    budget = HostBudget.of_machine("8GiB")
    assert (budget.limit_bytes, budget.ranks) == (2 * 2**30, 4)
    with pytest.raises(HostBudgetExceeded, match=r"budget of 2\.00 GiB \(this rank's share of 8\.00 GiB\).*9\.00GiB"):
        budget.check("x", "pool", 2**30, {"optimizer": 2**30 + 2**28})
    with pytest.raises(ValueError, match="0 bytes divided by 4 ranks leave none"):
        HostBudget.of_machine("3B")


@pytest.mark.parametrize("make", [PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator])
def test_over_budget_allocation_is_refused_with_details_and_takes_nothing(make):
    ledger = Ledger(HostBudget(limit_bytes=4 * MIB))
    allocator = make(ledger, lock=False)
    kept = allocator.allocate(2 * MIB, torch.uint8, name="pool-0", owner="parameter_pool")
    mapped = {block["address"] for block in _C.pinned_live()}
    with pytest.raises(HostBudgetExceeded) as refused:
        allocator.allocate(3 * MIB, torch.uint8, name="moments", owner="optimizer_states")
    error = refused.value
    assert isinstance(error, MemoryError)
    assert (error.name, error.owner, error.left_bytes) == ("moments", "optimizer_states", 2 * MIB)
    assert error.requested_bytes == allocator.reserved_bytes(3 * MIB)
    assert error.in_use == {"parameter_pool": 2 * MIB}
    message = str(error)
    assert message.startswith("optimizer_states asks for")
    for part in (
        "'moments'",
        "2.00 MiB are left",
        "budget of 4.00 MiB",
        "parameter_pool 2.00 MiB",
        "raise host_memory",
    ):
        assert part in message
    assert "\n" not in message
    assert {block["address"] for block in _C.pinned_live()} <= mapped  # those of an earlier test may be freed meanwhile
    assert [entry.name for entry in ledger.entries()] == ["pool-0"]
    assert kept.numel() == 2 * MIB


def test_freed_memory_returns_to_the_budget():
    ledger = Ledger(HostBudget(limit_bytes=MIB))
    allocator = PageAlignedPinnedAllocator(ledger, lock=False)
    for _ in range(3):
        tensor = allocator.allocate(MIB, torch.uint8, name="x", owner="test")
        view = tensor[5:]
        del tensor
        with pytest.raises(HostBudgetExceeded):
            allocator.allocate(1, torch.uint8, name="y", owner="test")
        del view
    assert ledger.in_use() == {}


def test_budget_counts_only_live_host_memory():
    ledger = Ledger(HostBudget(limit_bytes=100))
    ledger.record("activations", "model", 10_000, role="device")
    ledger.record("before", "test", 10_000, born_s=0.0, died_s=1.0)
    first = ledger.record("x", "test", 60, reserved_bytes=90)
    assert ledger.in_use() == {"test": 90}
    with pytest.raises(HostBudgetExceeded, match="test asks for"):
        ledger.record("y", "test", 11)
    ledger.close(first)
    ledger.record("y", "test", 100)
    assert len(ledger.entries()) == 4


def test_plan_over_budget_is_refused_naming_the_owner():
    ledger = Ledger(HostBudget(limit_bytes=MIB))
    with pytest.raises(HostBudgetExceeded, match=r"gradient_flat_buffer asks for 8192\.00 GiB"):
        CountingAllocator("page_aligned", ledger).allocate(2**43, torch.uint8, name="g", owner="gradient_flat_buffer")


def test_a_failed_allocation_leaves_no_entry_and_no_use(monkeypatch):
    ledger = Ledger(HostBudget(limit_bytes=MIB))
    allocator = PageAlignedPinnedAllocator(ledger, lock=False)

    def refuse(*_):
        raise MemoryError("cannot map")

    monkeypatch.setattr(_C, "pinned_empty", refuse)
    with pytest.raises(MemoryError, match="'x': cannot map"):
        allocator.allocate(100, torch.uint8, name="x", owner="test")
    assert (ledger.entries(), ledger.in_use()) == ([], {})


def test_threads_never_take_more_than_the_budget_together():
    ledger = Ledger(HostBudget(limit_bytes=8 * MIB))
    allocator = PageAlignedPinnedAllocator(ledger, lock=False)
    refused, most = [], []

    def work():
        for _ in range(20):
            try:
                tensor = allocator.allocate(3 * MIB, torch.uint8, name="x", owner="test")
                most.append(sum(ledger.in_use().values()))
                del tensor
            except HostBudgetExceeded:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) + len(refused) == 80
    assert max(most) <= 6 * MIB
    assert ledger.in_use() == {}
    assert ledger.peak_bytes() <= 8 * MIB

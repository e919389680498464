"""The ledger: what it accepts, its peaks, and its check against the kernel."""

import math
import mmap
import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend.memory.ledger import Ledger, LedgerEntry, verify_by_address
from memascend.memory.pinned import PageAlignedPinnedAllocator


def entry(**changes) -> LedgerEntry:
    base = {
        "name": "x",
        "owner": "test",
        "role": "host",
        "allocator": "pageable",
        "requested_bytes": 10,
        "reserved_bytes": 10,
        "touched_bytes": 10,
        "address": None,
        "locked": False,
        "born_s": 0.0,
        "died_s": None,
    }
    return LedgerEntry(**(base | changes))


def test_sizes_default_to_the_requested_bytes():
    ledger = Ledger()
    ledger.record("x", "test", 100)
    (got,) = ledger.entries()
    assert (got.requested_bytes, got.reserved_bytes, got.touched_bytes) == (100, 100, 100)
    assert (got.role, got.allocator, got.address, got.locked, got.died_s) == ("host", "pageable", None, False, None)


def test_entry_closes_once_and_must_exist():
    ledger = Ledger()
    number = ledger.record("x", "test", 100)
    ledger.close(number)
    with pytest.raises(ValueError, match="already closed"):
        ledger.close(number)
    with pytest.raises(ValueError, match="no entry 999"):
        ledger.close(999)


@pytest.mark.parametrize(
    "bad",
    [
        {"requested_bytes": -1},
        {"requested_bytes": 10, "reserved_bytes": 9},
        {"requested_bytes": 10, "touched_bytes": 11},
        {"requested_bytes": 10, "role": "gpu"},
        {"requested_bytes": 10, "born_s": 2.0, "died_s": 1.0},
    ],
)
def test_impossible_entries_are_refused(bad):
    ledger = Ledger()
    with pytest.raises(ValueError, match="ledger entry 'x'"):
        ledger.record("x", "test", **bad)
    assert ledger.entries() == []


def test_peak_counts_simultaneous_entries_by_role_and_measure():
    ledger = Ledger()
    ledger.record("a", "t", 10, reserved_bytes=16, touched_bytes=12, born_s=0, died_s=5)
    ledger.record("b", "t", 20, born_s=5, died_s=9)  # replaces a at the same instant
    ledger.record("c", "t", 7, born_s=6)
    ledger.record("d", "t", 1000, born_s=0, role="device")
    assert ledger.peak_bytes("host") == 27
    assert ledger.peak_bytes("host", "reserved_bytes") == 27
    assert ledger.peak_bytes("device") == 1000
    peak = ledger.peak("host")
    assert peak.instant_s == 6
    assert [e.name for e in peak.entries] == ["b", "c"]
    assert ledger.peak_bytes("host") < sum(e.touched_bytes for e in ledger.entries() if e.role == "host")


def test_peak_measures_differ_and_unknown_ones_are_refused():
    ledger = Ledger()
    ledger.record("a", "t", 10, reserved_bytes=16, touched_bytes=12)
    assert [ledger.peak_bytes("host", m) for m in ("requested_bytes", "reserved_bytes", "touched_bytes")] == [
        10,
        16,
        12,
    ]
    with pytest.raises(ValueError, match="unknown measure"):
        ledger.peak("host", "bytes")
    assert Ledger().peak("host").entries == ()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.one_of(st.none(), st.integers(0, 30)), st.integers(0, 1000)), max_size=30)
)
def test_peak_agrees_with_a_check_of_every_instant(spans):
    ledger = Ledger()
    for born, length, size in spans:
        ledger.record("x", "t", size, born_s=born, died_s=None if length is None else born + length)
    brute = 0
    for instant in range(100):
        brute = max(brute, sum(e.touched_bytes for e in ledger.entries() if e.alive_at(instant)))
    assert ledger.peak_bytes() == brute
    assert sum(e.touched_bytes for e in ledger.peak().entries) == brute


def test_json_has_the_fields_of_the_record_and_shifted_times():
    ledger = Ledger()
    ledger.record("a", "t", 10, born_s=100.5, died_s=103.0)
    (item,) = ledger.to_json(origin_s=100.0)
    assert list(item) == [
        "name",
        "owner",
        "role",
        "allocator",
        "requested_bytes",
        "reserved_bytes",
        "touched_bytes",
        "address",
        "locked",
        "born_s",
        "died_s",
        "nodes",
    ]
    assert math.isclose(item["born_s"], 0.5)
    assert math.isclose(item["died_s"], 3.0)


def test_sources_run_before_every_query():
    ledger = Ledger()
    number = ledger.record("a", "t", 10)
    pending = [number]
    source = lambda: [ledger.close(pending.pop()) for _ in range(len(pending))]  # noqa: E731
    ledger.attach(source)
    ledger.attach(source)
    assert ledger.live() == []


def test_threads_record_and_close_entries():
    ledger = Ledger()

    def work():
        for _ in range(200):
            ledger.close(ledger.record("x", "t", 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.entries()) == 800
    assert ledger.live() == []


def test_verification_sees_mapping_locking_and_residence():
    ledger = Ledger()
    buffer = PageAlignedPinnedAllocator(ledger, lock=False).allocate(3 * 4096, torch.uint8, name="x", owner="t")
    (good,) = ledger.live()
    assert [c.agrees for c in verify_by_address([good])] == [True]
    claims_lock = entry(address=good.address, requested_bytes=1, reserved_bytes=4096, touched_bytes=4096, locked=True)
    unmapped = entry(address=4096, reserved_bytes=4096, touched_bytes=4096)
    counted = entry(address=None)
    checks = verify_by_address([claims_lock, unmapped, counted])
    assert [(c.mapped, c.agrees) for c in checks] == [(True, False), (False, False)]
    del buffer


def test_verification_counts_only_touched_pages():
    with mmap.mmap(-1, 16 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
        area[0:1] = b"x"
        area[5 * 4096 : 5 * 4096 + 1] = b"x"
        claimed = entry(address=address, reserved_bytes=16 * 4096, touched_bytes=16 * 4096)
        (check,) = verify_by_address([claimed])
        assert check.mapped
        assert check.resident_bytes == 2 * 4096
        assert not check.agrees


def test_closed_entries_are_forgotten_except_those_of_peaks(monkeypatch):
    drawn, whole = random.Random(1), Ledger()
    monkeypatch.setattr("memascend.memory.ledger._MOST_DEAD", 50)
    ledger, alive = Ledger(), []

    def close(number, now):
        for each, entry_id in zip((whole, ledger), alive.pop(number), strict=True):
            each.close(entry_id, died_s=now)

    for number in range(3000):
        if alive and drawn.random() < 0.5:
            close(drawn.randrange(len(alive)), float(number))
        asked, role = drawn.randrange(1, 10_000), drawn.choice(["host", "device"])
        sizes = {"reserved_bytes": asked + drawn.randrange(9000), "touched_bytes": drawn.randrange(asked + 1)}
        alive.append(
            [each.record(str(number), "t", asked, role=role, born_s=number, **sizes) for each in (whole, ledger)]
        )
        if len(alive) > 40:
            close(0, float(number))
    for role in ("host", "device"):
        assert ledger.live(role) == whole.live(role)
        for measure in ("requested_bytes", "reserved_bytes", "touched_bytes"):
            assert ledger.peak(role, measure) == whole.peak(role, measure)
    assert len(whole.entries()) == 3000
    assert len(ledger.entries()) < 500

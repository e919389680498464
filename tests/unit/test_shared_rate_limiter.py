"""Drives of a known rate, on a clock that processes share."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import torch

from memascend.bench.rate_limit import RateLimitedHandle, RateLimitedTier, SharedRateLimiter
from memascend.storage import open_paths, path_lock
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import FileTier
from memascend.storage.fair_lock import FairLock

READ, WRITE = 8e6, 4e6


def seconds_of(book, seconds: float) -> float:
    """Check that a booked transfer ends so many seconds after some instant of the call, however long the call takes."""
    before = time.monotonic()
    end = book()
    assert before + seconds <= end <= time.monotonic() + seconds
    return end


def test_limiters_on_one_clock_book_transfers_one_after_another(tmp_path):
    mine, other = (SharedRateLimiter(tmp_path / "clock", READ, WRITE) for _ in range(2))
    first = seconds_of(lambda: mine.book(8_000_000, write=False), 1.0)
    second = other.book(8_000_000, write=True)
    assert second - first == pytest.approx(2.0, abs=1e-6)


def test_duplex_drive_books_reads_and_writes_independently(tmp_path):
    drive = SharedRateLimiter(tmp_path / "clock", READ, WRITE, duplex=True)
    seconds_of(lambda: drive.book(8_000_000, write=False), 1.0)
    seconds_of(lambda: drive.book(8_000_000, write=True), 2.0)


def test_tier_transfers_are_correct_and_no_faster_than_the_clock(tmp_path):
    with closing(
        RateLimitedTier(FileTier(tmp_path, "test"), SharedRateLimiter(tmp_path / "clock", READ, WRITE))
    ) as tier:
        written, read = torch.arange(200_000), torch.empty(200_000, dtype=torch.int64)
        begin = time.monotonic()
        tier.write("a", written)
        tier.read("a", read).wait()
        seconds = time.monotonic() - begin
        moved = tier.transferred
    assert torch.equal(read, written)
    assert seconds >= written.nbytes * (1 / READ + 1 / WRITE)
    assert (moved.bytes_read, moved.bytes_written) == (written.nbytes, written.nbytes)
    assert moved.write_bytes_per_s <= WRITE


def test_drive_serves_remaining_and_later_tiers_after_some_close(tmp_path):
    drive, values = SharedRateLimiter(tmp_path / "clock", 1e12, 1e12), torch.arange(1000)
    first, second = (RateLimitedTier(FileTier(tmp_path, "test"), drive) for _ in range(2))
    first.close()
    second.write("a", values).wait(10)
    second.close()
    with closing(RateLimitedTier(FileTier(tmp_path, "test"), drive)) as third:
        third.write("a", values).wait(10)


def test_error_of_underlying_tier_reaches_the_caller(tmp_path):
    drive = SharedRateLimiter(tmp_path / "clock", READ, WRITE)
    with (
        closing(RateLimitedTier(FileTier(tmp_path, "test"), drive)) as tier,
        pytest.raises(ValueError, match="no such"),
    ):
        tier.read("b", torch.empty(8))


def test_drives_on_one_file_system_get_separate_stable_lock_names(tmp_path, monkeypatch):
    names = []

    class Named(FairLock):
        def __init__(self, name):
            names.append(name)
            super().__init__(name, tmp_path)

    for module in (open_paths, path_lock):
        monkeypatch.setattr(module, "FairLock", Named)
    config = DirectEngineConfig(control_folder=str(tmp_path))
    for _ in range(2):
        drives = {str(tmp_path / name): SharedRateLimiter(tmp_path / f"{name}.clock", 1e12, 1e12) for name in "ab"}
        around = {"around": lambda path, tier, drives=drives: RateLimitedTier(tier, drives[path])}
        open_paths.open_paths(list(drives), "tests", config=config, exclusive=True, **around).close()
    assert names[:4] == names[4:]
    assert len(set(names)) == 2


class _AtOnce:
    def __init__(self):
        self.in_flight = 0

    def async_pread(self, buffer, file, offset=0):
        self.in_flight += 1
        return 0

    def wait(self):
        ended, self.in_flight = self.in_flight, 0
        return ended

    def get_block_size(self):
        return 4096


def test_rate_limited_deepnvme_handle_waits_for_the_clock(tmp_path):
    handle = RateLimitedHandle(_AtOnce(), SharedRateLimiter(tmp_path / "clock", READ, WRITE))
    begin = time.monotonic()
    handle.async_pread(torch.empty(400_000), "a")
    handle.async_pread(torch.empty(400_000), "b")
    assert handle.wait() == 2
    assert time.monotonic() - begin >= 3_200_000 / READ
    assert handle.get_block_size() == 4096


def test_two_folders_on_one_drive_work_and_log_one_message(tmp_path, caplog):
    folders = [str(tmp_path / name) for name in "ab"]
    config = DirectEngineConfig(control_folder=str(tmp_path), volatile=True)
    with open_paths.open_paths(folders, "tests", config=config, exclusive=True, placement=[1, 1]) as tier:
        written = {key: torch.full((5000,), float(ord(key))) for key in "klmn"}
        for key, tensor in written.items():
            tier.write(key, tensor)
        tier.wait()
        assert {tier.path_of(key) for key in written} == set(folders)
        for key, tensor in written.items():
            found = torch.empty_like(tensor)
            tier.read(key, found).wait()
            assert torch.equal(found, tensor)
    said = [record.getMessage() for record in caplog.records if "are on one drive" in record.getMessage()]
    assert len(said) == 1
    assert all(folder in said[0] for folder in folders)

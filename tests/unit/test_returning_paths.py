"""A path of a tier that was taken out, or was full, returns once it works again, without its old data."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time

import pytest
import torch

from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError
from memascend.storage.path_rates import measure
from memascend.storage.placement import Rates
from tests.tier_paths import HANG_S, HANGS_US, MAX_S, NUMEL, made_in, tensor

EQUAL = {"a": Rates(1e9, 1e9), "b": Rates(1e9, 1e9)}


@pytest.fixture
def paths(tmp_path):
    with made_in(tmp_path) as make:
        yield make


def passes(made, count: int, first: int, groups: int = 6) -> str:
    """Run passes that write every tensor and read it back; background probes have ended after each."""
    for step in range(first, first + count):
        made.write(groups, step)
        made.check(groups, step)
        made.tier.observe()
        made.tier._idle.wait(MAX_S)
    return made.places(groups)


def said(caplog, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["direct", "files"])
@pytest.mark.parametrize("operation", ["write", "any"])
def test_failed_path_gets_its_share_again_once_it_works(paths, caplog, kind, operation):
    two = paths(kind=kind, placement=[1, 1])
    two.write(6)
    two.faults["a"].add(operation, error=errno.EIO)
    assert passes(two, 4, 1) == "bbbbbb"
    assert two.tier.report()[0].failure is not None
    two.faults["a"].clear()
    assert passes(two, 8, 5).count("a") == 3
    assert two.tier.report()[0].failure is None
    gc.collect()
    assert said(caplog, "path a (") == said(caplog, "path a is used again") == 1
    assert len(caplog.records) == 2, caplog.text  # no message about the probes that failed


def test_write_already_under_way_does_not_restore_a_failed_path(paths):
    two = paths(placement=[1, 1])
    two.faults["a"].add("write", times=1, error=errno.EIO)
    two.write(6)
    assert two.tier.report()[0].failure is not None


def test_path_that_returns_wrong_bytes_stays_out(paths, monkeypatch):
    two = paths(placement=[1, 1])
    two.faults["a"].add("write", error=errno.EIO)
    two.write(6)
    two.faults["a"].clear()
    way = two.tier._paths[0]
    monkeypatch.setattr(way, "tier", Forgetful(way.tier))
    assert passes(two, 6, 1) == "bbbbbb"
    assert way.tier.reads > 0


class Forgetful:
    """A tier whose reads end without an error but return no data."""

    def __init__(self, tier) -> None:
        self._tier, self.reads = tier, 0

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def read(self, key, tensor, **options):
        self.reads += 1
        return self._tier.read(key, torch.empty_like(tensor), **options)


def test_measurement_verifies_what_it_reads_back(tmp_path):
    with DirectTier.in_file(tmp_path, "tests") as tier, pytest.raises(StorageError, match="is not what is read back"):
        measure(Forgetful(tier), 1 << 20)


def test_path_with_the_only_copy_stays_out_until_rewritten_elsewhere(paths):
    two = paths(placement=[1, 1])
    two.write(6)
    two.tier.write("kept-0", tensor(0)).wait(MAX_S)
    assert two.tier.path_of("kept-0") == "a"
    two.faults["a"].add("write", times=1, error=errno.EIO)
    assert passes(two, 8, 1) == "bbbbbb"
    two.tier.read("kept-0", out := torch.empty(NUMEL)).wait(MAX_S)
    assert torch.equal(out, tensor(0))
    two.tier.write("kept-0", tensor(1)).wait(MAX_S)
    assert passes(two, 8, 9).count("a") == 3


def test_hung_path_gets_nothing_while_an_old_request_is_pending(paths):
    two = paths(placement=[1, 1], hang_s=HANG_S)
    two.write(4)
    way, begun = two.tier._paths[0], []
    stock = way.tier.write

    def write(key, *args, **options):
        begun.append((key, any(each.over for each in way.in_flight)))
        return stock(key, *args, **options)

    way.tier.write = write
    two.faults["a"].add("write", times=1, delay_us=HANGS_US)
    two.write(4, 1)
    assert "hangs" in two.tier.report()[0].failure
    step = 2
    while way.hanging:
        begun.clear()
        assert passes(two, 1, step, 4) == "bbbb"
        assert begun == [] or not way.hanging
        step += 1
    assert passes(two, 64, step, 4).count("a") == 2
    assert not any(hung for _, hung in begun)
    two.check(4, step + 63)


def test_hanging_probe_blocks_nothing_and_is_not_started_twice(paths):
    two = paths(placement=[1, 1], hang_s=0.2)
    two.faults["a"].add("write", times=1, error=errno.EIO)
    two.write(4)
    two.faults["a"].add("any", delay_us=2_000_000)
    for step in (1, 2, 3):
        two.write(4, step)
        two.tier.observe()
    way = two.tier._paths[0]
    tries = [thread for thread in threading.enumerate() if thread.name == "memascend-measure-a"]
    assert len(tries) == 1
    while way.lock._inside:  # a hanging path does not keep other processes out
        assert tries[0].is_alive()
        time.sleep(0.01)
    assert tries[0].is_alive()
    for step in range(4, 12):
        two.write(4, step)
        two.tier.observe()
    assert [thread for thread in threading.enumerate() if thread.name == "memascend-measure-a"] == tries
    two.check(4, 11)
    assert two.places(4) == "bbbb"


class Small:
    """A tier that says how much is free."""

    def __init__(self, tier, free_bytes: int) -> None:
        self._tier, self.free_bytes = tier, free_bytes

    def __getattr__(self, name):
        return getattr(self._tier, name)


def test_full_path_takes_more_once_a_group_fits(paths, caplog):
    two = paths(placement=[1, 1])
    way = two.tier._paths[0]
    way.tier = Small(way.tier, 0)
    two.faults["a"].add("write", error=errno.ENOSPC)
    assert passes(two, 3, 0) == "bbbbbb"
    two.faults["a"].clear()
    group_bytes = 2 * 4 * NUMEL
    two.tier._groups.group_bytes["large"] = 1 << 40
    way.tier.free_bytes = (1 << 40) - 1
    assert passes(two, 6, 3) == "bbbbbb"
    assert way.full
    del two.tier._groups.group_bytes["large"]
    way.tier.free_bytes = max(group_bytes, 64 << 20)
    assert passes(two, 16, 9).count("a") == 3
    assert not way.full
    assert said(caplog, "is full") == said(caplog, "path a is used again") == 1


def test_repeatedly_failing_path_is_retried_less_often(paths, caplog):
    two = paths(placement=[1, 1], rates=EQUAL)
    for step in range(64):
        two.faults["a"].clear()
        two.write(2, step)
        two.tier.observe()
        two.tier._idle.wait(MAX_S)
        two.faults["a"].add("write", error=errno.EIO)
        two.write(2, step)
    two.check(2, 63)
    assert 3 <= said(caplog, "path a is used again") <= 6


def test_failed_path_returns_even_when_groups_are_not_moved(paths):
    """It takes what the others cannot."""
    two = paths(rehome=False)
    two.write(4)
    two.faults["a"].add("write", error=errno.EIO)
    passes(two, 1, 1, 4)
    two.faults["a"].clear()
    assert passes(two, 6, 2, 4) == "bbbb"
    assert two.tier.report()[0].failure is None


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 24))])
def test_path_failing_and_returning_at_random_changes_no_tensor(paths, seed):
    chance = random.Random(seed)
    two = paths(kind=chance.choice(["direct", "files"]), placement=[1, 1])
    values = {f"{kind}{group}": 0.0 for group in range(6) for kind in ("", "exp_avg-")}
    out = False
    two.write(6, 0)
    values = {key: float(key.rpartition("-")[2]) for key in values}
    for step in range(1, 14):
        for key in sorted(values, reverse=step % 2 == 0):
            if chance.random() < 0.04:
                out = not out
                two.faults["a"].clear()
                if out:
                    two.faults["a"].add("write", error=chance.choice([errno.EIO, errno.ENOSPC]))
            two.tier.read(key, state := torch.empty(NUMEL)).wait(MAX_S)
            assert torch.equal(state, tensor(values[key])), key
            values[key] = 100.0 * step + chance.randrange(90)
            two.tier.write(key, tensor(values[key]))
        two.tier.observe()
    two.tier.wait(MAX_S)
    for key, value in values.items():
        two.tier.read(key, state := torch.empty(NUMEL)).wait(MAX_S)
        assert torch.equal(state, tensor(value)), key

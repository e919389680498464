"""One tier over several paths: placement of groups, and that none is lost when a path fails, fills, hangs or vanishes.

Properties of every tier are in test_tier.py, which tests this one too.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time

import pytest
import torch

from memascend.storage import path_rates
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError
from memascend.storage.path_rates import measure
from memascend.storage.placement import Rates
from tests.tier_paths import HANG_S, HANGS_US, MAX_S, NUMEL, made_in, tensor


@pytest.fixture
def paths(tmp_path):
    with made_in(tmp_path) as make:
        yield make


# -- placement of groups -----------------------------------------------------------------------------------------------


def test_groups_follow_path_rates_and_keep_their_tensors_together(paths, monkeypatch):
    # ignore the observed rates of a busy machine
    monkeypatch.setattr("memascend.storage.storage_path._LEAST_OBSERVED_S", float("inf"))
    two = paths(rates={"a": Rates(2e9, 2e9), "b": Rates(1e9, 1e9)})
    two.write(12)
    assert two.places(12).count("a") == 8
    assert "bb" not in two.places(12)  # neighbours are on different paths
    assert all(two.tier.path_of(str(group)) == two.tier.path_of(f"exp_avg-{group}") for group in range(12))
    two.check(12)


def test_manual_ratio_is_kept(paths):
    three = paths("abc", placement=[3, 1, 0])
    for step in range(3):  # all sizes are known after the first pass; the second plans with them, and the third moves
        three.write(8, step)
    assert sorted(three.places(8)) == list("aaaaaabb")


@pytest.mark.parametrize(("share", "groups"), [(1 / 2, 5), (1 / 50, 2)])
def test_groups_leave_a_slowed_path_within_three_passes(paths, monkeypatch, share, groups):
    """Twelve groups on two equal paths of a known rate, one of which then becomes slow."""
    monkeypatch.setattr("memascend.storage.path_probing.measure", lambda tier: None)
    monkeypatch.setattr("memascend.storage.storage_path._LEAST_OBSERVED_S", 0.0)
    two = paths(rates={"a": Rates(1e6, 1e6), "b": Rates(1e6, 1e6)}, fixed_rate=1e6)
    for step in range(2):
        two.write(12, step)
        two.check(12, step)
    assert two.places(12).count("a") == 6
    two.fixed_rate["a"].rate *= share
    for step in (2, 3, 4):
        two.write(12, step)
        two.check(12, step)
        two.tier.observe()
    two.write(12, 5)
    assert two.places(12).count("a") <= groups
    assert two.tier.moves >= 2 * (6 - groups)  # tensors
    report = {each.name: each for each in two.tier.report()}
    assert report["a"].groups + report["b"].groups == 12
    assert report["a"].rates.write < 0.6 * 1e6
    two.check(12, 5)


@pytest.fixture
def only_measured(monkeypatch):
    """Use only given or newly measured rates: nothing is observed."""
    monkeypatch.setattr("memascend.storage.storage_path._LEAST_OBSERVED_S", 1e9)


def test_path_with_a_disturbed_first_measurement_regains_its_share(paths, only_measured):
    two = paths(rates={"a": Rates(1e3, 1e3), "b": Rates(1e6, 1e6)})
    for step in range(2):
        assert two.tier.report()[0].groups == 0
        two.write(10, step)
    two.tier._idle.wait(MAX_S)  # it is measured while the pass continues
    two.write(10, 2)
    assert two.places(10).count("a") > 5
    two.check(10, 2)
    assert two.tier.report()[0].rates.write > 1e6


def test_path_that_stays_slow_is_measured_ever_less_often(paths, only_measured, monkeypatch):
    asked = []
    monkeypatch.setattr("memascend.storage.path_probing.measure", lambda tier: asked.append(tier) or Rates(1e3, 1e3))
    two = paths(rates={"a": Rates(1e3, 1e3), "b": Rates(1e8, 1e8)})
    two.write(4)
    for _ in range(61):
        two.tier.observe()
        two.tier._idle.wait(MAX_S)
    assert len(asked) == 5  # after 2, 4, 8, 16 and 32 passes
    assert two.tier.moves == 0
    two.write(4, 1)
    two.check(4, 1)
    assert two.places(4) == "bbbb"


def test_path_that_cannot_be_measured_again_stays_unused(paths, only_measured):
    two = paths(rates={"a": Rates(1e3, 1e3), "b": Rates(1e6, 1e6)})
    two.faults["a"].add("any", error=errno.EIO)
    for step in range(3):
        two.write(6, step)
        two.tier._idle.wait(MAX_S)
    two.check(6, 2)
    assert two.places(6) == "bbbbbb"
    assert two.tier.report()[0].rates.write == 1e3


def test_path_that_hangs_during_measurement_does_not_delay_close(paths, only_measured, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("memascend.storage.path_probing.measure", lambda tier: released.wait(MAX_S) and None)
    two = paths(rates={"a": Rates(1e3, 1e3), "b": Rates(1e6, 1e6)}, hang_s=0.1)
    for step in range(2):
        two.write(4, step)
    two.tier.close()
    assert not released.is_set()
    released.set()


@pytest.mark.parametrize("options", [{"placement": [0, 1]}, {"rehome": False}])
def test_path_excluded_by_the_user_is_not_measured_again(paths, only_measured, monkeypatch, options):
    monkeypatch.setattr("memascend.storage.path_probing.measure", lambda tier: pytest.fail("it was measured"))
    two = paths(rates={"a": Rates(1e3, 1e3), "b": Rates(1e6, 1e6)}, **options)
    for step in range(3):
        two.write(4, step)
        two.tier.observe()
        two.tier._idle.wait(MAX_S)
    assert two.places(4) == "bbbb"


def test_short_transfers_of_several_passes_are_observed_together(paths, monkeypatch):
    monkeypatch.setattr("memascend.storage.storage_path._LEAST_OBSERVED_S", 0.05)
    one = paths("a", rates={"a": Rates(1e12, 1e12)})
    one.faults["a"].add("write", delay_us=10_000)
    for step in range(8):
        one.tier.write("0", tensor(step)).wait(MAX_S)
        one.tier.observe()
    assert one.tier.report()[0].rates.write < 1e12


def test_with_rehome_off_groups_stay(paths):
    two = paths(rates={"a": Rates(2e8, 2e8), "b": Rates(2e8, 2e8)}, rehome=False)
    two.write(6)
    before = two.places(6)
    two.faults["a"].add("write", delay_us=20_000)
    for step in range(3):
        two.write(6, step)
        two.tier.observe()
    assert two.places(6) == before


def test_moved_group_gives_its_space_back(paths):
    two = paths(placement=[1, 1])
    two.write(6)
    used = two.tier.used_bytes
    two.tier._groups.placement = [0, 1]
    assert two.tier.observe()
    two.write(6, 1)
    assert two.places(6) == "bbbbbb"
    two.check(6, 1)
    assert two.tier.used_bytes == used


def test_rates_are_measured_at_the_start(tmp_path):
    before = torch.get_rng_state()
    with DirectTier.in_file(tmp_path, "tests") as tier:
        rates = measure(tier, 1 << 20)
        assert torch.equal(torch.get_rng_state(), before)  # a training's initial weights depend on it
        assert rates.read > 0
        assert rates.write > 0
        assert tier.size_of("anything") is None
        assert tier.used_bytes == 0


@pytest.mark.parametrize(("seconds", "written"), [([0.6, 0.02, 0.1, 0.1], 16), ([0.6, 0.5, 0.4], 8)])
def test_briefly_busy_path_is_not_taken_for_a_slow_one(tmp_path, monkeypatch, seconds, written):
    """Measured: the first piece, the same again, then all; or, if it is
    slow twice, the faster of the two and a read."""
    took, really = iter(seconds), path_rates._seconds
    monkeypatch.setattr(path_rates, "_seconds", lambda *transfers: really(*transfers) and next(took))
    with DirectTier.in_file(tmp_path, "tests") as tier:
        rates = measure(tier)
    assert rates.write == pytest.approx(written * (1 << 20) / (0.1 if written == 16 else 1.0))
    assert next(took, None) is None


# -- paths that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["direct", "files"])
def test_writes_that_fail_on_one_path_go_to_another(paths, kind, caplog):
    two = paths(kind=kind)
    two.write(6)
    two.faults["a"].add("write", error=errno.EIO)
    two.write(6, 1)  # no error: the tensors were still in memory
    assert two.places(6) == "bbbbbb"
    two.check(6, 1)
    assert [record.getMessage() for record in caplog.records if "is taken out" in record.getMessage()]
    assert "Input/output error" in two.tier.report()[0].failure
    two.write(6, 2)
    two.check(6, 2)


def test_path_that_refuses_writes_is_still_read(paths):
    two = paths()
    two.write(6)
    two.faults["a"].add("write", error=errno.EIO)
    two.tier.write("exp_avg-0", tensor(0)).wait(MAX_S)
    two.check(6)


def test_writes_beyond_a_full_path_go_to_the_others(paths):
    two = paths()
    two.write(4)
    two.faults["a"].add("write", error=errno.ENOSPC)
    two.write(6, 1)
    two.faults["a"].clear()
    two.check(6, 1)
    assert two.tier.report()[0].failure is None  # it is full, not broken


def test_full_path_keeps_its_groups_when_others_are_rearranged(paths):
    three = paths("abc", placement=[1, 1, 1])
    three.write(6)
    three.faults["a"].add("write", after=0, times=1, error=errno.ENOSPC)
    three.tier.write("late", tensor(0)).wait(MAX_S)
    on_a = [group for group in range(6) if three.tier.path_of(str(group)) == "a"]
    assert len(on_a) == 2
    three.tier._groups.placement = [1, 0, 1]
    assert three.tier.observe()
    three.write(6, 1)
    assert [three.tier.path_of(str(group)) for group in on_a] == ["a", "a"]
    assert "b" not in three.places(6)
    three.check(6, 1)


def test_read_that_fails_once_is_repeated(paths):
    two = paths()
    two.write(4)
    two.faults["a"].add("read", times=1, error=errno.EIO)
    two.check(4)
    assert two.tier.report()[0].failure is None


def test_tensor_lost_with_its_path_is_named_and_rewritable(paths):
    two = paths()
    two.write(6)
    lost = [group for group in range(6) if two.tier.path_of(str(group)) == "a"]
    two.faults["a"].add("read", error=errno.EIO)
    two.faults["a"].add("write", error=errno.EIO)
    for group in range(6):
        read = two.tier.read(str(group), out := torch.empty(NUMEL))
        if group in lost:
            with pytest.raises(StorageError, match=rf"read of '{group}' on .*Input/output error"):
                read.wait(MAX_S)
        else:
            read.wait(MAX_S)
            assert torch.equal(out, tensor(group))
    two.write(6, 1)
    two.check(6, 1)


def test_a_path_that_hangs_is_given_up(paths):
    two = paths(hang_s=HANG_S)
    two.write(4)
    on_a = next(str(group) for group in range(4) if two.tier.path_of(str(group)) == "a")
    two.faults["a"].add("any", delay_us=HANGS_US)
    two.tier.write(on_a, tensor(7)).wait(MAX_S)
    assert two.tier.path_of(on_a) == "b"
    two.tier.read(on_a, out := torch.empty(NUMEL)).wait(MAX_S)
    assert torch.equal(out, tensor(7))
    with pytest.raises(StorageError, match="nothing has ended there"):
        two.tier.read(f"exp_avg-{on_a}", torch.empty(NUMEL)).wait(MAX_S)
    assert "hangs" in two.tier.report()[0].failure


def test_a_folder_that_vanishes_loses_nothing_that_is_written_again(paths):
    two = paths(kind="files")
    two.write(6)
    shutil.rmtree(two.folder / "a")
    two.write(6, 1)
    assert two.places(6) == "bbbbbb"
    two.check(6, 1)


def test_a_tensor_that_vanished_with_its_folder_is_named(paths):
    two = paths(kind="files")
    two.write(4)
    shutil.rmtree(two.folder / "a")
    key = next(f"exp_avg-{group}" for group in range(4) if two.tier.path_of(str(group)) == "a")
    with pytest.raises(StorageError, match=rf"read of '{key}' on .*/a/.*No such file or directory: it was there alone"):
        two.tier.read(key, torch.empty(NUMEL)).wait(MAX_S)


LARGE = 1 << 20  # elements; more than the spare part of the file of a direct path


def key_on_a(made, groups: int) -> str:
    return next(str(group) for group in range(groups) if made.tier.path_of(str(group)) == "a")


@pytest.mark.parametrize("queued", [False, True])
def test_write_moves_when_the_file_cannot_grow_in_a_vanished_folder(paths, queued):
    two = paths()
    two.write(4)
    key = key_on_a(two, 4)
    shutil.rmtree(two.folder / "a")
    turn = two.tier._queue.enter(key, True, lambda: None) if queued else None
    write = two.tier.write(key, torch.full((LARGE,), 7.0))
    if turn is not None:
        two.tier._queue.leave(key, turn)
    write.wait(MAX_S)
    assert two.tier.path_of(key) == "b"
    assert "No such file or directory" in two.tier.report()[0].failure
    two.tier.read(key, out := torch.empty(LARGE)).wait(MAX_S)
    assert bool((out == 7).all())


def refuse(*_args, **_options):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("queued", [False, True])
def test_writes_move_when_system_calls_fail_on_a_folder_of_files(paths, monkeypatch, queued):
    two = paths(kind="files")
    two.write(6)
    key = key_on_a(two, 6)
    monkeypatch.setattr(two.tier._paths[0].tier, "_submit_write", refuse)
    turn = two.tier._queue.enter(key, True, lambda: None) if queued else None
    write = two.tier.write(key, tensor(7))
    if turn is not None:
        two.tier._queue.leave(key, turn)
    write.wait(MAX_S)
    two.write(6, 1)
    assert two.places(6) == "bbbbbb"
    two.check(6, 1)


def test_read_that_system_calls_refuse_is_one_error_that_names_the_tensor(paths, monkeypatch):
    two = paths(kind="files")
    two.write(4)
    key = key_on_a(two, 4)
    monkeypatch.setattr(two.tier._paths[0].tier, "_submit_read", refuse)
    with pytest.raises(StorageError, match=rf"read of '{key}' on .*Input/output error: it was there alone"):
        two.tier.read(key, torch.empty(NUMEL)).wait(MAX_S)
    assert "Input/output error" in two.tier.report()[0].failure


def test_write_that_is_given_up_while_it_is_submitted_ends_once(paths, monkeypatch):
    two = paths(hang_s=HANG_S)
    two.write(4)
    key, way, refused = key_on_a(two, 4), two.tier._paths[0], threading.Event()

    def refuse_late(*_args, **_options):
        refused.wait(MAX_S)
        refuse()

    monkeypatch.setattr(way.tier, "write", refuse_late)
    turn = two.tier._queue.enter(key, True, lambda: None)
    write = two.tier.write(key, tensor(7))
    two.tier._queue.leave(key, turn)  # it is submitted now, in another thread
    while not way.hanging:
        time.sleep(0.01)
    refused.set()
    write.wait(MAX_S)
    assert two.tier.path_of(key) == "b"
    two.tier.read(key, out := torch.empty(NUMEL)).wait(MAX_S)
    assert torch.equal(out, tensor(7))


def test_interrupted_submission_leaves_the_key_usable(paths, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    two = paths()
    two.write(4)
    key = key_on_a(two, 4)
    with monkeypatch.context() as patched:
        patched.setattr(two.tier._paths[0].tier, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.tier.write(key, torch.empty(LARGE))
    two.tier.read(key, out := torch.empty(NUMEL)).wait(MAX_S)
    assert torch.equal(out, tensor(int(key)))
    two.tier.write(key, tensor(7)).wait(MAX_S)
    two.tier.read(key, out).wait(MAX_S)
    assert torch.equal(out, tensor(7))


def test_space_missing_on_a_path_is_reserved_on_others(paths):
    two = paths(placement=[1, 1])
    stock = two.tier._paths[0].tier.reserve

    def refuse(more_bytes: int) -> None:
        stock(1 << 50)

    two.tier._paths[0].tier.reserve = refuse
    two.tier.reserve(8 << 20)
    file = next((two.folder / "b").glob("memascend-scratch-*"))
    assert file.stat().st_blocks * 512 >= 8 << 20
    two.tier._paths[1].tier.reserve = refuse
    with pytest.raises(StorageError, match="found no room"):
        two.tier.reserve(8 << 20)


def test_vanished_folder_has_no_space_and_others_are_reserved(paths):
    two = paths(kind="files")
    before = two.tier.free_bytes
    shutil.rmtree(two.folder / "a")
    assert 0 < two.tier.free_bytes < 0.9 * before  # half of it, as other programs use the disk meanwhile
    two.tier.reserve(8 << 20)
    shutil.rmtree(two.folder / "b")
    with pytest.raises(StorageError, match="not that much free"):
        two.tier.reserve(1 << 40)


def test_no_path_left_is_one_error_with_every_reason(paths):
    two = paths()
    two.write(2)
    for faults in two.faults.values():
        faults.add("write", error=errno.EIO)
    with pytest.raises(StorageError, match=r"write of '0' on a, b .*no path takes it \(a: .*; b: "):
        two.tier.write("0", tensor(1)).wait(MAX_S)
    with pytest.raises(StorageError, match="write all of it again"):
        two.tier.read("0", torch.empty(NUMEL)).wait(MAX_S)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 50))])
def test_path_failure_at_a_random_instant_corrupts_no_tensor(paths, seed):
    """Two passes of reads, changes and writes in the order of an
    optimizer; the fault comes at a random point of them."""
    chance = random.Random(seed)
    kind = ("eio", "full", "hang", "vanish")[seed % 4]
    made = paths(kind=chance.choice(["direct", "files"]), hang_s=HANG_S if kind == "hang" else MAX_S)
    tier, bad = made.tier, made.faults["a"]
    values = {}
    groups, steps = 8, 2
    for group in range(groups):
        values[group] = float(group)
    made.write(groups)
    after = chance.randrange(groups * steps * 4)
    if kind == "full":
        bad.add("write", after=after, error=errno.ENOSPC)
    elif kind == "hang":
        bad.add("any", after=after, delay_us=HANGS_US)
    elif kind == "eio":
        bad.add("write", after=after, error=errno.EIO)
    else:  # permanently, for reads and writes
        bad.add("any", after=after, error=errno.EIO)
    lost = set()
    for step in range(steps):
        for group in range(groups) if step % 2 == 0 else reversed(range(groups)):
            state = torch.empty(NUMEL)
            try:
                tier.read(f"exp_avg-{group}", state).wait(MAX_S)
            except StorageError:
                lost.add(group)
                state = tensor(values[group])  # as restored from the checkpoint
            assert torch.equal(state, tensor(values[group])), "a wrong tensor, and no error"
            values[group] += 1
            tier.write(f"exp_avg-{group}", state + 1)
            tier.write(f"{group}", state + 1)
        tier.wait(MAX_S)
    for group in range(groups):
        for key in (f"{group}", f"exp_avg-{group}"):
            out = torch.empty(NUMEL)
            try:
                tier.read(key, out).wait(MAX_S)
            except StorageError:
                assert kind in ("hang", "vanish")
                assert tier.path_of(key) == "a"
                continue
            assert torch.equal(out, tensor(values[group])), key
    if kind in ("eio", "full"):
        assert not lost  # its reads worked

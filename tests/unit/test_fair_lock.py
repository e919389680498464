"""One process at a time on a path, in order of arrival, whatever happens to the current user."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from memascend.storage import open_paths, path_lock
from memascend.storage.completion import Promise, all_of
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.fair_lock import FairLock, name_of_place
from memascend.storage.path_lock import PathLock, path_lock_of

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 60

CHILD = """
import sys
from memascend.storage.fair_lock import FairLock
lock = FairLock("t", sys.argv[1])
print("asks", flush=True)
lock.acquire()
print("has", flush=True)
sys.stdin.readline()
lock.release()
print("gave", flush=True)
sys.stdin.readline()
"""


class Process:
    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-S", "-c", "import site; site.main()\n" + CHILD, str(folder)]
        self.child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.says() == "asks"

    def says(self) -> str:
        return self.child.stdout.readline().strip()

    def go_on(self) -> None:
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


def waiting(lock: FairLock) -> None:
    while not lock.contended():
        pass


def test_lock_survives_killed_holder_and_killed_waiter(tmp_path):
    holder = Process(tmp_path)
    assert holder.says() == "has"
    waiter, next_one = Process(tmp_path), Process(tmp_path)
    try:
        mine = FairLock("t", tmp_path)
        assert not mine.try_acquire()
        os.kill(waiter.child.pid, signal.SIGKILL)
        waiter.child.wait()
        os.kill(holder.child.pid, signal.SIGKILL)
        assert next_one.says() == "has"
        assert not mine.try_acquire()
        next_one.go_on()
        assert next_one.says() == "gave"
        assert mine.try_acquire()
        mine.close()
    finally:
        for each in (holder, waiter, next_one):
            each.end()


def test_waiters_get_the_lock_in_order_of_arrival(tmp_path):
    locks = [FairLock("t", tmp_path) for _ in range(8)]
    locks[0].acquire()
    order: list[int] = []

    def work(number: int) -> None:
        locks[number].acquire()
        order.append(number)
        locks[number].release()

    threads = []
    for number in range(1, 8):
        before = int.from_bytes(Path(locks[0].path).read_bytes()[:8], "little")
        threads.append(threading.Thread(target=work, args=(number,), daemon=True))
        threads[-1].start()
        while int.from_bytes(Path(locks[0].path).read_bytes()[:8], "little") == before:
            pass
    locks[0].release()
    for thread in threads:
        thread.join(MAX_S)
    assert order == list(range(1, 8))


def test_holder_sees_that_somebody_waits(tmp_path):
    holder, waiter = FairLock("t", tmp_path), FairLock("t", tmp_path)
    holder.acquire()
    assert not holder.contended()
    thread = threading.Thread(target=waiter.acquire, daemon=True)
    thread.start()
    waiting(holder)
    holder.release()
    thread.join(MAX_S)
    assert not holder.try_acquire()  # the other one has it


def test_folders_on_one_drive_have_one_lock_name(tmp_path):
    (tmp_path / "folder").mkdir()
    assert name_of_place(tmp_path) == name_of_place(tmp_path / "folder")
    with pytest.raises(ValueError, match="consists of letters"):
        FairLock("a/b", tmp_path)


def test_path_lock_admits_its_own_callers_and_excludes_others(tmp_path):
    ours, theirs = PathLock(FairLock("t", tmp_path), turn_s=0), PathLock(FairLock("t", tmp_path), turn_s=0)
    inside: list[str] = []
    for name in "abc":
        ours.enter(lambda name=name: inside.append(name))
    assert inside == ["a", "b", "c"]
    came = threading.Event()
    theirs.enter(came.set)
    waiting(ours._lock)
    ours.enter(lambda: inside.append("late"))  # its turn is over: it goes to the end of the queue
    assert inside == ["a", "b", "c"]
    assert not came.is_set()
    for _ in "abc":
        ours.leave()
    assert came.wait(MAX_S)
    theirs.leave()
    while inside != ["a", "b", "c", "late"]:
        pass
    ours.leave()
    assert (ours.turns, theirs.turns) == (2, 1)
    ours.close()
    theirs.close()


def test_two_busy_path_locks_both_finish(tmp_path):
    guards = [PathLock(FairLock("t", tmp_path), turn_s=0) for _ in range(2)]
    done, left = [threading.Event() for _ in guards], [200, 200]

    def work(number: int) -> None:
        def step() -> None:
            left[number] -= 1
            if left[number] > 0:
                guards[number].enter(step)
            else:
                done[number].set()
            guards[number].leave()

        guards[number].enter(step)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    assert all(each.wait(MAX_S) for each in done)
    for guard in guards:
        guard.close()


@pytest.fixture
def locks_here(tmp_path, monkeypatch):
    """Put locks into a folder of this test."""
    for module in (open_paths, path_lock):
        monkeypatch.setattr(module, "FairLock", lambda name: FairLock(name, tmp_path))


def test_entry_during_lock_handover_is_not_forgotten(tmp_path):
    """The waiting thread already has the lock, but has not yet told the path lock."""

    class Slow(FairLock):
        had, go = threading.Event(), threading.Event()

        def acquire(self):
            super().acquire()
            self.had.set()
            assert self.go.wait(MAX_S)

    other, lock = FairLock("t", tmp_path), Slow("t", tmp_path)
    other.acquire()
    guard, begun = PathLock(lock), {name: threading.Event() for name in "abc"}
    guard.enter(begun["a"].set)
    other.release()
    assert lock.had.wait(MAX_S)
    guard.enter(begun["b"].set)
    for each in begun.values():
        if each.is_set():
            guard.leave()
    guard.enter(begun["c"].set)
    lock.go.set()
    for each in begun.values():
        assert each.wait(MAX_S)
    guard.close()
    other.close()


def test_last_user_of_a_shared_path_lock_releases_it(tmp_path, locks_here):
    first, second = path_lock_of("t"), path_lock_of("t")
    assert first is second
    first.enter(lambda: None)
    first.close()
    other = FairLock("t", tmp_path)
    assert not other.try_acquire()
    second.close()
    assert other.try_acquire()
    other.close()
    third = path_lock_of("t")
    assert third is not first
    third.close()


class _DelayedTier:
    """A tier whose writes end only after `until`, if that is set."""

    until = None

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def write(self, key, tensor, **how):
        done = self._tier.write(key, tensor, **how)
        return done if self.until is None else all_of([done, self.until])


def test_two_folders_on_one_drive_are_used_concurrently(tmp_path, locks_here):
    delayed = {}

    def around(path, tier):
        if path.endswith("a"):
            delayed[path] = tier = _DelayedTier(tier)
        return tier

    folders = [str(tmp_path / name) for name in "ab"]
    config = DirectEngineConfig(control_folder=str(tmp_path))
    with open_paths.open_paths(folders, "tests", config=config, exclusive=True, around=around) as tier:
        delayed[folders[0]].until = Promise("the end of what is slow")
        ended = threading.Event()
        writes = [tier.write(str(n), torch.full((4096,), n)) for n in range(4)]
        for write in writes:
            write.add_done_callback(lambda _: ended.set())
        try:
            assert ended.wait(MAX_S), "the folder beside the slow one waits for it"
        finally:
            delayed[folders[0]].until.set_result()
        for write in writes:
            write.wait(MAX_S)
        assert {tier.path_of(str(n)) for n in range(4)} == set(folders)


@pytest.mark.parametrize("counter", [(1 << 63) - 1, -5, 1 << 61])
def test_corrupt_lock_counter_blocks_no_transfer(tmp_path, counter, caplog):
    """The file is writable for every user."""
    lock = FairLock("t", tmp_path)
    Path(lock.path).write_bytes(counter.to_bytes(8, "little", signed=True))
    guard, begun = PathLock(lock), []
    for number in range(3):
        guard.enter(lambda number=number: begun.append(number))
        guard.leave()
    guard.close()
    assert begun == [0, 1, 2]
    assert caplog.text.count("continue without the inter-process lock") == 1


def test_process_holding_the_counter_byte_blocks_no_transfer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("memascend.storage.fair_lock._DESK_S", 0.05)
    other, lock = FairLock("t", tmp_path), FairLock("t", tmp_path)
    other._reach_desk()
    guard, begun = PathLock(lock), []
    guard.enter(lambda: begun.append(1))
    guard.leave()
    guard.close()
    other.close()
    assert begun == [1]
    assert "another process holds" in caplog.text


@pytest.mark.parametrize("what", ["a link", "a folder", "a wrong counter"])
def test_paths_open_despite_an_unusable_lock_file(tmp_path, monkeypatch, caplog, what):
    monkeypatch.setattr(FairLock.__init__, "__defaults__", (str(tmp_path),))
    place = tmp_path / "memascend-path-t"
    if what == "a link":
        place.symlink_to(tmp_path / "victim")
    elif what == "a folder":
        place.mkdir()
    else:
        place.write_bytes(((1 << 63) - 1).to_bytes(8, "little"))
    with open_paths._alone("t"):
        pass
    guard, begun = path_lock_of("t"), []
    guard.enter(lambda: begun.append(1))
    guard.leave()
    guard.close()
    assert begun == [1]
    assert "without the inter-process lock" in caplog.text
    assert not (tmp_path / "victim").exists()


def test_waiter_behind_a_foreign_byte_lock_gives_up_with_error(tmp_path, monkeypatch):
    monkeypatch.setattr("memascend.storage.fair_lock._TURN_S", 0.2)
    mine = FairLock("t", tmp_path)
    Path(mine.path).write_bytes((3).to_bytes(8, "little"))
    with open(mine.path, "r+b") as foreign:
        fcntl.lockf(foreign, fcntl.LOCK_EX, 1, 16)  # the byte of number 0
        with pytest.raises(OSError, match=r"another process holds the lock .*memascend-path-t"):
            mine.acquire()
    assert mine.try_acquire()


def test_transfers_continue_without_a_lock_that_is_never_released(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("memascend.storage.fair_lock._TURN_S", 0.2)
    lock = FairLock("t", tmp_path)
    guard, begun = PathLock(lock), threading.Event()
    Path(lock.path).write_bytes((3).to_bytes(8, "little"))
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 16); "
            "print('has', flush=True); time.sleep(60)",
            lock.path,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline().strip() == "has"
        guard.enter(begun.set)
        assert begun.wait(MAX_S)
        assert "transfers continue without the inter-process lock" in caplog.text
    finally:
        holder.kill()
        holder.communicate()
        guard.close()

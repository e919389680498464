"""`memascend train` that is asked to stop exits with the signal's status, on any system."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from memascend import systems
from memascend.training import children, launch
from memascend.training.config import complete
from memascend.training.folder import RunFolder
from memascend.training.processes import waits_for
from tests.loop_devices import frozen, small_file_system
from tests.train_runs import STEPS, command, environment, options_for, text_folder

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
MANY_PATHS = ("mlp_offload",)
# What a rank does: it is still starting (no handler yet), or it finishes its step in `state`, as worker.py does.
RANKS = {
    "starting": "import time; print(flush=True); time.sleep(60)",
    "training": "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print(flush=True); "
    "time.sleep(60)",
    "at its end": "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(flush=True); "
    "time.sleep(60)",
    "deaf": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)",
}


AMID_A_PRINT = """
import io, os, signal, sys
from memascend.training import children, launch

class Raw(io.RawIOBase):  # the signal comes while what is printed is being written
    writable = lambda self: True
    fileno = lambda self: 1
    asked = False

    def write(self, data):
        if not self.asked:
            self.asked = True
            os.kill(os.getpid(), signal.SIGTERM)
        return os.write(1, data)

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw()))
stopping = children.Stopping()
stopping.install()
children.say("output")
assert stopping.asked == 1
"""


def test_signal_during_a_print_requests_a_stop():
    done = subprocess.run([sys.executable, "-c", AMID_A_PRINT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[0] == "output"
    assert "stopping: " in done.stdout


@pytest.fixture
def stopping():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    asked = children.Stopping()
    asked.install()
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)


def test_immediate_repeat_of_a_signal_counts_once(stopping, monkeypatch):
    """As from timeout(1), which signals the command and then its process group."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.asked == 1
    monkeypatch.setattr(children, "REPEAT_S", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.asked == 2


def test_signals_in_quick_succession_count_again_after_a_second(stopping, monkeypatch):
    now = 100.0
    monkeypatch.setattr(children.time, "monotonic", lambda: now)
    for now in (100.0, 100.4, 100.8, 101.2):  # noqa: B007
        os.kill(os.getpid(), signal.SIGINT)
    assert stopping.asked == 2


def test_handlers_of_signals_are_restored_when_the_training_ends(tmp_path, monkeypatch):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before, during = [signal.getsignal(number) for number in numbers], []

    def prepare(*_):
        during.extend(signal.getsignal(number) for number in numbers)
        raise ValueError("no text")

    monkeypatch.setattr(launch, "prepare", prepare)
    config = complete({"model": "m", "data": ["d"], "output": str(tmp_path / "run"), "system": "in_memory"})
    with pytest.raises(ValueError, match="no text"):
        launch.launch(config, resume=False, wanted={})
    assert [signal.getsignal(number) for number in numbers] == before
    assert not set(during) & set(before)


def run_ranks(folder, stopping, monkeypatch, rank, *numbers, temporary=False):
    """Run the parent's part of a run of two ranks, which gets the signals
    when the ranks are up; return its exit status."""
    ranks = []

    def start(*_):
        ranks.append(subprocess.Popen([sys.executable, "-S", "-c", RANKS[rank]], stdout=subprocess.PIPE))
        return ranks[-1]

    def send():
        while len(ranks) < 2:
            pass
        for each in ranks:
            each.stdout.readline()
        for count, number in enumerate(numbers, 1):
            os.kill(os.getpid(), number)
            while stopping.asked < count:
                pass

    monkeypatch.setattr(launch, "start_rank", start)
    sender = threading.Thread(target=send)
    sender.start()
    job = {"config": {"ranks": 2}, "threads": 1, "settings": {}, "temporary": temporary}
    try:
        return launch._run_ranks(job, RunFolder(folder), stopping, SimpleNamespace(say=lambda text: None))
    finally:
        sender.join()
        for each in ranks:
            each.stdout.close()
            assert each.returncode is not None


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
@pytest.mark.parametrize("rank", ["starting", "training"])
def test_a_stopped_run_ends_with_the_status_of_the_signal(tmp_path, stopping, monkeypatch, capsys, rank, number):
    assert run_ranks(tmp_path, stopping, monkeypatch, rank, number) == STATUS[number]
    assert "stopped before the first step was finished; --resume starts over" in capsys.readouterr().out


def test_stopped_run_that_is_removed_says_nothing_about_resume(tmp_path, stopping, monkeypatch, capsys):
    assert run_ranks(tmp_path, stopping, monkeypatch, "starting", signal.SIGTERM, temporary=True) == 143
    assert "stopped before the first step was finished\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (True, "--resume continues from the last checkpoint"),
        (False, "there is no checkpoint yet: --resume starts over"),
    ],
)
def test_stop_before_a_further_step_says_where_resume_continues(tmp_path, stopping, monkeypatch, capsys, saved, said):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    if saved:
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text('{"files": {}}')
    assert run_ranks(tmp_path, stopping, monkeypatch, "starting", signal.SIGINT) == 130
    assert said in capsys.readouterr().out


def test_second_signal_ends_at_once_with_status_of_the_first(tmp_path, stopping, monkeypatch, capsys):
    assert run_ranks(tmp_path, stopping, monkeypatch, "deaf", signal.SIGINT, signal.SIGTERM) == 130
    assert "interrupted" in capsys.readouterr().out


def test_run_stopped_at_its_end_exits_with_success(tmp_path, stopping, monkeypatch):
    assert run_ranks(tmp_path, stopping, monkeypatch, "at its end", signal.SIGINT) == 0


def test_rank_ended_by_someone_else_is_an_error(tmp_path, stopping, monkeypatch):
    ended = {"code": -signal.SIGTERM}
    child = SimpleNamespace(returncode=ended["code"], poll=lambda: ended["code"], wait=lambda **_: ended["code"])
    monkeypatch.setattr(launch, "start_rank", lambda *_: child)
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        (tmp_path / "logs" / f"rank{rank}.log").touch()
    job = {"config": {"ranks": 2}, "threads": 1, "settings": {}}
    with pytest.raises(ValueError, match=r"rank 0 failed \(exit -15\)"):
        launch._run_ranks(job, RunFolder(tmp_path), stopping, SimpleNamespace(say=lambda text: None))


STUCK = (
    f"rank 1 (pid {os.getpid()}, none of its threads waits for a device) has not ended 0.3 s after being killed: check "
)
STUCK += "the drive or the mount (dmesg), and continue with --resume once no such process is left"


class Unkillable:
    """A child process that SIGKILL does not end; Ctrl-C is pressed so many times while the parent waits for it."""

    def __init__(self, interrupts):
        self.pid, self.returncode, self.signals, self.interrupts = os.getpid(), None, [], interrupts

    def poll(self):
        return None

    def wait(self, timeout=None):
        assert timeout is not None, "nobody waits for it without a limit"
        if self.interrupts:
            self.interrupts -= 1
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(timeout)
        raise subprocess.TimeoutExpired("rank", timeout)

    def send_signal(self, number):
        self.signals.append(number)

    def kill(self):
        self.signals.append(signal.SIGKILL)


@pytest.mark.parametrize(("status", "interrupts"), [(1, 0), (0, 2)], ids=["the other rank fails", "Ctrl-C twice"])
def test_killed_rank_that_does_not_end_is_named_not_awaited(tmp_path, stopping, monkeypatch, status, interrupts):
    ended, stuck = (
        subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({status})"]),
        Unkillable(interrupts),
    )
    monkeypatch.setattr(children, "REPEAT_S", 0.0)
    monkeypatch.setattr(children, "KILLED_S", 0.3)
    monkeypatch.setattr(launch, "start_rank", lambda rank, *_: (ended, stuck)[rank])
    job = {"config": {"ranks": 2}, "threads": 1, "settings": {}}
    with pytest.raises(children.Stuck, match=re.escape(STUCK)):
        launch._run_ranks(job, RunFolder(tmp_path), stopping, SimpleNamespace(say=lambda text: None))
    assert stuck.signals[-1] == signal.SIGKILL


def test_swap_folder_of_stuck_rank_is_removed_by_later_call(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.preflight, "check", lambda *_: None)
    monkeypatch.setattr(launch, "_announce", lambda *_: None)
    config = complete({"model": "m", "data": ["d"], "steps": 1, "output": str(tmp_path / "run")})
    (tmp_path / "run").mkdir()

    def compose():
        setup = SimpleNamespace(swaps=True, backend="x", settings={})
        return launch._composed(config, RunFolder(tmp_path / "run"), {"context": 1}, lambda *_: setup)

    made, make = [], launch._make_swap
    monkeypatch.setattr(launch, "_make_swap", lambda *where: made.append(make(*where)) or made[-1])
    composed = compose()
    composed.__enter__()
    swap = made[0].path
    stuck = children.Stuck("rank 0 hangs")
    assert not composed.__exit__(children.Stuck, stuck, None)
    assert swap.is_dir()
    made[0].lock.close()  # as the end of the process does
    with compose() as job:
        assert job["swap"] != str(swap)
        assert not swap.exists()


@pytest.mark.slow
def test_stuck_rank_report_names_kernel_call_and_file(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "KILLED_S", 0.3)
    with small_file_system(tmp_path / "mount") as folder:
        code = (
            f"import os; fd = os.open({str(folder / 'file')!r}, os.O_CREAT | os.O_WRONLY); print(flush=True); input()"
        )
        code += "; os.write(fd, bytes(4096))"
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        child.stdout.readline()
        with frozen(folder):
            child.stdin.write(b"\n")
            deadline = time.monotonic() + 10
            while "state D" not in (found := waits_for(child.pid)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert children.kill({"rank 0": child}) == {"rank 0": child.pid}
            said = children.stuck({"rank 0": child.pid})
        assert found.startswith("state D (disk sleep) in ")
        assert found.endswith(f" on {folder / 'file'}")
        assert f"rank 0 (pid {child.pid}, {found}) has not ended" in said
        assert child.wait(10) == -signal.SIGKILL
        child.stdin.close()
        child.stdout.close()


TRAINED = [name for name in systems.names() if systems.arrangement(name).runs]


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
@pytest.mark.parametrize("when", ["ranks start", "third step", "third step, twice"])
@pytest.mark.parametrize("system", TRAINED)
def test_every_system_ends_with_the_status_of_the_signal(tmp_path, system, when, number):
    paths = []
    if system in MANY_PATHS:
        paths = ["--tiers", *(str(tmp_path / name) for name in "ab")]
    options = [*options_for(text_folder(tmp_path), system), *paths]
    sign = "output " if when == "ranks start" else f" 3/{STEPS} "
    with subprocess.Popen(
        command(tmp_path / "run", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as run:
        said = []
        for line in run.stdout:
            said.append(line)
            if line.startswith(sign) or sign in line:
                run.send_signal(number)
            if when.endswith("twice") and line.startswith("stopping: "):
                time.sleep(children.REPEAT_S)
                run.send_signal(number)
    assert run.returncode == STATUS[number], "".join(said)
    assert "error" not in "".join(said)

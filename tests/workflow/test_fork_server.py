"""The fork server: runs end as spawned ones do, whichever process dies first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflows.run import children
from workflows.run.fork_server import SOCKET, ForkedRun

ROOT = Path(__file__).resolve().parents[2]
# A server of runs that execute the job's code; it records when it prepares.
SERVER = """
import json, os, pathlib, sys, time
from workflows.run.fork_server import Server
from workflows.run.child import die_with_parent

def run(request):
    die_with_parent()
    job = json.loads(pathlib.Path(request["job"]).read_text()) | request["descriptors"]
    print("of", os.environ["NAME"], "in", os.getcwd(), flush=True)
    exec(job["code"])

die_with_parent()
Server(sys.argv[1], lambda: print("prepared", flush=True), run).serve()
"""


@contextlib.contextmanager
def serving(program: str, address: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, str(address)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while not address.exists():
            assert process.poll() is None
            time.sleep(0.01)
        monkeypatch.setenv(SOCKET, str(address))
        yield process
        process.kill()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    with serving(SERVER, tmp_path / "socket", monkeypatch) as process:
        yield process


def start(folder: Path, name: str, code: str, **job: int) -> children.Run:
    whole = {"code": code, "mode": "memory", "ranks": 1, "device": "cpu", **job}
    return children.start(whole, folder, name, {**os.environ, "NAME": name}, descriptors=tuple(job))


def ended(pid: int) -> bool:
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_runs_report_status_and_log_and_the_server_prepares_once(server, tmp_path: Path) -> None:
    runs = [
        start(tmp_path, name, code)
        for name, code in (("a", ""), ("b", "os._exit(7)"), ("c", "os.kill(os.getpid(), 9)"), ("d", "1 / 0"))
    ]
    assert all(isinstance(run, ForkedRun) for run in runs)
    assert [run.wait(20) for run in runs] == [0, 7, -signal.SIGKILL, 1]
    assert [run.poll() for run in runs] == [0, 7, -signal.SIGKILL, 1]
    assert (tmp_path / "loga.txt").read_text() == f"of a in {os.getcwd()}\n"
    assert "ZeroDivisionError" in (tmp_path / "logd.txt").read_text()
    server.kill()
    assert server.stdout.read() == "prepared\n"


def test_run_communicates_over_the_descriptors_named_by_its_job(server, tmp_path: Path) -> None:
    turn_in, turn_out = os.pipe()
    done_in, done_out = os.pipe()
    code = "os.write(job['done_fd'], os.read(job['turn_fd'], 100).upper())"
    run = start(tmp_path, "a", code, turn_fd=turn_in, done_fd=done_out)
    for descriptor in (turn_in, done_out):
        os.close(descriptor)
    os.write(turn_out, b"your turn")
    assert os.read(done_in, 100) == b"YOUR TURN"
    assert run.wait(20) == 0
    assert os.read(done_in, 100) == b""  # neither the server nor any other process has the other end open
    for descriptor in (turn_out, done_in):
        os.close(descriptor)


def test_socket_appears_only_when_the_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_to_listen = """
import socket, time

class SlowToListen(socket.socket):
    def listen(self, *backlog):
        time.sleep(0.3)
        super().listen(*backlog)

socket.socket = SlowToListen
"""
    with serving(slow_to_listen + SERVER, tmp_path / "socket", monkeypatch):
        run = start(tmp_path, "a", "")
        assert isinstance(run, ForkedRun)
        assert run.wait(20) == 0


def test_run_dies_with_the_process_that_requested_it(server, tmp_path: Path) -> None:
    asking = f"""
import os, pathlib, time
from tests.workflow.test_fork_server import start
run = start(pathlib.Path({str(tmp_path)!r}), "a", "time.sleep(600)")  # kept: a run ends with its handle
print(run.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", asking], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        alive = Path(f"/proc/{pid}").exists()
        process.kill()
    assert alive
    assert ended(pid)


def test_run_dies_with_its_server_without_reporting_out_of_memory(server, tmp_path: Path) -> None:
    run = start(tmp_path, "a", "time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.1)
    assert run.poll() is None
    server.kill()
    assert run.wait(20) == 255  # SIGKILL of a run would be read as out of memory
    assert ended(run.pid)


def test_without_a_server_a_run_is_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET, str(tmp_path / "nobody"))
    run = children.start({"mode": "memory", "ranks": 1, "device": "cpu"}, tmp_path, "a", {**os.environ})
    assert isinstance(run, subprocess.Popen)
    run.kill()
    run.wait()
    assert json.loads((tmp_path / "joba.json").read_text()) == {"mode": "memory", "ranks": 1, "device": "cpu"}

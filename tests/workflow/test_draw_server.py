"""What makes tables and pictures: few processes, one request after the other, each with its own words and status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A server of programs that do what their first word says, on one worker.
SERVER = """
import sys, types
from workflows.derive import server

def main():
    print("in", __import__("os").getpid(), flush=True)
    exec(sys.argv[1])

server.prepare = lambda: sys.modules.update({"workflows.derive.said": types.SimpleNamespace(main=main)})
server.serve(sys.argv[1], 1)
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    address = tmp_path / "socket"
    with subprocess.Popen([sys.executable, "-c", SERVER, str(address)], cwd=ROOT) as process:
        yield str(address)
        process.kill()


def ask(address: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", "workflows/derive/ask.py", "said", code]
    environment = {**os.environ, "MEMASCEND_DRAW_SERVER": address}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_one_process_makes_all_and_a_failure_is_that_of_its_request_alone(address: str) -> None:
    first = ask(address, "print('one')")
    failed = ask(address, "sys.exit('error: no such exhibit')")
    broken = ask(address, "1 / 0")
    last = ask(address, "print('two')")
    assert [done.returncode for done in (first, failed, broken, last)] == [0, 1, 1, 0]
    assert failed.stdout.splitlines()[1:] == ["error: no such exhibit"]
    assert broken.stdout.splitlines()[-1] == "ZeroDivisionError: division by zero"
    makers = {done.stdout.splitlines()[0] for done in (first, failed, broken, last)}
    assert len(makers) == 1
    assert last.stdout.splitlines()[1:] == ["two"]


def test_a_modelled_lane_has_a_process_of_its_own(address: str) -> None:
    lane = "print('lane')"
    makers = [ask(address, code).stdout.split()[1] for code in ("print(1)", "print(2)")]
    command = [sys.executable, "-IS", "workflows/derive/ask.py", "said", lane, "--modelled-lane-of"]
    environment = {**os.environ, "MEMASCEND_DRAW_SERVER": address}
    apart = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert apart.stdout.split()[1] not in makers
    assert apart.stdout.split()[2] == "lane"


def test_a_worker_that_is_killed_is_replaced(address: str) -> None:
    maker = int(ask(address, "print(1)").stdout.split()[1])
    os.kill(maker, signal.SIGKILL)
    time.sleep(0.1)
    again = ask(address, "print(2)")
    assert again.returncode == 0
    assert int(again.stdout.split()[1]) != maker

"""Tables and pictures are made by forks of one process, each with its own arguments and status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A server of programs that execute their first argument.
SERVER = """
import sys, types
from workflows.derive import server

def main():
    print("in", __import__("os").getpid(), flush=True)
    exec(sys.argv[1])

server.prepare = lambda: sys.modules.update({"workflows.derive.said": types.SimpleNamespace(main=main)})
server.main()
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    address = tmp_path / "socket"
    with subprocess.Popen([sys.executable, "-c", SERVER, str(address)], cwd=ROOT) as process:
        yield str(address)
        process.kill()


def ask(address: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", "workflows/derive/draw_client.py", "said", code]
    environment = {**os.environ, "MEMASCEND_DRAW_SERVER": address}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_each_request_has_its_own_process_and_fails_alone(address: str) -> None:
    first = ask(address, "print('one')")
    failed = ask(address, "sys.exit('error: no such exhibit')")
    broken = ask(address, "1 / 0")
    killed = ask(address, "__import__('os').kill(0, 9)")
    last = ask(address, "print('two')")
    assert [done.returncode for done in (first, failed, broken, last)] == [0, 1, 1, 0]
    assert killed.returncode != 0
    assert failed.stdout.splitlines()[1:] == ["error: no such exhibit"]
    assert broken.stdout.splitlines()[-1] == "ZeroDivisionError: division by zero"
    makers = {done.stdout.splitlines()[0] for done in (first, failed, broken, last)}
    assert len(makers) == 4
    assert last.stdout.splitlines()[1:] == ["two"]

"""A forked test program behaves as the same command of subprocess: arguments, environment, output, exit status."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.deepspeed

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(lambda: print("at the end"))
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
print(__name__, sys.argv, os.getcwd(), sorted(set(os.environ) - {"PYTHONPATH", "LC_CTYPE"}), os.environ.get("NAME"))
print("error", file=sys.stderr)
"""
ENDS = {"pass": 0, "sys.exit(3)": 3, "sys.exit('what')": 1, "1 / 0": 1, "os._exit(4)": 4, "os.kill(os.getpid(), 9)": -9}


def started(command, **surroundings):
    return subprocess.run(command, capture_output=True, text=True, check=False, **surroundings)


@pytest.mark.parametrize("option", ["script", "-c"])
def test_forked_program_sees_and_prints_what_a_started_one_does(tmp_path, option):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["program.py"] if option == "script" else ["-c", PROGRAM]
    command, surroundings = [sys.executable, *words, "a", "b c"], {"cwd": tmp_path, "env": {"NAME": "n"}}
    of_fork, of_start = forked.run(command, **surroundings), started(command, **surroundings)
    assert (of_fork.stdout, of_fork.stderr) == (of_start.stdout, of_start.stderr)
    assert of_fork.stdout.splitlines()[1:] == ["of a thread", "at the end"]


def test_forked_module_runs_as_main(tmp_path):
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:], sys.modules['__main__'].__file__)")
    command = [sys.executable, "-m", "module", "a"]
    assert forked.run(command, cwd=tmp_path).stdout == started(command, cwd=tmp_path).stdout


@pytest.mark.parametrize("end", ENDS)
def test_forked_program_ends_with_the_same_status_and_last_line(end):
    command = [sys.executable, "-c", f"import os, sys\n{end}"]
    of_fork, of_start = forked.run(command), started(command)
    assert of_fork.returncode == of_start.returncode == ENDS[end]
    assert of_fork.stderr.splitlines()[-1:] == of_start.stderr.splitlines()[-1:]


def test_forked_program_is_killed_at_its_timeout(tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", code], timeout=3)
    pid = Path(tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_fork_server_preloads_deepspeed_without_integration_or_extra_threads():
    code = """
import os, sys
print(set(sys.argv[1:]) <= set(sys.modules), len(os.listdir(f"/proc/{os.getppid()}/task")),
      [name for name in sys.modules if name.startswith("memascend.integrations.deepspeed")])
"""
    assert forked.ADDRESS in os.environ
    assert forked.run([sys.executable, "-c", code, *forked.IMPORTED]).stdout == "True 1 []\n"

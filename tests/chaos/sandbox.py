"""Runs seeds in forks of one process that has done the slow imports, in its own namespaces and control groups.

With root the whole program is in a mount and a process namespace: its /dev/shm, its small file systems and all
processes that it starts end with it, whatever happens. Without root, faults that need a mount or a control group are
not run, and their records say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.memory_limit import MemoryGroup

INSIDE = "MEMASCEND_CHAOS_NAMESPACES"
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def isolate() -> bool:
    """Restart this program in its own namespaces where that is possible; return whether it now runs in them."""
    if os.environ.get(INSIDE) == "1":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"], check=True)
        return True
    if os.environ.get(INSIDE) == "0":
        return False
    tried = subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True)
    inside = os.geteuid() == 0 and tried.returncode == 0
    os.environ[INSIDE] = "1" if inside else "0"
    if inside:
        os.execvp("unshare", [*_UNSHARE, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])
    return False


@contextlib.contextmanager
def small_file_system(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of that size in memory; it accepts O_DIRECT from Linux 6.6 on."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        for _ in range(100):
            if subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.05)
        else:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


@dataclass
class Phase:
    """What one process reported, and how it ended.

    `status` is as in Popen, or None if the process had to be killed after `limit_s`.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    output: str = ""
    seconds: float = 0.0

    def all_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["at"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        return next((event for event in reversed(self.events) if event["at"] == kind), None)


Program = Callable[[Callable[..., None]], None]


def forked(
    program: Program,
    log: Path,
    *,
    limit_s: float,
    signal_after: tuple[int, float] | None = None,
    begins_with: str = "begun",
    group: MemoryGroup | None = None,
) -> Phase:
    """Run `program(say)` in a fork. `signal_after`: (the signal, seconds after `begins_with` was reported)."""
    reading, writing = os.pipe()
    begun, len_before = time.monotonic(), len(log.read_text(errors="replace")) if log.is_file() else 0
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        faulthandler.dump_traceback_later(0.9 * limit_s)  # shows where it hangs
        _become(program, writing, log, group)
    os.close(writing)
    phase, rest, sent_at, ended = Phase(), b"", None, False
    deadline = begun + limit_s
    try:
        while not ended:
            now = time.monotonic()
            until = deadline if sent_at is None else min(deadline, sent_at)
            ready = select.select([reading], [], [], max(0.0, until - now))[0]
            if ready:
                piece = os.read(reading, 1 << 16)
                ended = not piece
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    phase.events.append(json.loads(line))
                    if signal_after and phase.events[-1]["at"] == begins_with:
                        sent_at = time.monotonic() + signal_after[1]
            elif sent_at is not None and time.monotonic() >= sent_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_after[0])
                sent_at, signal_after = None, None
            elif time.monotonic() >= deadline:
                break
        phase.status = _ended(pid, deadline)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if phase.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    phase.seconds = time.monotonic() - begun
    phase.output = log.read_text(errors="replace")[len_before:] if log.exists() else ""
    return phase


def _ended(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _become(program: Program, writing: int, log: Path, group: MemoryGroup | None) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if group is not None:
            group.take_in(os.getpid())

        def say(at: str, **what: Any) -> None:
            data = json.dumps({"at": at, "clock": time.monotonic(), **what}).encode() + b"\n"
            while data:
                data = data[os.write(writing, data) :]

        program(say)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 130 if isinstance(sys.exc_info()[1], KeyboardInterrupt) else 1
    finally:
        sys.settrace(None)
    try:
        threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def left_processes(known: set[int]) -> list[str]:
    """Return the processes in this process namespace except the `known` ones and this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in known | {os.getpid()}:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and command:
                    found.append(f"{name} {command[:80]}")
    return found

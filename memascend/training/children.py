"""The processes that the parent of a run starts: printing, passing on signals, waiting and killing."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from memascend.memory.heap import MALLOC
from memascend.training.folder import (
    RunFolder,
)
from memascend.training.processes import (
    PARENT,
    exit_status,
    waits_for,
)

# Exit status of a rank that was stopped before its end and saved what --resume needs: 128 + SIGTERM, the signal that
# its parent sends.
STOPPED_STATUS = exit_status(signal.SIGTERM)


WORKER = "memascend.training.worker"  # module of a rank's process

# Time for killed ranks to exit: the kernel has to tear down their rings and release gigabytes of locked memory.
KILLED_S = 60.0

# Time in which a repeated signal counts as the first one: timeout(1) sends its signal to the command and then to its
# process group. A person presses Ctrl-C twice more slowly.
REPEAT_S = 1.0


def say(text: str) -> None:
    """Print a line at once; a terminal that has gone away is no error."""
    with contextlib.suppress(OSError):  # the terminal may be gone: training goes on
        print(text, flush=True)


def _say_amid_a_print(text: str) -> None:
    """Print from a signal handler: Python's buffered file refuses a second write while one is in progress."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stdout.fileno(), f"{text}\n".encode())


class Stuck(ValueError):
    """Raised when processes of the run were killed but have not exited: they may still use its files."""


class Stopping:
    """Signals of the parent: SIGTERM, Ctrl-C or a closed terminal stops the ranks, and a second signal kills them."""

    def __init__(self) -> None:
        self.asked = 0  # signals so far, without immediate repeats
        self.status = STOPPED_STATUS  # exit status of the run if it is stopped; the first signal determines it
        self.children: list[subprocess.Popen[bytes]] = []
        self.saves = True  # whether the ranks write a checkpoint before they stop
        self.trains = True  # whether the children train, rather than prepare
        self._before: dict[signal.Signals, Any] = {}
        self._last = (0, -math.inf)  # the newest signal that counted, and when it came

    def install(self) -> None:
        """Handle SIGTERM, SIGINT and, unless nohup has it ignored, SIGHUP in this process, until `restore`."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._received)

    def restore(self) -> None:
        """Restore the handlers that `install` replaced; the default for one that was not installed from Python."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _received(self, number: int, _: Any) -> None:
        """Pass the signal on: the first as SIGTERM, every further one as SIGKILL.

        A repeat of the same signal within `REPEAT_S` is ignored.
        """
        now, (last, then) = time.monotonic(), self._last
        if number == last and now - then < REPEAT_S:
            return
        self._last = (number, now)
        self.asked += 1
        if self.asked == 1:
            self.status = exit_status(number)
            clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # a temporary line of rank 0 may be on the screen
            after = (
                ": finishing this step" + (", then writing a checkpoint" if self.saves else "") if self.trains else ""
            )
            _say_amid_a_print(f"{clear}stopping{after} (a second signal quits at once)")
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM if self.asked == 1 else signal.SIGKILL)


def start_rank(rank: int, ranks: int, port: int, threads: int, job: Path, folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own; return its process. `job` is the file that describes the run, `port` that
    of the process group. Standard output and errors go to the rank's log, and only rank 0 inherits our standard output.
    """
    environment = {
        **MALLOC,
        **os.environ,
        PARENT: str(os.getpid()),
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", WORKER, str(job)]
    with (folder.logs / f"rank{rank}.log").open("ab") as log:
        # Rank 0 prints its progress to our output, through an inherited descriptor, since libraries print to 1 and 2.
        keep = os.dup(sys.stdout.fileno()) if rank == 0 else None
        try:
            if keep is not None:
                environment["MEMASCEND_PROGRESS_FD"] = str(keep)
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[keep] if keep is not None else [],
            )
        finally:
            if keep is not None:
                os.close(keep)


def wait(stopping: Stopping) -> None:
    """Wait until all children have ended, one of them has failed, or a second signal asks to kill them."""
    waiting = list(stopping.children)
    while waiting and stopping.asked < 2:
        for child in list(waiting):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if child.wait(timeout=0.2) not in ends_of(stopping):
                    return
                waiting.remove(child)


def kill(children: dict[str, subprocess.Popen[bytes]]) -> dict[str, int]:
    """Kill the children that have not ended and wait for them, at most `KILLED_S`; return the pids of any remaining."""
    for child in children.values():
        if child.poll() is None:
            child.kill()
    deadline, remaining = time.monotonic() + KILLED_S, {}
    for name, child in children.items():
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            remaining[name] = child.pid
    return remaining


def stuck(remaining: dict[str, int]) -> str:
    """Return the message for processes that were killed but have not ended (pids by name)."""
    whose = " and ".join(f"{name} (pid {pid}, {waits_for(pid)})" for name, pid in remaining.items())
    have = "has" if len(remaining) == 1 else "have"
    return (
        f"{whose} {have} not ended {KILLED_S:g} s after being killed: check the drive or the mount (dmesg), and "
        "continue with --resume once no such process is left"
    )


def ends_of(stopping: Stopping) -> tuple[int, ...]:
    """Return the exit codes of a rank that did not fail.

    It finished, was stopped, or was ended by our signal before it had installed its handler.
    """
    stopped = (STOPPED_STATUS, exit_status(signal.SIGINT))  # the latter if the rank itself was interrupted
    return (0, *stopped, -signal.SIGTERM) if stopping.asked else (0, *stopped)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, or "no output"."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"

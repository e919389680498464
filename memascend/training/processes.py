"""Processes of a run: ending with their parent, their rendezvous port, and cleaning up after them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import socket
from pathlib import Path

_PR_SET_PDEATHSIG = 1
PARENT = "MEMASCEND_PARENT_PID"
FINISHED, STOPPED, NOTHING_TO_DO = "finished", "stopped", "nothing to do"  # outcomes that a rank reports
# System calls of x86-64: read, write, close, pread64, pwrite64, readv, writev, fsync, fdatasync, ftruncate, fallocate.
_ON_DESCRIPTORS = frozenset((0, 1, 3, 17, 18, 19, 20, 74, 75, 77, 285))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; exit at once if the parent is already gone.

    This ensures that no process of a run is left behind.
    """
    ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)


def exit_status(number: int) -> int:
    """Return the exit status of a run that signal `number` stopped.

    It is 130 after Ctrl-C, by the convention of shells, and otherwise 143 as after SIGTERM, also if a terminal was
    closed.
    """
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def waits_for(pid: int) -> str:
    """Return what a process that does not end is waiting for, as far as the kernel reports it.

    This is the kernel function in which one of its threads is in uninterruptible sleep, and the file or folder that the
    thread's system call operates on.
    """
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            found = re.search(r"^State:\s+(\S.*)$", (task / "status").read_text(), re.MULTILINE)
            if found and found.group(1).startswith("D"):
                function = (task / "wchan").read_text().strip()
                about = _file_of_call(task)
                return f"state {found.group(1)}" + (f" in {function}" if function.strip("0") else "") + about
    return "none of its threads waits for a device"


def _file_of_call(task: Path) -> str:
    """Return the file of a thread's current system call if its first argument is a descriptor, else ""."""
    with contextlib.suppress(OSError, ValueError):
        number, *arguments = (task / "syscall").read_text().split()
        if platform.machine() == "x86_64" and int(number) in _ON_DESCRIPTORS:
            return f" on {os.readlink(task / 'fd' / str(int(arguments[0], 16)))}"
    return ""


def free_port() -> int:
    """Return a TCP port of the local host that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove_shared_buffers(port: int) -> None:
    """Remove the buffers of DeepSpeed's shared-memory all-reduce.

    It leaves 66 MiB per run in /dev/shm, in files named after the rendezvous port.
    """
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*"):
        buffer.unlink(missing_ok=True)

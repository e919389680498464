"""Processes of a training: their end with their parent, their rendezvous port, what they leave behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

_PR_SET_PDEATHSIG = 1
PARENT = "MEMASCEND_PARENT_PID"


def die_with_parent() -> None:
    """Be killed when the parent is, at once if it is gone already, so that no process of a run is left behind."""
    ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)


def exit_status(number: int) -> int:
    """Of a run that the signal `number` stopped: 130 after Ctrl-C, as shells have it, else 143, as after SIGTERM (also
    where a terminal was closed)."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove_shared_buffers(port: int) -> None:
    """DeepSpeed's shared-memory all-reduce leaves 66 MiB a run in /dev/shm, named after the rendezvous port."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*"):
        buffer.unlink(missing_ok=True)

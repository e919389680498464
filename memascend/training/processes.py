"""Children that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
PARENT = "MEMASCEND_PARENT_PID"


def die_with_parent() -> None:
    """Be killed when the parent is, at once if it is gone already, so that no process of a run is left behind."""
    ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)

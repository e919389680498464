"""A control group (cgroup v1 or v2) that limits the memory of the processes in it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

from hardware.control_groups import MINE, V1_ROOTS, enable, find_controller

_FILES = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), 2: ("memory.max", "memory.peak")}


class MemoryGroup:
    """A new control group with a limit on memory; the owner has to call `remove`.

    With version 1 it is created below this process's group. `limit_bytes` applies to anonymous memory and page cache of
    all processes in the group together; the kernel reclaims page cache first.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create the group. Raises OSError if that fails: it needs root or, with version 1, a delegated group."""
        place = _mine_of_version_1()
        if place is None:
            controller = find_controller("memory")
            enable(controller)
            place = controller.root
        self._limit, self._peak = _FILES[1 if (place / _FILES[1][0]).exists() else 2]
        self.folder = place / f"memascend-{uuid.uuid4().hex}"
        self.folder.mkdir()
        try:
            (self.folder / self._limit).write_text(str(limit_bytes))
        except OSError:
            self.folder.rmdir()
            raise

    def take_in(self, pid: int) -> None:
        """Move a process into the group; processes that it starts later belong to the group too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory so far, page cache included; None if the kernel does not record it (v2 before Linux 5.19)."""
        try:
            return int((self.folder / self._peak).read_text())
        except FileNotFoundError:
            return None

    def kill(self) -> None:
        """Send SIGKILL to all processes in the group until none is left, for at most 30 seconds."""
        deadline = time.monotonic() + 30
        while (left := (self.folder / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def remove(self) -> None:
        """Remove the group; all processes in it must have ended. Retries for a few seconds."""
        for _ in range(200):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.02)


def _mine_of_version_1() -> Path | None:
    """Return the folder of the version 1 group that counts this process's memory, or None if version 1 does not."""
    for line in MINE.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return V1_ROOTS / "memory" / path.lstrip("/")
    return None

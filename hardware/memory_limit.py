"""A control group with a limit on memory, of cgroup v1 or v2: what runs in it cannot take more."""

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
    """A new group, with version 1 below this process's; `remove` it. `limit_bytes` counts anonymous memory and page
    cache together, of all processes in the group; the kernel takes page cache back first."""

    def __init__(self, limit_bytes: int) -> None:
        """Raises OSError where none can be made: that takes root, or with version 1 a group that was handed over."""
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
        """A process, and all that it starts from now on."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int | None:
        """The most that was taken so far, page cache included. None where the kernel does not count it (v2 before
        Linux 5.19)."""
        try:
            return int((self.folder / self._peak).read_text())
        except FileNotFoundError:
            return None

    def kill(self) -> None:
        """SIGKILL to all processes in the group, until there are none."""
        deadline = time.monotonic() + 30
        while (left := (self.folder / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def remove(self) -> None:
        """Once all processes in it have ended."""
        for _ in range(200):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.02)


def _mine_of_version_1() -> Path | None:
    """Folder of the group that counts this process's memory; None where version 1 does not."""
    for line in MINE.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return V1_ROOTS / "memory" / path.lstrip("/")
    return None

"""Snapshots of a store's tensors while training overwrites them: a write waits until the old contents were copied.

A snapshot takes no space and copies nothing by itself. The thread that copies asks for the next tensor: first those
that a writer waits for, then in the order in which the next step will write them, so that few writes have to wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from memascend.storage import interrupts
from memascend.storage.interrupts import whole


class Snapshot:
    """A snapshot of the tensors with `keys`, in the preferred order of copying. Thread-safe."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._pending = dict.fromkeys(keys)
        self._wanted: deque[str] = deque()
        self._changed = threading.Condition()
        self.waited_s = 0.0  # seconds that writers waited, summed over all writers, also concurrent ones
        self.ended = False

    def next(self, in_progress: str | None = None) -> str | None:
        """Return the key of the tensor to copy next: one that a writer waits for, the one `in_progress`, or
        the first; None if all are copied or the snapshot has ended."""
        with self._changed:
            while self._wanted and self._wanted[0] not in self._pending:
                self._wanted.popleft()
            if self._wanted:
                return self._wanted[0]
            return in_progress if in_progress in self._pending else next(iter(self._pending), None)

    def copied(self, key: str) -> None:
        """Note that a tensor was copied and may be overwritten."""
        with self._changed:
            self._pending.pop(key, None)
            self._changed.notify_all()

    def end(self) -> None:
        """End the snapshot: all tensors may be overwritten, copied or not. Idempotent."""
        with self._changed:
            self.ended = True
            self._pending.clear()
            self._changed.notify_all()

    @whole
    def make_way(self, key: str) -> None:
        """Wait until a tensor may be overwritten. In the main thread Ctrl-C ends the wait."""
        if key not in self._pending:
            return
        begin = time.monotonic()
        with self._changed:
            self._wanted.append(key)
            while key in self._pending:
                interrupts.wait(self._changed.wait)
            self.waited_s += time.monotonic() - begin

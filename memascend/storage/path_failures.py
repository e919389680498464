"""Removal of paths that fail, fill up or hang from a tier, and their return to use (`memascend.storage.multi_path`)."""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Collection, Sequence

from memascend.storage.errors import StorageError
from memascend.storage.group_placement import GroupPlacement
from memascend.storage.storage_path import Attempt, Busy, StoragePath, nothing_ends

__all__ = ["HANG_S", "PathFailures"]

log = logging.getLogger("memascend")

HANG_S = 120.0


class PathFailures:
    """Tracks a tier's failed paths, guarded by its `lock`. A thread, started on demand, looks for those that hang."""

    def __init__(
        self, paths: Sequence[StoragePath], groups: GroupPlacement, busy: Busy, lock: threading.RLock, hang_s: float
    ) -> None:
        """Watch `paths`. `hang_s`: seconds with transfers in flight and no completion, after which one is taken out."""
        self.hang_s = hang_s
        self._paths, self._groups, self._busy, self._lock = paths, groups, busy, lock
        self._watched = threading.Condition(lock)
        self._watcher: threading.Thread | None = None
        self._stopped = False

    def take_out(self, path: StoragePath, error: StorageError, *, of_write: bool) -> None:
        """Take `path` out of use because it has failed, or mark it as full; log that once."""
        with self._lock:
            if of_write and error.errno in (errno.ENOSPC, errno.EDQUOT):
                known, path.full = path.full, True
                what = "is full; data that does not fit there goes to the other paths"
            else:
                known = path.failure is not None
                path.failure = path.failure or error
                what = (
                    "is taken out of use; its data is read as long as that works, and moves to other paths when it "
                    "is next written"
                )
            if known:
                return
            there = self._groups.count(path) if path.failure is None else self._groups.drop(path)
        log.warning("memascend: path %s (%d groups) %s: %s", path.name, there, what, error)

    def to_try(self, current: Collection[StoragePath]) -> dict[StoragePath, int]:
        """Return the paths that may be probed for reuse, with the bytes that must be free: a group's, if it was full.

        Requires the lock. Excluded are paths with a given-up transfer still in flight, and failed paths that have the
        last write of a tensor (`current`): what a path had when it failed is never read after its return.
        """
        group = max(self._groups.group_bytes.values(), default=0)
        out = [path for path in self._paths if not path.usable and not path.hanging and path not in current]
        return {path: group if path.full else 0 for path in self._paths if path in out or (path.usable and path.full)}

    def try_succeeded(self, path: StoragePath, current: Collection[StoragePath]) -> bool:
        """Return `path` to use after test data was read back; False if it must stay out. Requires the lock."""
        if path not in self.to_try(current):
            return False
        path.failure, path.full = None, False
        log.warning("memascend: path %s is used again: a test write was read back", path.name)
        return True

    def written(self, path: StoragePath) -> None:
        """Note a successful write. If all paths are out, that suffices for this one to return. Requires the lock."""
        if path.failure is not None and not path.hanging and not any(each.usable for each in self._paths):
            path.failure = None
            log.warning("memascend: path %s is used again: a write succeeded when no other path was left", path.name)

    def watch(self) -> None:
        """Start the thread that looks for hangs; called when a transfer begins. Requires the lock."""
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=_look_for_hangs, args=(weakref.ref(self), self._watched, self.hang_s), daemon=True
            )
            self._watcher.name = "memascend-paths"
            self._watcher.start()

    def stop(self) -> None:
        """Stop the thread; called when nothing is in flight and nothing will be."""
        with self._watched:
            self._stopped = True
            self._watched.notify_all()

    def _give_up_hanging(self) -> bool:
        """Give up the transfers on paths where nothing has ended for too long, and take these paths out.

        Returns False if there is nothing to watch any more.
        """
        given_up: list[tuple[Attempt, StorageError]] = []
        with self._lock:
            if self._stopped:
                return False
            now = time.monotonic()
            for path in self._paths:
                if not path.in_flight:
                    continue
                if now - max(path.last_end, min(path.in_flight.values())) < self.hang_s:
                    continue
                path.hanging = True
                for attempt in path.in_flight:
                    if not attempt.over:
                        attempt.over = True
                        self._busy.end(attempt.write, 0)
                        given_up.append((attempt, nothing_ends(path, self.hang_s)))
        for attempt, error in given_up:
            self.take_out(attempt.path, error, of_write=False)
            if attempt.inner is not None:
                attempt.inner.cancel()
            attempt.path.lock.leave()
            attempt.ended(error)
        return True


def _look_for_hangs(failures: weakref.ref[PathFailures], watched: threading.Condition, hang_s: float) -> None:
    """Look for hangs until `failures` is stopped or collected; a strong reference exists only during a look."""
    while True:
        with watched:
            watched.wait(hang_s / 4)
        there = failures()
        if there is None or not there._give_up_hanging():
            return
        del there

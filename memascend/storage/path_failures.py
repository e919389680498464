"""Which paths of a tier are taken out, and why: those that fail, fill, or hang; and which of them come back
(`memascend.storage.multi_path`)."""

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
    """Of a tier's `paths`, under its `lock`. A thread, once there is anything to watch, looks for those that hang."""

    def __init__(
        self, paths: Sequence[StoragePath], groups: GroupPlacement, busy: Busy, lock: threading.RLock, hang_s: float
    ) -> None:
        """`hang_s`: seconds with something in flight on a path and no end there, after which it is taken out."""
        self.hang_s = hang_s
        self._paths, self._groups, self._busy, self._lock = paths, groups, busy, lock
        self._watched = threading.Condition(lock)
        self._watcher: threading.Thread | None = None
        self._stopped = False

    def take_out(self, path: StoragePath, error: StorageError, *, of_write: bool) -> None:
        """`path` has failed, or is full; told once."""
        with self._lock:
            if of_write and error.errno in (errno.ENOSPC, errno.EDQUOT):
                told, path.full = path.full, True
                what = "is full; data that does not fit there goes to the other paths"
            else:
                told = path.failure is not None
                path.failure = path.failure or error
                what = (
                    "is taken out of use; its data is read as long as that works, and moves to other paths when it "
                    "is next written"
                )
            if told:
                return
            there = self._groups.count(path) if path.failure is None else self._groups.drop(path)
        log.warning("memascend: path %s (%d groups) %s: %s", path.name, there, what, error)

    def to_try(self, current: Collection[StoragePath]) -> dict[StoragePath, int]:
        """With the lock held: paths that may come back, and the bytes that must be free there: a group's, where it was
        full. Not one where something is in flight that was given up, nor one that has the last write of a tensor
        (`current`): what a path held when it was taken out is never read after it has come back."""
        group = max(self._groups.group_bytes.values(), default=0)
        out = [path for path in self._paths if not path.usable and not path.hanging and path not in current]
        return {path: group if path.full else 0 for path in self._paths if path in out or (path.usable and path.full)}

    def try_succeeded(self, path: StoragePath, current: Collection[StoragePath]) -> bool:
        """With the lock held: what was written on `path` was read back. False: it stays out all the same."""
        if path not in self.to_try(current):
            return False
        path.failure, path.full = None, False
        log.warning("memascend: path %s is used again: a test write was read back", path.name)
        return True

    def written(self, path: StoragePath) -> None:
        """With the lock held: a write has ended well. Where all paths are out, that is enough for one to come back."""
        if path.failure is not None and not path.hanging and not any(each.usable for each in self._paths):
            path.failure = None
            log.warning("memascend: path %s is used again: a write succeeded when no other path was left", path.name)

    def watch(self) -> None:
        """With the lock held: something is in flight."""
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=_look_for_hangs, args=(weakref.ref(self), self._watched, self.hang_s), daemon=True
            )
            self._watcher.name = "memascend-paths"
            self._watcher.start()

    def stop(self) -> None:
        """Nothing is in flight any more, and nothing will be."""
        with self._watched:
            self._stopped = True
            self._watched.notify_all()

    def _give_up_hanging(self) -> bool:
        """What is in flight on a path where nothing has ended for too long is given up, and the path with it. False:
        there is nothing to watch any more."""
        given_up: list[tuple[Attempt, StorageError]] = []
        with self._lock:
            if self._stopped:
                return False
            now = time.monotonic()
            for path in self._paths:
                if not path.under_way:
                    continue
                if now - max(path.last_end, min(path.under_way.values())) < self.hang_s:
                    continue
                path.hanging = True
                for attempt in path.under_way:
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
    """Until they are stopped, or gone; holds them only while it looks."""
    while True:
        with watched:
            watched.wait(hang_s / 4)
        there = failures()
        if there is None or not there._give_up_hanging():
            return
        del there

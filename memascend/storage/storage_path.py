"""One path of a multi-path tier: its properties, its transfers in flight, and its statistics."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memascend.storage.completion import Completion
from memascend.storage.errors import StorageError, hang_error
from memascend.storage.path_lock import PathLock
from memascend.storage.placement import Rates
from memascend.storage.tier import Tier, Transferred

__all__ = ["Attempt", "Busy", "PathReport", "StoragePath", "no_path_takes", "nothing_ends", "observe", "with_key"]

_OLD_SHARE = 0.5  # weight of the previous rate in the mean with the observed one
_LEAST_OBSERVED_S = 0.02  # transfer time below which an observation is not significant


@dataclass(eq=False)
class StoragePath:
    """A path of a :class:`MultiPathTier`: its name in messages, its tier, and its state.

    `rates` as measured at the start (`path_rates.measure`); None stands for the mean of the known paths. The default
    `lock` admits everything.
    """

    name: str
    tier: Tier
    rates: Rates | None = None
    lock: PathLock = field(default_factory=lambda: PathLock(None))
    failure: StorageError | None = field(default=None, init=False)  # why it was taken out of use
    hanging: bool = field(default=False, init=False)
    full: bool = field(default=False, init=False)
    in_flight: dict[Attempt, float] = field(default_factory=dict, init=False)
    last_end: float = field(default=0.0, init=False)
    seen: Transferred = field(default=Transferred(0, 0, 0.0, 0.0), init=False)  # when its rates were last observed

    @property
    def usable(self) -> bool:
        """Whether the path was not taken out of use."""
        return self.failure is None

    @property
    def free_bytes(self) -> int:
        """Bytes available on the path; 0 if it cannot say, since its folder or device is gone."""
        try:
            return self.tier.free_bytes
        except OSError:
            return 0


@dataclass(frozen=True)
class PathReport:
    """State and contents of a path; rates in bytes per second, as last observed."""

    name: str
    rates: Rates
    groups: int
    bytes: int
    bytes_read: int
    bytes_written: int
    turns: int
    failure: str | None


class Attempt:
    """One transfer on one path; `over` once it has ended or was given up."""

    __slots__ = ("ended", "inner", "over", "path", "write")

    def __init__(self, path: StoragePath, write: bool, ended: Callable[[BaseException | None], None]) -> None:
        self.path, self.write, self.ended = path, write, ended
        self.inner: Completion | None = None
        self.over = False


class Busy:
    """Bytes moved, and seconds in which a transfer of a direction was in flight. Guarded by the tier's lock."""

    def __init__(self) -> None:
        self.bytes = [0, 0]
        self._seconds, self._in_flight, self._since = [0.0, 0.0], [0, 0], [0.0, 0.0]

    def begin(self, write: bool) -> None:
        """Note that a transfer begins, in the direction `write` or not."""
        if self._in_flight[write] == 0:
            self._since[write] = time.monotonic()
        self._in_flight[write] += 1

    def end(self, write: bool, nbytes: int) -> None:
        """Note that a transfer of this direction has ended, after moving `nbytes`."""
        self._in_flight[write] -= 1
        if self._in_flight[write] == 0:
            self._seconds[write] += time.monotonic() - self._since[write]
        self.bytes[write] += nbytes

    def transferred(self) -> Transferred:
        """Return the totals so far, with the time of transfers that are still in flight."""
        now = time.monotonic()
        seconds = [
            s + (now - since if n else 0.0)
            for s, n, since in zip(self._seconds, self._in_flight, self._since, strict=True)
        ]
        return Transferred(self.bytes[0], self.bytes[1], seconds[0], seconds[1])


def with_key(error: StorageError, key: str) -> StorageError:
    """Return `error` with the tensor's name, which a path that only knows files does not report."""
    if error.key is not None:
        return error
    reason = f"{error.reason}: it was there alone"
    return StorageError(error.op, error.path, error.offset, error.expected, error.got, error.errno, reason, key=key)


def no_path_takes(
    key: str, nbytes: int, place: str, paths: Sequence[StoragePath], tried: Mapping[StoragePath, StorageError]
) -> StorageError:
    """Return the error of a write that no path accepted, with each path's reason: from now (`tried`) or earlier."""
    errors = [tried.get(path) or path.failure for path in paths]
    reasons = (f"{path.name}: {e.reason if e else 'no'}" for path, e in zip(paths, errors, strict=True))
    codes = {error.errno for error in errors if error is not None}
    code = errno.ENOSPC if errno.ENOSPC in codes else errno.EIO
    return StorageError("write", place, 0, nbytes, 0, code, f"no path takes it ({'; '.join(reasons)})", key=key)


def observe(path: StoragePath) -> None:
    """Update the path's rates from its transfers since the last call; short observations carry over to the next."""
    now, before, old = path.tier.transferred, path.seen, path.rates
    since, read, write = now - before, None, None
    if since.reading_s >= _LEAST_OBSERVED_S:
        read = since.read_bytes_per_s
        before = replace(before, bytes_read=now.bytes_read, reading_s=now.reading_s)
    if since.writing_s >= _LEAST_OBSERVED_S:
        write = since.write_bytes_per_s
        before = replace(before, bytes_written=now.bytes_written, writing_s=now.writing_s)
    path.seen = before
    if old is None:
        if (known := read or write) is not None:
            path.rates = Rates(read or known, write or known)
        return
    path.rates = Rates(_mean(old.read, read), _mean(old.write, write))


def _mean(old: float, observed: float | None) -> float:
    """Return the weighted mean of the old and the observed rate; the old one if nothing was observed."""
    return old if not observed else _OLD_SHARE * old + (1 - _OLD_SHARE) * observed


def nothing_ends(path: StoragePath, hang_s: float) -> StorageError:
    """Return the error for a path with transfers in flight of which none has ended for `hang_s` seconds."""
    return hang_error(path.name, f"nothing has ended there for {hang_s:g} s")

"""A lock between the processes of a machine: first come, first served, and given up by the kernel when a holder dies.

Who wants the lock takes a number and locks the byte of that number in a shared file, then waits until no lower byte is
locked any more. The locks belong to open file descriptions, so that those of a killed process fall, whether it held the
lock or waited for it; and nobody can be overtaken, because numbers only grow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
import weakref

__all__ = ["FairLock", "name_of_place"]

_COUNTER = struct.Struct("<q")
_DESK = 8  # the byte that is locked while a number is taken; the counter lies before it
_FIRST = 16  # the byte of number 0
_LAST = 1 << 60  # no honest counter gets there; anybody may write the file
_TURN_S = 120.0  # a process gives its turn up within a second or two where others wait: so long, nobody's turn is
_DESK_S = 2.0  # a number is taken in microseconds: who holds the desk for longer does so to stop others
FOLDER = "/dev/shm"

_locks: weakref.WeakSet[FairLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_locks):
        lock.close()  # else a forked worker would keep the lock of a parent that has died


os.register_at_fork(after_in_child=_forget_in_child)


def name_of_place(place: str | os.PathLike[str]) -> str:
    """One name for all folders of a file system, and for a device: who shares a drive shares a lock. OSError."""
    status = os.stat(place)
    number = status.st_rdev or status.st_dev
    return f"{os.major(number)}-{os.minor(number)}"


class FairLock:
    """One process's way to the lock called `name`. Not thread-safe, but for `contended` and `close`.

    Processes that do not share `folder` (containers with a /dev/shm of their own) do not share the lock.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] = FOLDER) -> None:
        """Raises ValueError (a name that is no file's), OSError."""
        if not re.fullmatch(r"[\w.-]{1,100}", name):
            raise ValueError(f"a lock's name consists of letters, digits, '.', '-' and '_', got {name!r}")
        self.path = os.path.join(folder, f"memascend-path-{name}")
        self._fd = _open(self.path)
        self._number: int | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Block until it is this process's turn. Other threads run meanwhile. OSError where somebody before it, who
        need not be one of ours, keeps the lock for longer than any turn takes."""
        number = self._take_number()
        end, pause = time.monotonic() + _TURN_S, 0.0005
        while not self._is_first(number):
            if time.monotonic() > end:
                self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST + number, 1)
                raise OSError(errno.EBUSY, f"another process holds the lock {self.path}")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        self._number = number

    def try_acquire(self) -> bool:
        """False: somebody has it, or is before us."""
        number = self._take_number()
        if not self._is_first(number):
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST + number, 1)
            return False
        self._number = number
        return True

    def _is_first(self, number: int) -> bool:
        """Whether no lower byte is locked by another process."""
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, _FIRST, number)
        except (BlockingIOError, PermissionError):
            return False
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST, number)
        return True

    def release(self) -> None:
        number, self._number = self._number, None
        if number is not None and self._fd >= 0:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST + number, 1)

    def contended(self) -> bool:
        """Whether somebody waits behind this process, which holds it."""
        number = self._number
        if number is None or self._fd < 0:
            return False
        asked = _range(fcntl.F_WRLCK, _FIRST + number + 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack("hhqqi0q", found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Gives it up. Idempotent."""
        fd, self._fd = self._fd, -1
        self._number = None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _take_number(self) -> int:
        if self._fd < 0:
            raise RuntimeError(f"the lock {self.path} is closed")
        self._reach_desk()
        try:
            stored = os.pread(self._fd, _COUNTER.size, 0)
            number = _COUNTER.unpack(stored)[0] if len(stored) == _COUNTER.size else 0
            if not 0 <= number < _LAST:
                raise OSError(
                    errno.EINVAL, f"{self.path} holds the number {number}, which no process has written there"
                )
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _FIRST + number, 1)  # nobody else can have this byte
            os.pwrite(self._fd, _COUNTER.pack(number + 1), 0)
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _DESK, 1)
        return number

    def _reach_desk(self) -> None:
        """OSError where somebody holds it for longer than it takes to get a number."""
        end = time.monotonic() + _DESK_S
        while True:
            try:
                return self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _DESK, 1)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    raise OSError(errno.EBUSY, f"another process holds the lock {self.path}") from None
                time.sleep(0.0005)

    def _lock(self, command: int, kind: int, begin: int, length: int) -> None:
        if length:
            fcntl.fcntl(self._fd, command, _range(kind, begin, length))


def _range(kind: int, begin: int, length: int) -> bytes:
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, begin, length, 0)


def _open(path: str) -> int:
    """Made where it is missing, for every user: the kernel refuses O_CREAT on another user's file in /dev/shm."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666)
        return fd

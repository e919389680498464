"""A first-come, first-served lock between the processes of a machine, which the kernel releases when a holder dies.

To take the lock, a process draws a number, locks the byte of that number in a shared file, and waits until no lower
byte is locked. The byte locks belong to open file descriptions, so the kernel drops those of a killed process, whether
it held the lock or waited for it. Nobody can be overtaken, because the numbers only grow.
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
_DESK = 8  # the byte that is locked while a number is drawn; the counter precedes it
_FIRST = 16  # the byte of number 0
_LAST = 1 << 60  # no well-behaved counter gets this far; but any user may write the file
_TURN_S = 120.0  # contended locks are given up within a second or two, so no regular turn takes this long
_DESK_S = 2.0  # drawing a number takes microseconds; whoever holds this byte for longer is blocking others on purpose
FOLDER = "/dev/shm"

_locks: weakref.WeakSet[FairLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_locks):
        lock.close()  # else a forked worker would keep the lock of a parent that has died


os.register_at_fork(after_in_child=_forget_in_child)


def name_of_place(place: str | os.PathLike[str]) -> str:
    """Return one name per device or file system, so that users of one drive share a lock. Raises OSError."""
    status = os.stat(place)
    number = status.st_rdev or status.st_dev
    return f"{os.major(number)}-{os.minor(number)}"


class FairLock:
    """This process's handle of the lock called `name`. Not thread-safe, except `contended` and `close`.

    Processes that do not share `folder` (containers with their own /dev/shm) do not share the lock.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] = FOLDER) -> None:
        """Open the lock file. Raises ValueError for a name that is not a valid file name, and OSError."""
        if not re.fullmatch(r"[\w.-]{1,100}", name):
            raise ValueError(f"a lock's name consists of letters, digits, '.', '-' and '_', got {name!r}")
        self.path = os.path.join(folder, f"memascend-path-{name}")
        self._fd = _open(self.path)
        self._number: int | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Block until it is this process's turn. Other threads run meanwhile.

        Raises OSError if a process ahead, which need not use this library, keeps the lock longer than any turn takes.
        """
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
        """Take the lock if it is free; return False if another process has it or is ahead."""
        number = self._take_number()
        if not self._is_first(number):
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST + number, 1)
            return False
        self._number = number
        return True

    def _is_first(self, number: int) -> bool:
        """Return whether no lower byte is locked by another process."""
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, _FIRST, number)
        except (BlockingIOError, PermissionError):
            return False
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST, number)
        return True

    def release(self) -> None:
        """Release the lock. No effect if this process does not have it."""
        number, self._number = self._number, None
        if number is not None and self._fd >= 0:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _FIRST + number, 1)

    def contended(self) -> bool:
        """Return whether another process waits behind this one, which holds the lock."""
        number = self._number
        if number is None or self._fd < 0:
            return False
        asked = _range(fcntl.F_WRLCK, _FIRST + number + 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack("hhqqi0q", found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lock and close its file. Idempotent."""
        fd, self._fd = self._fd, -1
        self._number = None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _take_number(self) -> int:
        """Draw the next number, lock its byte, and return it. Raises OSError, and RuntimeError after `close`."""
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
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _FIRST + number, 1)  # this byte cannot be taken
            os.pwrite(self._fd, _COUNTER.pack(number + 1), 0)
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _DESK, 1)
        return number

    def _reach_desk(self) -> None:
        """Lock the byte that guards the counter. Raises OSError if it stays taken for longer than a draw lasts."""
        end = time.monotonic() + _DESK_S
        while True:
            try:
                return self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _DESK, 1)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    raise OSError(errno.EBUSY, f"another process holds the lock {self.path}") from None
                time.sleep(0.0005)

    def _lock(self, command: int, kind: int, begin: int, length: int) -> None:
        """Apply a lock operation of fcntl to `length` bytes from `begin` on; no effect for zero bytes."""
        if length:
            fcntl.fcntl(self._fd, command, _range(kind, begin, length))


def _range(kind: int, begin: int, length: int) -> bytes:
    """Return a `struct flock` for fcntl, with the process id 0 that locks of open file descriptions require."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, begin, length, 0)


def _open(path: str) -> int:
    """Open the lock file; if missing, create it for all users.

    The kernel refuses O_CREAT on another user's file in /dev/shm, so the file is first opened without it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666)
        return fd

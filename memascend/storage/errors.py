"""Errors of transfers between memory and devices, with a suggested fix."""

from __future__ import annotations

import errno as codes
from collections.abc import Sequence


class StorageError(OSError):
    """A failed transfer or flush, or an invalid index. `errno` is None if the kernel reported no error.

    `path` is the file or device; `offset`, `expected` and `got` are in bytes and describe the piece that failed; `key`
    is the tensor, if there is one; `others` counts further failed requests.
    """

    # More than eight parameters: they are the fields of a failed request as the native engines report it (`Failure`).
    def __init__(
        self,
        op: str,
        path: str,
        offset: int,
        expected: int,
        got: int,
        errno: int | None,
        reason: str,
        others: int = 0,
        key: str | None = None,
    ) -> None:
        more = f" (and {others} more failed requests)" if others else ""
        what = path if key is None else f"'{key}' on {path}"
        super().__init__(
            f"{op} of {what} failed at offset {offset}: expected {expected} bytes, got {got}: {reason}"
            f"{_fix(op, errno, key)}{more}"
        )
        self.op, self.path, self.offset, self.expected, self.got = op, path, offset, expected, got
        self.errno, self.reason, self.others, self.key = errno, reason, others, key

    @classmethod
    def of(cls, failure: Failure, others: int = 0) -> StorageError:
        """Return the error for a failed request as the native engines report it."""
        op, key, path, offset, expected, got, errno, reason = failure
        return cls(op, path, offset, expected, got, errno or None, reason, others, key)


def hang_error(place: str, seen: str) -> StorageError:
    """Return the error (ETIMEDOUT) for transfers to `place` that are given up because they make no progress.

    `seen` says what was observed, and for how long.
    """
    reason = f"{seen}: the drive or the mount hangs: check it (dmesg)"
    return StorageError("transfer", place, 0, 0, 0, codes.ETIMEDOUT, reason)


Failure = tuple[str, str | None, str, int, int, int, int, str]  # op, key, path, offset, expected, got, errno, reason


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise StorageError for the first failed request of a wait, if any; the message counts the others."""
    if failures:
        raise StorageError.of(failures[0], len(failures) - 1)


_FIXES = {
    "EACCES": "check the permissions of the file and its folder",
    "EBUSY": "unmount the device or end its other user",
    "EDQUOT": "free space within your quota or choose another folder",
    "EFBIG": "raise the file size limit (ulimit -f)",
    "EINVAL": "the kernel refuses this direct transfer: the device may demand memory at multiples of its logical block "
    "size (blockdev --getss), which kernels before 6.1 do not report: use a newer one, or memory aligned to it",
    "EIO": "check the device (dmesg)",
    "EMFILE": "raise the limit on open files (ulimit -n)",
    "ENODEV": "the device is gone: check the cabling and dmesg, then open the store again and verify",
    "ENOENT": "check the path and that its folder exists",
    "ENOSPC": "free space on that file system or choose another folder",
    "ENXIO": "the device is gone: check the cabling and dmesg, then open the store again and verify",
    "EROFS": "choose a folder that is not on a read-only file system",
}
_STORE_FIXES = {
    "reserve": "commit, which frees what was overwritten, erase tensors, or use a larger device",
    "commit": "destroy the store and format it with a larger log",
}


def _fix(op: str, errno: int | None, key: str | None) -> str:
    """Return what to do about an error, as the end of a message; empty if nothing is known."""
    if errno is None:
        shorter = op == "read" and key is None
        return ": the file is shorter than the tensor: write the whole tensor first" if shorter else ""
    fix = _STORE_FIXES.get(op) if errno == codes.ENOSPC else None
    fix = fix or _FIXES.get(codes.errorcode.get(errno, ""))
    return f": {fix}" if fix else ""

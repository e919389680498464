"""Locks on single bytes of files, which show whether a process lives: the kernel drops those of a killed process."""

from __future__ import annotations

import errno
import fcntl
import os
import struct


def try_lock(fd: int, byte: int) -> bool:
    """Take the write lock on one byte for this open file description; False if another one has it. Raises OSError."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True

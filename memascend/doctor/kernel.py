"""Probes of what the kernel allows this process to do, using the system calls themselves."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource

MIB = 2**20
_IO_URING_SETUP = 425  # the same number on every architecture
_IO_SETUP = {"x86_64": (206, 207), "aarch64": (0, 1)}  # io_setup, io_destroy
_URING_PARAMS_BYTES = 120
# Limits up to this size are tested by locking more memory; larger ones are trusted.
_TRY_LOCK_BYTES = 64 * MIB


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def lockable_bytes() -> int | None:
    """Return the bytes of memory that this process may lock, or None if there is no limit.

    CAP_IPC_LOCK, which lifts the limit, is detected by locking more than the limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft <= _TRY_LOCK_BYTES and _can_lock(soft + MIB):
        return None
    return soft


def _can_lock(size: int) -> bool:
    """Return whether `size` more bytes can be locked; they are unlocked again."""
    libc = _libc()
    with mmap.mmap(-1, size) as memory:
        start = (ctypes.c_char * size).from_buffer(memory)
        try:
            address = ctypes.c_void_p(ctypes.addressof(start))
            if libc.mlock(address, ctypes.c_size_t(size)):
                return False
            libc.munlock(address, ctypes.c_size_t(size))
            return True
        finally:
            del start  # a mapping cannot be closed while a pointer into it exists


def uring_error(entries: int = 8) -> int:
    """Set up an io_uring and close it again; return 0 on success, otherwise the errno."""
    params = ctypes.create_string_buffer(_URING_PARAMS_BYTES)
    descriptor = _libc().syscall(_IO_URING_SETUP, entries, params)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def libaio_error(events: int) -> int:
    """Set up a libaio context for `events` requests and destroy it; return 0 on success, otherwise the errno."""
    numbers = _IO_SETUP.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc, context = _libc(), ctypes.c_ulong(0)
    if libc.syscall(numbers[0], events, ctypes.byref(context)) < 0:
        return ctypes.get_errno()
    libc.syscall(numbers[1], context)
    return 0

"""What the kernel lets this process do, tried with the system calls themselves."""

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
# Limits up to this are tried by locking more; beyond it the limit is taken at its word.
_TRY_LOCK_BYTES = 64 * MIB


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def lockable_bytes() -> int | None:
    """How much memory this process may lock; None: without limit (also by CAP_IPC_LOCK, found by locking more)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft <= _TRY_LOCK_BYTES and _can_lock(soft + MIB):
        return None
    return soft


def _can_lock(size: int) -> bool:
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
            del start  # the map cannot be closed while something points into it


def uring_error(entries: int = 8) -> int:
    """0 where an io_uring could be set up (and was closed again), else the errno."""
    params = ctypes.create_string_buffer(_URING_PARAMS_BYTES)
    descriptor = _libc().syscall(_IO_URING_SETUP, entries, params)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def libaio_error(events: int) -> int:
    """0 where a libaio context for `events` requests could be set up (and was destroyed), else the errno."""
    numbers = _IO_SETUP.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc, context = _libc(), ctypes.c_ulong(0)
    if libc.syscall(numbers[0], events, ctypes.byref(context)) < 0:
        return ctypes.get_errno()
    libc.syscall(numbers[1], context)
    return 0

"""Settings of the C library's heap for training processes, and a trimmer that returns freed memory to the kernel.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

from memascend.memory import resident

__all__ = ["MALLOC", "HeapTrimmer", "trim_heap"]

# Without these, glibc keeps over a gigabyte of freed blocks resident (measured on a 256M-parameter model). With a
# threshold far below 4 MiB, every activation on a CPU is its own mapping, whose pages are faulted in again each time:
# with 64 KiB, a twin's steps took 1.2 to 1.6 times as long, for 2 to 12 % less resident memory. Larger tensors are
# still mappings of their own, for which glibc 2.35 and later ask for huge pages: without them page faults took 30 % of
# the main thread's time in a step of an 8B model on two cores.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4194304",
    "MALLOC_TRIM_THRESHOLD_": "67108864",
    "MALLOC_ARENA_MAX": "2",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

_GROWTH_BYTES = 64 << 20  # the same as the trim threshold above


class HeapTrimmer:
    """Returns freed memory to the kernel when a process has grown between steps. Not thread-safe.

    glibc caches the remainders that it cuts off aligned blocks (torch aligns tensors to 64 bytes) for small requests.
    An allocation that lands there prevents the freed tensor's space from being reused for one of the same size. So
    the heap of a training loop with a graph grows from step to step: by 10 MB per step with 140 MB of tensors
    (glibc 2.36: 1.1 GB were resident after 80 steps, 0.43 GB with this). Does nothing with another C library.
    """

    def __init__(
        self, trim: Callable[[], object] | None = None, resident_bytes: Callable[[], int] | None = None
    ) -> None:
        self._trim = trim or _malloc_trim()
        self._resident_bytes = resident_bytes or functools.partial(resident.resident_bytes, "VmRSS")
        self._least: float = -math.inf  # so that the first step trims: it follows the creation and move of a model

    def after_step(self) -> bool:
        """Trim after the first step, and whenever the process has grown by 64 MiB above its minimum.

        Returns whether it trimmed.
        """
        if self._trim is None:
            return False
        now = self._resident_bytes()
        if now < self._least + _GROWTH_BYTES:
            self._least = min(self._least, now)
            return False
        self._trim()
        self._least = self._resident_bytes()
        return True


def trim_heap() -> None:
    """Return the heap's freed memory to the kernel. Does nothing if the C library is not glibc."""
    if (trim := _malloc_trim()) is not None:
        trim()


@functools.cache
def _malloc_trim() -> Callable[[], object] | None:
    """Return glibc's `malloc_trim(0)`, or None with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else functools.partial(trim, ctypes.c_size_t(0))

"""The C library's heap in processes that train: settings for the environment that they start with, and what gives freed
memory back to the kernel. No torch here."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

from memascend.memory import resident

__all__ = ["MALLOC", "HeapTrimmer", "trim_heap"]

# Without these glibc keeps freed blocks of over a gigabyte resident (measured on a 256M-parameter model). With much
# less than 4 MiB every activation on a CPU is a mapping of its own, whose pages are faulted in again: steps of a twin
# took 1.2 to 1.6 times as long with 64 KiB, for 2 to 12 % less resident memory.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_ARENA_MAX": "2"}

_GROWTH_BYTES = 64 << 20  # as the threshold above


class HeapTrimmer:
    """Gives freed memory back where a process has grown between steps. Not thread-safe.

    glibc puts the ends that it cuts off an aligned block (torch's tensors begin on 64 bytes) into its cache of small
    ones. Whatever gets them there stands in the way when the tensor is freed and one of its size is asked for next, so
    the heap of a loop with a graph grows from step to step: by 10 MB per step of a model whose tensors take 140 MB
    (glibc 2.36: 1.1 GB were resident after 80 steps, 0.43 GB with this). Does nothing where the C library is another.
    """

    def __init__(
        self, trim: Callable[[], object] | None = None, resident_bytes: Callable[[], int] | None = None
    ) -> None:
        self._trim = trim or _malloc_trim()
        self._resident_bytes = resident_bytes or functools.partial(resident.resident_bytes, "VmRSS")
        self._least: float = -math.inf  # the first step follows upon the making and the moving of a model

    def after_step(self) -> bool:
        """Give freed memory back after the first step, and where the process has grown by 64 MiB since it was smallest.
        Whether that was done."""
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
    """Give the heap's freed memory back to the kernel. Does nothing where the C library is not glibc."""
    if (trim := _malloc_trim()) is not None:
        trim()


@functools.cache
def _malloc_trim() -> Callable[[], object] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else functools.partial(trim, ctypes.c_size_t(0))

"""Cache of this machine's processor name."""

from __future__ import annotations

import functools


def remember_processor() -> None:
    """Cache the processor's name: DeepSpeed queries it for each optimizer, which starts Python for about a second."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()

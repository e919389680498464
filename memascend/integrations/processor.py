"""The name of this machine's processor, asked for once."""

from __future__ import annotations

import functools


def remember_processor() -> None:
    """DeepSpeed asks for the processor's name for each optimizer, and a Python program that takes a second answers."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()

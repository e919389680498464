"""Freed memory that stays in the process is returned to the kernel when the process has grown."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memascend.memory.heap import MALLOC, HeapTrimmer

MIB = 1 << 20
PROGRAM = """
import torch
from memascend.memory.heap import HeapTrimmer
from memascend.memory.resident import resident_bytes

torch.zeros(1)
heap = HeapTrimmer()
assert heap.after_step()
before, large, small = resident_bytes("VmRSS"), [], []
for _ in range(1200):
    large.append(torch.ones(25_000))
    small.append(torch.ones(8))  # stays, and with it what lies around it
del large
grown = resident_bytes("VmRSS")
assert heap.after_step()
print(grown - before, resident_bytes("VmRSS") - before)
assert not heap.after_step()
"""


def has_malloc_trim():
    return hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not has_malloc_trim(), reason="the C library has no malloc_trim")
def test_memory_freed_between_small_tensors_is_returned():
    environment = {**MALLOC, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, left = map(int, done.stdout.split())
    assert grown > 100 * MIB
    assert left < 20 * MIB


def has_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    version = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[-1].split("."))) if has_malloc_trim() else (0, 0)
    return version >= (2, 35) and setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not has_huge_pages(), reason="needs glibc 2.35 and transparent huge pages")
def test_large_tensors_of_a_rank_are_in_huge_pages():
    program = """
import torch
tensor = torch.ones(64 << 18)
rows = open("/proc/self/smaps_rollup").read().splitlines()
print(next(row.split()[1] for row in rows if row.startswith("AnonHugePages")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**MALLOC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) << 10 > 16 * MIB  # 0 without the setting; memory may be fragmented


def test_heap_is_trimmed_after_first_step_and_after_growth():
    resident, trims = [500 * MIB], []

    def trim():
        trims.append(resident[0])
        resident[0] -= 30 * MIB

    heap = HeapTrimmer(trim, lambda: resident[0])
    for now in (500, 400, 463, 464, 490, 498):
        resident[0] = now * MIB
        heap.after_step()
    assert trims == [500 * MIB, 464 * MIB, 498 * MIB]  # at the start, then 64 MiB above 400 and 434 MiB

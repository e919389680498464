"""Freed memory that stays in the process is returned to the kernel when the process has grown."""

import ctypes
import subprocess
import sys

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

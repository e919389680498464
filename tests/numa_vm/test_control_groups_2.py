"""Limits by control groups of version 2, which only the guest has:
other tests only check the files that are written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hardware import control_groups
from hardware.control_groups import V1_ROOTS, find_controller, group_of, limit_cpu
from hardware.memory_limit import MemoryGroup
from hardware.throttled import throttled_paths

pytestmark = pytest.mark.numa_vm

MIB = 1 << 20
# Reads or writes so many bytes past the page cache, in a separate process.
MOVE = """
import mmap, os, sys
path, size, writes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "write"
block = mmap.mmap(-1, 1 << 20)
file = os.open(path, os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY))
for _ in range(size >> 20):
    os.writev(file, [block]) if writes else os.readv(file, [block])
"""


@pytest.fixture(scope="module", autouse=True)
def version_2():
    """Mount version 2 with all controllers if nothing is mounted yet, as in the guest."""
    if not any(V1_ROOTS.iterdir()):
        subprocess.run(["mount", "-t", "cgroup2", "none", str(V1_ROOTS)], check=True)
    if not (V1_ROOTS / "cgroup.controllers").exists() or os.geteuid() != 0:
        pytest.skip("needs root, and control groups of version 2 alone")


def moved(path, size, way):
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", MOVE, str(path), str(size), way], check=True)
    return time.monotonic() - began


def test_kernel_limits_and_counts_reads_and_writes_of_a_path(tmp_path):
    with throttled_paths(tmp_path, [0], size_bytes=64 * MIB) as (path,):
        assert path.controller.version == 2
        path.limit(4 * MIB, 2 * MIB)
        before = path.direct_bytes
        assert moved(path.folder / "data", 8 * MIB, "write") > 3.0  # 4 s, of which the first slice may be free
        assert moved(path.folder / "data", 8 * MIB, "read") > 1.5
        assert path.direct_bytes - before >= 16 * MIB
        path.limit(0)
        (limits,) = [line for line in (path.group / "io.max").read_text().splitlines() if path.number in line] or [""]
        assert "rbps=" not in limits.replace("rbps=max", "")
        group = path.group
    assert not group.exists()


def test_kernel_limits_a_process_to_its_cpu_share():
    controller = find_controller("cpu")
    assert controller.version == 2
    with group_of(controller) as group:
        limit_cpu(controller, group, 0.25)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        began, used = time.monotonic(), time.process_time()
        while time.process_time() - used < 0.5:
            pass
        took = time.monotonic() - began
        counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(counts["nr_throttled"]) > 10
        assert took > 1.5  # 2 s expected
    assert not group.exists()


def test_memory_group_kills_at_its_limit_and_records_peak():
    group = MemoryGroup(64 * MIB)
    try:
        wait = "import sys; sys.stdin.readline(); bytearray(b'x') * int(sys.argv[1])"
        statuses = []
        for size in (16, 256):
            command = [sys.executable, "-c", wait, str(size * MIB)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
            group.take_in(process.pid)
            process.communicate(b"\n")
            statuses.append(process.returncode)
        assert statuses == [0, -9]
        assert 60 * MIB < group.peak_bytes <= 64 * MIB
    finally:
        group.kill()
        group.remove()
    assert not group.folder.exists()


def test_limits_of_several_kinds_are_set_on_one_group(tmp_path):
    with throttled_paths(tmp_path, [0], size_bytes=64 * MIB) as (path,):
        with group_of(find_controller("cpu")) as group:
            assert group == path.group
            assert {"io.max", "cpu.max"} <= {file.name for file in group.iterdir()}
        assert group.exists()
    assert not group.exists()


def test_group_left_by_a_killed_process_is_reused():
    controller = find_controller("io")
    left = controller.root / f"memascend-{os.getpid()}"
    left.mkdir()
    with group_of(controller) as group:
        assert group == left
    assert not left.exists()
    assert Path(control_groups.MINE).read_text().startswith("0::/")

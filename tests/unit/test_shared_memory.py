"""Files of killed processes in shared memory are removed; those that living processes use are not."""

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from memascend.cli import main
from memascend.storage.shared_memory import collect_shared_memory

ENGINE = """
import sys, time
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
config = DirectEngineConfig(volatile=True, control_folder=sys.argv[1])
engine = DirectEngine.create_file_store(sys.argv[2], 1 << 20, "a run", config)
print("made", flush=True)
time.sleep(120)
"""


@pytest.fixture
def folders(tmp_path):
    for name in ("shm", "nvme"):
        (tmp_path / name).mkdir()
    return tmp_path / "shm", tmp_path / "nvme"


@contextmanager
def engine_in_a_process(shared, nvme):
    """Run a process with a store, which ends by SIGKILL."""
    command = [sys.executable, "-c", ENGINE, str(shared), str(nvme)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "made\n"
            yield
        finally:
            child.send_signal(signal.SIGKILL)


def collected(shared):
    """Return what is removed once the kernel has taken down the rings of a
    killed process, which keep its files until then."""
    deadline = time.monotonic() + 60
    while not (removed := collect_shared_memory(shared)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return removed


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def aged(path, size=8192):
    path.write_bytes(bytes(size))
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    return path


def test_a_control_file_is_removed_once_its_process_is_killed(folders):
    shared, nvme = folders
    with engine_in_a_process(shared, nvme):
        [name] = names(shared)
        assert collect_shared_memory(shared) == []
        assert names(shared) == [name]
    [removed] = collected(shared)
    assert removed.path == str(shared / name)
    assert removed.kind == "control file"
    assert removed.bytes >= 2 << 20
    assert names(shared) == []


def test_collection_removes_only_control_files_of_dead_processes(folders):
    from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig

    shared, nvme = folders
    with engine_in_a_process(shared, nvme):
        dead = names(shared)
    config = DirectEngineConfig(volatile=True, control_folder=str(shared))
    with DirectEngine.create_file_store(nvme.parent, 1 << 20, "b", config):
        assert [each.path for each in collected(shared)] == [str(shared / name) for name in dead]
        assert len(names(shared)) == 1
    assert names(shared) == []


def test_old_deepspeed_buffers_are_removed_unless_mapped(folders):
    shared, _ = folders
    buffer, used = (aged(shared / f"deepspeed_allreduce_buffer_0_127.0.0.1_{port}_0") for port in (29500, 29501))
    young = shared / "deepspeed_allreduce_buffer_0_127.0.0.1_29502_0"
    young.write_bytes(bytes(8192))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 8192):
        assert [each.path for each in collect_shared_memory(shared)] == [str(buffer)]
    assert names(shared) == [used.name, young.name]
    assert [each.path for each in collect_shared_memory(shared)] == [str(used)]


def test_files_that_only_resemble_ours_are_kept(folders):
    shared, nvme = folders
    aged(shared / "memascend-notes")
    aged(shared / "psm_1234")
    precious = aged(nvme / "precious")
    (shared / f"memascend-{'0' * 32}").symlink_to(precious)
    (shared / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0").symlink_to(precious)
    before = names(shared)
    assert collect_shared_memory(shared) == []
    assert names(shared) == before
    assert precious.exists()


def test_storage_gc_without_a_device_collects_shared_memory(folders, capsys):
    shared, nvme = folders
    buffer = aged(shared / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0")
    for arguments in ([], [str(nvme)]):
        assert main(["storage", "gc", *arguments, "--control-folder", str(shared)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[-1] == f"{0 if arguments else 1} files of dead processes removed from {shared}"
        assert (f"{buffer}, DeepSpeed's all-reduce buffer: dead, no process maps it" in said[0]) is (not arguments)
    assert names(shared) == []

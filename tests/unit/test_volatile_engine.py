"""Volatile engines and their scratch files; ordering, faults and growth are in tests/native/test_volatile.cpp."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memascend.cli import main
from memascend.storage import scratch
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig, space_for
from memascend.storage.errors import StorageError
from memascend.storage.names import SCRATCH_PREFIX
from memascend.storage.scratch import collect_scratch_files

MAKE = (
    "import sys, torch\nfrom memascend.storage.direct_engine import *\n"
    "config = DirectEngineConfig(control_folder=sys.argv[1])\n"
    "engine = DirectEngine.create_file_store(sys.argv[1], 1 << 22, 'run 7', config)\n"
    "engine.write('w', torch.ones(1 << 20)); engine.wait(); print(engine.paths[0], flush=True)\n"
)


def create(folder, size, **options):
    config = DirectEngineConfig(**{"control_folder": str(folder), "block_bytes": 1 << 16, **options})
    return DirectEngine.create_file_store(folder, size, "tests", config)


def test_file_store_is_sized_exactly_overwritten_in_place_and_removed(tmp_path):
    sizes = [1, 5000, 1 << 20, 4096, 0, 300_001]
    with create(tmp_path, space_for(sizes)) as engine:
        assert engine.space().data_bytes == space_for(sizes)
        (path,) = engine.paths
        assert os.stat(path).st_blocks * 512 >= space_for(sizes)
        for round_ in range(3):
            tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
            for number, tensor in enumerate(tensors):
                engine.write(f"t{number}", tensor, priority=number % 2)
            assert engine.wait() == len(sizes)
            assert engine.space().free_bytes == 0
            assert all(torch.equal(engine.read_new(f"t{number}"), tensor) for number, tensor in enumerate(tensors))
            assert engine.info("t2").generation == round_ + 1
        assert engine.info("t3").checksum is None
    assert list(tmp_path.iterdir()) == []


def test_unaligned_memory_is_accepted_and_bounce_memory_is_bounded(tmp_path):
    memory = torch.arange(900_001, dtype=torch.int32).view(torch.uint8)
    with create(tmp_path, 1 << 23, workers=2, depth=4, block_bytes=1 << 20) as engine:
        buffers = engine.bounce_buffers
        assert [size for _, size in buffers] == 2 * [4 * 4096 + 4 * 65536]
        for skip in (0, 1, 511, 512):
            engine.write("t", memory[skip : skip + 1_000_003])
            out = torch.zeros(1_000_003 + 7, dtype=torch.uint8)[7:]
            engine.wait(engine.read("t", out))  # in order: the write need not be waited for
            assert torch.equal(out, memory[skip : skip + 1_000_003])
        assert engine.statistics.bounced_bytes > 4 * 900_000
        assert engine.bounce_buffers == buffers


def resident_bytes(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) << 10


def test_shared_table_is_resident_only_where_used(tmp_path):
    before = resident_bytes("RssShmem")
    with create(tmp_path, 1 << 22, control_folder="/dev/shm") as engine:
        engine.write("t", torch.ones(1 << 18))
        engine.wait()
        assert resident_bytes("RssShmem") - before < 256 << 10


def test_key_can_be_rewritten_with_another_type_or_size(tmp_path):
    with create(tmp_path, 1 << 16) as engine:
        engine.write("t", torch.ones(16384))
        engine.wait()
        engine.write("t", torch.full((32768,), 2, dtype=torch.bfloat16))
        engine.wait()
        assert engine.read_new("t").dtype == torch.bfloat16
        engine.write("t", torch.zeros(100))
        engine.write("u", torch.zeros(15000))
        assert engine.wait() == 3 - 1
        engine.write_part("u", torch.ones(1024), 4096)
        assert engine.wait() == 1
        assert engine.read_new("u").nonzero().flatten().tolist() == list(range(1024, 2048))
        assert engine.erase("u")
        assert "u" not in engine
        assert [key for key, _ in engine.items()] == ["t"]


def test_file_store_grows(tmp_path):
    with create(tmp_path, 1 << 20) as engine:
        engine.write("a", torch.ones(1 << 18))
        with pytest.raises(StorageError, match="no space left"):
            engine.write("b", torch.ones(1 << 18))
        engine.grow(2 << 20)
        engine.grow(3 << 20, preallocate=False)
        engine.write("b", torch.full((1 << 19,), 2.0))
        assert engine.wait() == 2
        assert engine.space().free_bytes == 0
        assert bool((engine.read_new("a") == 1).all())
        assert bool((engine.read_new("b") == 2).all())


def test_store_beyond_free_space_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(StorageError, match=r"allocation.*that much free.*free space on that file system") as caught:
        create(tmp_path, 1 << 50)
    assert caught.value.expected > caught.value.got
    with pytest.raises(StorageError, match=r"create of .*nowhere.*check the path"):
        create(tmp_path / "nowhere", 1 << 20)
    assert list(tmp_path.iterdir()) == []
    with create(tmp_path, 1 << 20) as engine:
        with pytest.raises(StorageError, match="has not that much free"):
            engine.grow(1 << 50)
        engine.write("a", torch.ones(1 << 18))
        assert engine.wait() == 1


def test_invalid_requests_are_refused(tmp_path):
    with create(tmp_path, 1 << 20) as engine:
        with pytest.raises(RuntimeError, match="a volatile engine persists nothing"):
            engine.commit()
        with pytest.raises(ValueError, match="no such tensor"):
            engine.read("t", torch.ones(1))
        with pytest.raises(ValueError, match="write all of it first"):
            engine.write_part("t", torch.ones(1), 0)


def test_only_leftovers_of_killed_processes_are_collected(tmp_path, capsys):
    with create(tmp_path, 1 << 20) as living:
        living.write("a", torch.ones(1000))
        living.wait()
        (tmp_path / f"{SCRATCH_PREFIX}diary").write_text("not ours" * 2000)
        stays = MAKE + "import time; time.sleep(60)"
        arguments = [sys.executable, "-c", stays, str(tmp_path)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            left = child.stdout.readline().strip()
            # as left by a process that was killed while making it
            (tmp_path / f"{SCRATCH_PREFIX}1-empty").write_bytes(bytes(10_000))
            child.send_signal(signal.SIGSTOP)
            found = collect_scratch_files(tmp_path, str(tmp_path))
            child.send_signal(signal.SIGKILL)
        assert [each.path for each in found] == [str(tmp_path / f"{SCRATCH_PREFIX}1-empty")]
        assert os.path.exists(left)
        assert main(["storage", "gc", str(tmp_path), "--control-folder", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert f"{left} of 'run 7', process {child.pid}: dead, its lock is not held" in out
        assert "1 scratch files removed" in out
        assert bool((living.read_new("a") == 1).all())
    assert [path.name for path in tmp_path.iterdir()] == [f"{SCRATCH_PREFIX}diary"]


def test_next_run_removes_the_file_of_a_killed_one(tmp_path):
    killed = MAKE + "import os; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.path.exists(done.stdout.strip())
    with create(tmp_path, 1 << 20) as engine:
        assert not os.path.exists(done.stdout.strip())
        assert os.path.exists(engine.paths[0])


def test_process_that_exits_without_closing_leaves_no_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", MAKE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_exiting_forked_child_removes_nothing_of_its_parent(tmp_path):
    program = MAKE + (
        "import os\nchild = os.fork()\nif child == 0: sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0\n"
        "assert os.path.exists(engine.paths[0])\nassert bool((engine.read_new('w') == 1).all())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_large_files_use_larger_units_to_limit_their_map():
    assert scratch._unit_bytes(32 << 30) == 4096
    assert scratch._unit_bytes(1 << 40) == 128 << 10
    assert space_for([1, 4096, 0]) == 8192


def test_two_volatile_engines_share_a_store_without_seeing_each_other(tmp_path):
    from tests.unit.test_engine import make_files

    files = make_files(tmp_path, size=8 << 20)
    config = DirectEngineConfig(control_folder=str(tmp_path), volatile=True, stripe_bytes=4096)
    with DirectEngine(files, "tests", config) as one, DirectEngine(files, "tests", config) as two:
        for value, engine in ((1, one), (2, two)):
            for key in range(8):
                engine.write(f"k{key}", torch.full((50_000,), value))
            engine.wait()
        for value, engine in ((1, one), (2, two)):
            assert all(bool((engine.read_new(f"k{key}") == value).all()) for key in range(8))
        places = [extent for engine in (one, two) for _, info in engine.items() for extent in info.extents]
        assert len({place[:2] for place in places}) == len(places)
        assert one.space().reserved_bytes == sum(-(-length // 4096) * 4096 for _, _, length in places)

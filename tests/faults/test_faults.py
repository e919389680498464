"""Faults below the system call, from Python: each is retried successfully, or is a StorageError with all details.

The fault layer is where the engine calls the kernel (csrc/core/fault_layer.h), under either back end. The store's own
reads, writes and flushes of its index pass through it as well.
"""

import errno
import signal
import subprocess
import sys
import time

import pytest
import torch

from memascend import _C
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.errors import StorageError

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(_C.aio_missing(name)), reason=_C.aio_missing(name) or "-"))
    for name in ("io_uring", "libaio")
]
pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.parametrize("volatile", [False, True])]
BLOCK = 1 << 14


@pytest.fixture
def layer():
    return _C.FaultLayer()


@pytest.fixture
def engine(tmp_path, backend, volatile, layer):
    """Yield an engine with a tensor `old`, committed unless the engine is volatile, before the faults begin."""
    path = tmp_path / "device"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    _C.storage_format([str(path)], "tests", [], 4096, 0)
    config = DirectEngineConfig(
        control_folder=str(tmp_path), backend=backend, volatile=volatile, block_bytes=BLOCK, depth=4
    )
    with DirectEngine([path], "tests", config, faults=layer) as engine:
        engine.write("old", numbers(1))
        engine.wait()
        if not volatile:
            engine.commit()
        yield engine
        layer.clear()


def numbers(seed, count=100_001):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def round_trip(engine):
    engine.write("new", numbers(2))
    engine.wait()
    assert torch.equal(engine.read_new("new"), numbers(2))


def test_short_transfers_are_continued(engine, layer):
    layer.add("any", times=9, at_most=512)  # less than a sector of the engine's, so the transfer is repeated
    layer.add("any", times=40, at_most=5000)
    round_trip(engine)
    assert layer.injected == 49
    assert engine.statistics.short_transfers > 0


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_and_refused_calls_are_repeated(engine, layer, code):
    layer.add("write", after=2, times=9, error=code)
    layer.add("read", times=9, error=code)
    round_trip(engine)
    assert layer.injected == 18
    assert engine.statistics.repeated == 18


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_failed_write_reports_operation_path_key_and_byte_counts(engine, layer, volatile, code):
    layer.add("write", after=2, times=1, error=code)
    engine.write("old", numbers(2))
    with pytest.raises(StorageError) as caught:
        engine.wait()
    error = caught.value
    assert (error.op, error.path, error.key, error.errno) == ("write", engine.paths[0], "old", code)
    assert (error.expected, error.got) == (BLOCK, 0)
    assert error.offset >= 1 << 20
    assert error.offset % 4096 == 0
    assert f"at offset {error.offset}: expected {BLOCK} bytes, got 0" in str(error)
    if volatile:  # written in place, so neither the old nor the new tensor survives
        with pytest.raises(StorageError, match="write all of it again"):
            engine.read_new("old")
        engine.write("old", numbers(3))
        engine.wait()
        assert torch.equal(engine.read_new("old"), numbers(3))
    else:
        assert torch.equal(engine.read_new("old"), numbers(1))


def test_failed_read_reports_details_and_the_next_read_succeeds(engine, layer):
    layer.add("read", after=1, times=1, error=errno.EIO)
    with pytest.raises(
        StorageError, match=r"read of 'old' on .*expected 16384 bytes, got 0.*check the device"
    ) as caught:
        engine.read_new("old")
    assert (caught.value.op, caught.value.errno) == ("read", errno.EIO)
    assert torch.equal(engine.read_new("old"), numbers(1))


def test_bytes_moved_before_an_error_are_counted(engine, layer):
    layer.add("write", times=1, at_most=4096)
    layer.add("write", error=errno.EIO)
    engine.write("new", numbers(2, BLOCK))
    with pytest.raises(StorageError) as caught:
        engine.wait()
    assert (caught.value.expected, caught.value.got) == (BLOCK, 4096)


def test_vanished_device_fails_all_requests_without_a_hang(engine, layer):
    layer.add("any", after=3, error=errno.ENODEV)
    for key in "abcd":
        engine.write(key, numbers(4))
    with pytest.raises(StorageError, match=r"the device is gone.*and [23] more failed requests"):
        engine.wait(timeout_s=60)
    with pytest.raises(StorageError, match="the device is gone"):
        engine.read_new("old")


def test_slow_device_is_awaited_and_a_timeout_loses_nothing(engine, layer):
    layer.add("any", times=4, delay_us=100_000)
    request = engine.write("new", numbers(2))
    with pytest.raises(TimeoutError):
        engine.wait(request, timeout_s=0.001)
    begin = time.monotonic()
    assert engine.wait(request, timeout_s=60) == 1
    assert time.monotonic() > begin
    assert torch.equal(engine.read_new("new"), numbers(2))


def test_failed_index_flush_stops_store_and_keeps_committed_tensor(engine, layer, volatile, tmp_path):
    if volatile:
        pytest.skip("a volatile engine writes no index")
    engine.write("old", numbers(2))
    engine.wait()
    layer.add("flush", times=1, error=errno.EIO)
    with pytest.raises(StorageError, match=r"flush of .*Input/output error") as caught:
        engine.commit()
    assert caught.value.op == "flush"
    with pytest.raises(RuntimeError, match="open it again and verify"):
        engine.write("x", numbers(3))
    paths = engine.paths
    engine.close()
    with DirectEngine(paths, "tests", DirectEngineConfig(control_folder=str(tmp_path))) as again:
        assert again.verify() == {}
        assert torch.equal(again.read_new("old"), numbers(1))


@pytest.mark.parametrize("after", [0, 1])  # 0: the flush of the data; 1: that of the index
@pytest.mark.parametrize("commits", [1, 40])  # 40: the log moves to its other half
def test_next_reader_ignores_a_commit_that_failed_to_flush(engine, layer, volatile, tmp_path, after, commits):
    if volatile:
        pytest.skip("a volatile engine writes no index")
    for number in range(commits):
        engine.write("old", numbers(number, 100))
        engine.wait()
        engine.commit()
    engine.write("old", numbers(99))
    engine.wait()
    layer.add("flush", after=after, times=1, error=errno.EIO)
    with pytest.raises(StorageError, match=r"flush of .*Input/output error"):
        engine.commit()
    paths = engine.paths
    engine.close()
    with DirectEngine(paths, "tests", DirectEngineConfig(control_folder=str(tmp_path))) as again:
        assert again.verify() == {}
        assert torch.equal(again.read_new("old"), numbers(commits - 1, 100))


def test_kill_during_a_write_leaves_its_first_part_written(layer, tmp_path, backend, volatile):
    """Checks torn writes and kills at a system call, for the tests that need them (`_C.FaultLayer.add`)."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), backend, str(volatile)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole = bytes(numbers(2, 8192))
    found = (tmp_path / "device").read_bytes()
    assert whole[:1024] in found
    assert whole[:1536] not in found


KILLED = """
import signal, sys, torch
from pathlib import Path
from memascend import _C
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
folder, backend, volatile = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
with (folder / "device").open("wb") as file:
    file.truncate(8 << 20)
_C.storage_format([str(folder / "device")], "tests", [], 4096, 0)
layer = _C.FaultLayer()
config = DirectEngineConfig(control_folder=str(folder), backend=backend, volatile=volatile)
engine = DirectEngine([folder / "device"], "tests", config, faults=layer)
layer.add("write", times=1, at_most=1024, signal=signal.SIGKILL)
values = torch.randint(0, 256, (8192,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
engine.write("new", values)
engine.wait()
"""


def test_short_and_interrupted_index_writes_are_continued(engine, layer, volatile, tmp_path):
    if volatile:
        pytest.skip("a volatile engine writes no index")
    for number in range(200):
        engine.write(f"layer.{number}.weight", numbers(number, 100))
    engine.wait()
    layer.add("write", times=1, error=errno.EINTR)
    layer.add("write", times=1, at_most=4096)
    layer.add("flush", times=1, error=errno.EINTR)
    assert engine.commit() == 200
    assert layer.injected == 3
    paths = engine.paths
    engine.close()
    with DirectEngine(paths, "tests", DirectEngineConfig(control_folder=str(tmp_path))) as again:
        assert len(again.items()) == 201
        assert again.verify() == {}

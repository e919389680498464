"""Transfers past the page cache: the device's alignment of memory, and what happens where O_DIRECT is refused."""

import errno
import logging
import os
import subprocess
import weakref
from pathlib import Path

import pytest
import torch

from memascend import _C
from memascend.storage import engine as shared
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.errors import StorageError
from memascend.storage.file_engine import FileEngine

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(_C.aio_missing(name)), reason=_C.aio_missing(name) or "-"))
    for name in ("io_uring", "libaio")
]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(shared, "_warned_about", set())


@pytest.fixture
def layer():
    return _C.FaultLayer()


def direct_engine(folder, layer=None, **options):
    path = folder / "device"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    _C.storage_format([str(path)], "tests", [], 4096, 0)
    config = DirectEngineConfig(control_folder=str(folder), volatile=True, block_bytes=1 << 16, **options)
    return DirectEngine([path], "tests", config, faults=layer)


def at_512(nbytes):
    """Return memory at a multiple of 512 bytes that is not a multiple of 4096."""
    memory = torch.randint(0, 256, (nbytes + 8192,), dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096 + 512
    return memory[begin : begin + nbytes]


def round_trip(engine, tensor, write, read):
    kept = tensor.clone()
    engine.wait(write("t", tensor))
    tensor.zero_()
    engine.wait(read("t", tensor))
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_misaligned_for_the_device_is_bounced(tmp_path, layer, backend):
    layer.demand_alignment(4096)
    with direct_engine(tmp_path, layer, backend=backend) as engine:
        round_trip(engine, at_512(1 << 20), engine.write, engine.read)
        assert engine.statistics.bounced_bytes == 2 << 20
    layer.demand_alignment(512)
    with direct_engine(tmp_path, layer, backend=backend) as engine:
        round_trip(engine, at_512(1 << 20), engine.write, engine.read)
        assert engine.statistics.bounced_bytes == 0


@pytest.mark.parametrize("reported", [True, False])
def test_file_engine_bounces_even_where_kernel_reports_no_alignment(tmp_path, layer, reported):
    layer.demand_alignment(4096, reported)
    with FileEngine(threads=1, faults=layer) as engine:

        def write(key, tensor):
            return engine.async_write(tensor, tmp_path / key)

        def read(key, tensor):
            return engine.async_read(tensor, tmp_path / key)

        round_trip(engine, at_512(1 << 20), write, read)
        counted = engine.statistics
    assert counted.bounced_bytes == 2 << 20
    assert (counted.buffered_bytes, counted.direct) == (0, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_alignment_is_explained(tmp_path, layer, backend):
    layer.demand_alignment(4096, reported=False)
    with direct_engine(tmp_path, layer, backend=backend) as engine:
        engine.write("t", at_512(1 << 16))
        with pytest.raises(StorageError, match=r"Invalid argument: .*multiples of its logical block size") as caught:
            engine.wait()
    assert caught.value.errno == errno.EINVAL


def test_direct_io_limits_of_this_disk_are_queried(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    direct, alignment = _C.direct_limits(str(path))
    assert direct == shared_direct(tmp_path)
    assert alignment in ((512, 1024, 2048, 4096) if direct else (1,))


def shared_direct(folder):
    return (
        os.statvfs(folder).f_blocks > 0
        and "tmpfs"
        not in subprocess.run(
            ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.fixture
def in_memory():
    """Make a folder in memory, where newer kernels accept O_DIRECT but copy all the same."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    folder = Path("/dev/shm", f"direct-io-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_page_cache_fallback_without_o_direct_warns_once(in_memory, caplog):
    caplog.set_level(logging.WARNING, "memascend")
    for _ in range(2):
        with direct_engine(in_memory) as engine:
            assert not engine.direct
            round_trip(engine, at_512(100_000), engine.write, engine.read)
            counted = engine.statistics
    assert not counted.direct
    assert counted.buffered_bytes == 200_000
    (record,) = caplog.records
    assert str(in_memory / "device") in record.getMessage()
    assert "refuses O_DIRECT: transfers go through the page cache" in record.getMessage()


def test_file_engine_also_warns_once_about_page_cache(in_memory, caplog):
    caplog.set_level(logging.WARNING, "memascend")
    with FileEngine(threads=1) as engine:
        assert engine.direct
        for _ in range(2):
            engine.async_write(at_512(100_000), in_memory / "file")
            engine.wait()
        counted = engine.statistics
    assert (counted.direct, counted.buffered_bytes) == (False, 200_000)
    (record,) = caplog.records
    assert str(in_memory / "file") in record.getMessage()


def test_engine_requiring_o_direct_fails_where_it_is_refused(in_memory):
    with pytest.raises(RuntimeError, match=r"device: its file system refuses O_DIRECT.*ext4 or XFS"):
        direct_engine(in_memory, require_direct=True)
    with FileEngine(threads=1, require_direct=True) as engine:
        engine.async_write(at_512(8192), in_memory / "file")
        with pytest.raises(StorageError, match=r"refuses O_DIRECT, which this engine requires: use a folder on ext4"):
            engine.wait()
        assert engine.statistics.buffered_bytes == 0


def test_only_einval_on_open_is_taken_as_refused_o_direct(tmp_path, layer, caplog):
    caplog.set_level(logging.WARNING, "memascend")
    layer.add("open", times=1, error=errno.EINVAL)
    with direct_engine(tmp_path, layer) as engine:
        assert not engine.direct
        round_trip(engine, at_512(100_000), engine.write, engine.read)
        assert engine.statistics.bounced_bytes < 10_000  # the page cache accepts any alignment
    assert len(caplog.records) == 1
    layer.add("open", times=1, error=errno.EINVAL)
    with pytest.raises(RuntimeError, match="refuses O_DIRECT"):
        direct_engine(tmp_path, layer, require_direct=True)
    layer.add("open", times=1, error=errno.EACCES)
    with pytest.raises(StorageError, match="check the permissions"):
        direct_engine(tmp_path, layer)


def test_overlay_supports_o_direct_if_its_upper_folder_does(tmp_path):
    """Containers have overlays: one over ext4 or XFS supports O_DIRECT."""
    folders = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    options = ",".join(f"{name}dir={folders[name]}" for name in ("lower", "upper", "work"))
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(folders["merged"])]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("an overlay cannot be mounted here")
    try:
        with direct_engine(folders["merged"]) as engine:
            below = _C.direct_limits(str(folders["upper"] / "device"))[0]
            assert engine.direct == below
            round_trip(engine, at_512(100_000), engine.write, engine.read)
            assert (engine.statistics.buffered_bytes == 0) == below
    finally:
        subprocess.run(
            ["umount", "--lazy", str(folders["merged"])], check=True
        )  # a ring keeps its files open a little longer


def test_failed_write_on_full_store_keeps_the_old_tensor(tmp_path):
    config = DirectEngineConfig(control_folder=str(tmp_path))
    with DirectEngine.create_file_store(tmp_path, 1 << 20, "tests", config) as engine:
        engine.write("t", torch.full((1 << 17,), 7.0))
        engine.wait()
        with pytest.raises(StorageError, match="no space left"):
            engine.write("t", torch.zeros(1 << 19))
        assert bool((engine.read_new("t") == 7).all())
        engine.write("t", torch.ones(1 << 18))  # the space of the old tensor is reused
        engine.wait()
        assert bool((engine.read_new("t") == 1).all())


def test_a_registered_buffer_lives_until_it_is_unregistered(tmp_path):
    gone = []
    with direct_engine(tmp_path) as engine:
        memory = torch.zeros(1 << 18)
        weakref.finalize(memory.untyped_storage(), gone.append, True)
        registered = engine.register_buffer(memory)
        assert registered == (engine.backend == "io_uring")
        round_trip(engine, memory[1024:5000].fill_(3), engine.write, engine.read)
        if registered:
            assert engine.unregister_buffer(memory)
        assert not engine.unregister_buffer(memory)
        del memory
        assert gone == [True]
        assert engine.wait() == 0

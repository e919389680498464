"""The file engine from Python: exact bytes, typed errors, and what happens at the start and the end of a process."""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.file_engine import FileEngine, StorageError
from tests import forked


@pytest.fixture
def engine():
    with FileEngine(threads=2, block_bytes=64 * 1024) as made:
        yield made


def random_tensor(numel, dtype=torch.float32):
    return torch.randint(-100, 100, (numel,)).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("numel", [1, 7, 2048, 100_003])
def test_file_has_exactly_the_bytes_and_reads_back(engine, tmp_path, dtype, numel):
    tensor = random_tensor(numel, dtype)
    engine.async_write(tensor, tmp_path / "t")
    assert engine.wait() == 1
    assert (tmp_path / "t").read_bytes() == raw(tensor)
    back = torch.zeros_like(tensor)
    engine.async_read(back, str(tmp_path / "t"))
    assert engine.wait() == 1
    assert torch.equal(back, tensor)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 200_000), st.integers(0, 20_000), st.integers(0, 5000), st.randoms(use_true_random=False))
def test_any_length_offset_and_address_is_transferred_exactly(engine, tmp_path, length, offset, shift, random):
    path = tmp_path / "t"
    before = random.randbytes(offset + length + 10)
    path.write_bytes(before)
    tensor = torch.randint(0, 256, (shift + length,), dtype=torch.uint8)[shift:]
    engine.async_write(tensor, path, offset)
    engine.wait()
    assert path.read_bytes() == before[:offset] + raw(tensor) + before[offset + length :]
    back = torch.zeros(shift + length + 1, dtype=torch.uint8)
    engine.async_read(back[shift : shift + length], path, offset)
    engine.wait()
    assert torch.equal(back[shift : shift + length], tensor)
    assert int(back[:shift].sum()) == int(back[shift + length]) == 0


def test_aligned_pinned_memory_bounces_nothing(engine, tmp_path):
    tensor = PageAlignedPinnedAllocator(lock=False).allocate(1 << 20, torch.uint8, name="x", owner="test")
    tensor.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    kept = tensor.clone()
    engine.async_write(tensor, tmp_path / "t")
    engine.wait()
    tensor.zero_()
    engine.async_read(tensor, tmp_path / "t")
    engine.wait()
    assert torch.equal(tensor, kept)
    counted = engine.statistics
    assert (counted.bytes_read, counted.bytes_written, counted.requests) == (1 << 20, 1 << 20, 2)
    assert counted.bounced_bytes == engine.bounce_buffer_bytes == 0


def test_slice_at_an_unaligned_address_is_read_correctly(engine, tmp_path):
    """A twin's biases have 256 bytes, so the next tensor does not start at a multiple of 512."""
    source = random_tensor(10_000)
    engine.async_write(source, tmp_path / "t")
    engine.wait()
    flat = torch.zeros(20_000)
    engine.async_read(flat[64:10_064], tmp_path / "t")
    engine.wait()
    assert torch.equal(flat[64:10_064], source)
    assert engine.statistics.bounced_bytes > 0


def test_memory_file_system_works(tmp_path):
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no writable /dev/shm")
    path = shm / f"file-engine-test-{os.getpid()}"
    try:
        with FileEngine(threads=1) as engine:
            tensor, back = random_tensor(5001), torch.zeros(5001)
            engine.async_write(tensor, path)
            engine.wait()
            engine.async_read(back, path)
            engine.wait()
        assert torch.equal(tensor, back)
        assert path.stat().st_size == 5001 * 4
    finally:
        path.unlink(missing_ok=True)


def test_wait_counts_completions_since_the_last_one(engine, tmp_path):
    assert engine.wait() == 0
    numbers = [engine.async_write(torch.zeros(10), tmp_path / str(i)) for i in range(5)]
    assert len(set(numbers)) == 5
    assert engine.wait() == 5
    assert engine.wait() == engine.pending == 0


def test_short_file_is_a_typed_error(engine, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 5000)
    engine.async_read(torch.zeros(2500), path)
    with pytest.raises(
        StorageError, match=r"read of .*short failed at offset 0: expected 10000 bytes, got 5000"
    ) as got:
        engine.wait()
    error = got.value
    assert (error.op, error.path, error.offset, error.expected, error.got) == ("read", str(path), 0, 10_000, 5000)
    assert (error.errno, error.reason, error.others) == (None, "end of file", 0)
    assert isinstance(error, OSError)


def test_missing_file_and_folder_are_reported_once(engine, tmp_path):
    engine.async_read(torch.zeros(10), tmp_path / "missing")
    engine.async_write(torch.zeros(10), tmp_path / "no" / "folder")
    engine.async_write(torch.ones(10), tmp_path / "good")
    with pytest.raises(StorageError, match="No such file or directory: check the path") as got:
        engine.wait()
    assert got.value.errno == errno.ENOENT
    assert got.value.others == 1
    assert (tmp_path / "good").read_bytes() == raw(torch.ones(10))
    assert engine.wait() == 0  # the error was reported once; the engine continues to work
    engine.async_write(torch.ones(3), tmp_path / "later")
    assert engine.wait() == 1


def test_full_device_is_a_typed_error(engine):
    engine.async_write(torch.zeros(10_000), "/dev/full")
    with pytest.raises(StorageError, match="free space") as got:
        engine.wait()
    assert (got.value.op, got.value.errno) == ("write", errno.ENOSPC)


def test_exceeded_file_size_limit_names_ulimit(tmp_path):
    code = f"""
import resource, torch
from memascend.storage.file_engine import FileEngine, StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
engine = FileEngine(threads=1)
engine.async_write(torch.zeros(100_000), {str(tmp_path / "t")!r})
try:
    engine.wait()
except StorageError as error:
    print(error.errno, error)
"""
    done = forked.run([sys.executable, "-c", code], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{errno.EFBIG} ")
    assert "ulimit -f" in done.stdout


def test_tensors_that_cannot_be_transferred_are_refused_at_once(engine, tmp_path):
    with pytest.raises(ValueError, match="contiguous"):
        engine.async_read(torch.zeros(4, 4).t(), tmp_path / "t")
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        engine.async_write(torch.zeros(4, device="meta"), tmp_path / "t")
    with pytest.raises(ValueError, match="negative"):
        engine.async_write(torch.zeros(4), tmp_path / "t", -1)
    assert engine.wait() == 0


@pytest.mark.parametrize(("threads", "block", "message"), [(0, 4096, "1 to 256"), (1, 5000, "multiple of 4096")])
def test_invalid_engine_settings_are_refused(threads, block, message):
    with pytest.raises(ValueError, match=message):
        FileEngine(threads, block)


def test_tensors_in_flight_are_kept_alive_until_wait(engine, tmp_path):
    tensor = random_tensor(50_000)
    expected, gone = raw(tensor), []
    weakref.finalize(tensor.untyped_storage(), gone.append, True)
    engine.async_write(tensor, tmp_path / "t")
    del tensor
    gc.collect()
    fresh = [torch.zeros(50_000) for _ in range(5)]  # would get its memory if it were free
    engine.wait()
    assert (tmp_path / "t").read_bytes() == expected
    assert len(fresh) == 5


def test_wait_releases_memory_of_finished_transfers(engine, tmp_path):
    from memascend.memory.ledger import Ledger

    ledger = Ledger()
    tensor = PageAlignedPinnedAllocator(ledger, lock=False).allocate(100, torch.uint8, name="x", owner="t")
    tensor.zero_()
    engine.async_write(tensor, tmp_path / "t")
    del tensor
    while engine.pending:
        time.sleep(0.001)
    assert len(ledger.live()) == 1
    engine.wait()
    assert ledger.live() == []


def test_wait_lets_other_threads_run(tmp_path):
    """A reader of a pipe blocks until another thread opens the other end, which is impossible if it keeps the GIL."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
import os, threading, torch
from memascend.storage.file_engine import FileEngine, StorageError
engine = FileEngine(threads=1)
engine.async_read(torch.zeros(4), {str(pipe)!r})
opened = []
def open_other_end():
    opened.append(True)
    opened.append(os.open({str(pipe)!r}, os.O_RDWR))  # stays open: the engine may open its end twice
threading.Timer(0.2, open_other_end).start()
try:
    engine.wait()
except StorageError:
    print("opened", opened[0])
"""
    done = forked.run([sys.executable, "-c", code], timeout=60)
    assert done.stdout.strip() == "opened True", done.stderr


def test_closed_engine_refuses_and_still_reports(tmp_path):
    engine = FileEngine(threads=1)
    engine.async_write(torch.ones(1000), tmp_path / "t")
    engine.close()
    engine.close()
    assert engine.wait() == 1
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        engine.async_read(torch.zeros(1), tmp_path / "t")


def test_dropping_the_engine_completes_transfers_in_flight(tmp_path):
    engine = FileEngine(threads=1)
    tensors = [random_tensor(200_000) for _ in range(5)]
    for i, tensor in enumerate(tensors):
        engine.async_write(tensor, tmp_path / str(i))
    del engine
    gc.collect()
    for i, tensor in enumerate(tensors):
        assert (tmp_path / str(i)).read_bytes() == raw(tensor)


@pytest.mark.parametrize("hold", ["", "torch.kept = engine"])
def test_submitted_writes_are_finished_at_interpreter_exit(tmp_path, hold):
    code = f"""
import torch
from memascend.storage.file_engine import FileEngine
engine = FileEngine(threads=2)
for i in range(8):
    engine.async_write(torch.full((300_000,), i, dtype=torch.float32), {str(tmp_path)!r} + f"/{{i}}")
{hold}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for i in range(8):
        assert (tmp_path / str(i)).read_bytes() == raw(torch.full((300_000,), i, dtype=torch.float32))


def test_forked_child_gets_an_error_and_does_not_hang(tmp_path):
    code = f"""
import os, torch
from memascend.storage.file_engine import FileEngine
engine = FileEngine(threads=2)
child = os.fork()
if child == 0:
    try:
        engine.async_write(torch.ones(1), {str(tmp_path / "t")!r})
    except RuntimeError as error:
        del engine
        os._exit(0 if "forked child" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
engine.async_write(torch.ones(1), {str(tmp_path / "t")!r})
assert engine.wait() == 1
"""
    done = forked.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0, done.stderr


def test_several_threads_submit_writes(engine, tmp_path):
    tensors = [random_tensor(20_000) for _ in range(4)]

    def work(which):
        for step in range(10):
            engine.async_write(tensors[which], tmp_path / f"{which}-{step}")

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.wait() == 40
    for which in range(4):
        assert (tmp_path / f"{which}-9").read_bytes() == raw(tensors[which])

"""DeepSpeed's swap files in the direct engine: same names, same bytes, and a failed transfer is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memascend.integrations.deepspeed.aio import AioModule, IoCounters
from memascend.integrations.deepspeed.derived import IoSettings
from memascend.integrations.deepspeed.swap_store import SwapStore
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.direct_engine import DirectEngine
from memascend.storage.errors import StorageError

IO = IoSettings(block_bytes=1 << 20, queue_depth=8, workers=2)


@pytest.fixture
def store(tmp_path):
    opened = SwapStore([tmp_path], IO, Ledger())
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "zero_stage_3" / "optimizer" / "rank0"


def handle_on(store):
    return AioModule(PageAlignedPinnedAllocator(), IoCounters(), IO, store).aio_handle()


def tensors(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(997 * (i + 1) ** 3, generator=generator) for i in range(count)]


def test_what_was_written_is_read_at_any_address_and_length(store, folder):
    handle = handle_on(store)
    arena = torch.zeros(sum(t.numel() for t in tensors()) + 64)
    for i, tensor in enumerate(tensors()):
        assert handle.async_pwrite(tensor, str(folder / f"{i}.tensor.swp"), 0) == 0
    assert handle.wait() == len(tensors())
    begin = 3  # 12 bytes off any boundary
    for i, tensor in enumerate(tensors()):
        target = arena.narrow(0, begin, tensor.numel())
        handle.async_pread(target, str(folder / f"{i}.tensor.swp"), 0)
        begin += tensor.numel()
    assert handle.wait() == len(tensors())
    assert torch.equal(arena[3:begin], torch.cat(tensors()))


def test_the_padding_of_a_tensor_may_be_read_though_the_tensor_alone_was_written(store, folder):
    """DeepSpeed 0.16 does; a read of more than that is an error."""
    handle = AioModule(PageAlignedPinnedAllocator(), IoCounters(), IO, store).aio_handle(intra_op_parallelism=2)
    path, tensor = str(folder / "0.tensor.swp"), tensors(1)[0]
    handle.async_pwrite(torch.zeros(1024), path)  # with its padding
    handle.wait()
    handle.async_pwrite(tensor, path)
    handle.wait()
    padded = torch.full((1024,), -1.0)
    handle.async_pread(padded, path)
    assert handle.wait() == 1
    assert torch.equal(padded[: tensor.numel()], tensor)
    with pytest.raises(ValueError, match="give a buffer of the tensor's size"):
        handle.async_pread(torch.zeros(tensor.numel() + 512), path)


def test_the_last_version_is_read_without_a_wait_between(store, folder):
    path, out = str(folder / "w.tensor.swp"), torch.empty(300_000)
    handle, other = handle_on(store), handle_on(store)
    for value in range(5):
        handle.async_pwrite(torch.full((300_000,), float(value)), path, 0)
    other.async_pread(out, path, 0)
    assert other.wait() == 1
    assert handle.wait() == 5
    assert torch.equal(out, torch.full((300_000,), 4.0))


def test_each_handle_waits_for_its_own_requests(store, folder):
    first, second = handle_on(store), handle_on(store)
    first.async_pwrite(torch.ones(1000), str(folder / "a.tensor.swp"), 0)
    assert second.wait() == 0
    assert first.wait() == 1
    assert first.wait() == 0


def test_no_file_for_a_tensor_and_none_left_after_the_end(store, folder, tmp_path):
    handle = handle_on(store)
    handle.sync_pwrite(torch.ones(1000), str(folder / "a.tensor.swp"), 0)
    [path] = store.paths
    assert [str(p) for p in tmp_path.rglob("*") if p.is_file()] == [path]
    store.close()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_two_nvme_paths_have_a_store_each(tmp_path):
    store = SwapStore([tmp_path / "a", tmp_path / "b"], IO, Ledger())
    handle = handle_on(store)
    for folder in "ab":
        handle.sync_pwrite(torch.ones(1000), str(tmp_path / folder / "zero_stage_3" / "w.tensor.swp"), 0)
    assert sorted(Path(path).parents[1].name for path in store.paths) == ["a", "b"]
    store.close()


def test_what_the_engines_hold_is_in_the_ledger_while_they_live(tmp_path):
    ledger = Ledger()
    store = SwapStore([tmp_path], IO, ledger)
    assert not ledger.entries()
    handle = handle_on(store)
    path = str(tmp_path / "zero_stage_3" / "w.tensor.swp")
    odd = torch.arange(750_001, dtype=torch.int32).view(torch.uint8)[1:]  # at an address that O_DIRECT does not take
    handle.sync_pwrite(odd, path, 0)
    [entry] = ledger.live()
    assert (entry.owner, entry.role) == ("nvme_engine_buffers", "host")
    assert entry.reserved_bytes < 1 << 20
    assert [check.agrees for check in verify_by_address([entry])] == [True]
    handle.sync_pread(out := torch.empty_like(odd), path, 0)
    assert torch.equal(out, odd)
    assert ledger.live() == [entry]  # nothing is made on the way
    store.close()
    assert not ledger.live()


def test_any_other_path_is_a_file(store, tmp_path):
    handle, path = handle_on(store), tmp_path / "checkpoint.bin"
    handle.sync_pwrite(torch.arange(1000), str(path), 0)
    assert path.stat().st_size == 8000
    with path.open("r+b") as file:  # DeepNVMe takes descriptors too
        out = torch.empty(1000, dtype=torch.int64)
        handle.sync_pread(out, file.fileno(), 0)
    assert torch.equal(out, torch.arange(1000))
    assert store.paths == []


def test_what_was_never_written_cannot_be_read(store, folder):
    with pytest.raises(ValueError, match=r"never\.tensor\.swp"):
        handle_on(store).async_pread(torch.empty(10), str(folder / "never.tensor.swp"), 0)


def test_one_failed_transfer_fails_the_wait_and_the_rest_is_accounted_for(store, folder):
    handle, out = handle_on(store), [torch.empty(1 << 20), torch.empty(1 << 20)]
    for i in range(2):
        handle.async_pwrite(torch.ones(1 << 20), str(folder / f"{i}.tensor.swp"), 0)
    assert handle.wait() == 2
    [path] = store.paths
    os.truncate(path, 5 << 20)  # the second tensor's end is gone
    for i in range(2):
        handle.async_pread(out[i], str(folder / f"{i}.tensor.swp"), 0)
    with pytest.raises(StorageError, match="read"):
        handle.wait()
    assert handle.wait() == 0


FULL = """
import resource, sys, torch
from test_swap_store import IO, Ledger, SwapStore, StorageError, handle_on
resource.setrlimit(resource.RLIMIT_FSIZE, (96 << 20, 96 << 20))
store = SwapStore([sys.argv[1]], IO, Ledger()) if sys.argv[2] == "direct" else None
handle = handle_on(store)
try:
    for i in range(8):
        path, offset = f"{sys.argv[1]}/zero_stage_3/{i % 2}.swp", i // 2 << 25
        handle.async_pwrite(torch.ones(30 << 20, dtype=torch.uint8), path, offset)
    handle.wait()
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("engine", ["direct", "file"])
def test_a_write_for_which_there_is_no_space_is_an_error(engine, tmp_path):
    (tmp_path / "zero_stage_3").mkdir()
    script = FULL if engine == "file" else FULL.replace("{i % 2}", "{i}").replace("i // 2 << 25", "0")
    preamble = f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    command = [sys.executable, "-c", f"{preamble}; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{script}"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([*command, str(tmp_path), engine], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1
    assert str(tmp_path) in done.stdout
    assert "File too large" in done.stdout


def test_what_forward_and_backward_wait_for_goes_first(store, folder, tmp_path, monkeypatch):
    priorities = {}

    def noting(name, stock):
        def call(self, key, tensor, *rest):
            priorities[name, key.split("zero_stage_3/")[1].split("/")[0]] = rest[-1]
            return stock(self, key, tensor, *rest)

        return call

    monkeypatch.setattr(DirectEngine, "write", noting("write", DirectEngine.write))
    monkeypatch.setattr(DirectEngine, "read", noting("read", DirectEngine.read))
    handle = handle_on(store)
    for path in (
        folder / "1_2.tensor.swp",
        tmp_path / "zero_stage_3" / "float16params" / "rank0" / "3_param.tensor.swp",
    ):
        handle.sync_pwrite(torch.ones(100), str(path), 0)
        handle.sync_pread(torch.ones(100), str(path), 0)
    parameter, state = priorities["read", "float16params"], priorities["read", "optimizer"]
    assert parameter > state > priorities["write", "float16params"] == priorities["write", "optimizer"]


def test_the_handle_reports_what_it_was_asked_for(store):
    handle = AioModule(PageAlignedPinnedAllocator(), IoCounters(), IO, store).aio_handle(2048, 7, True, False, 3)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit()) == (2048, 7, True)
    assert (handle.get_overlap_events(), handle.get_intra_op_parallelism(), handle.get_alignment()) == (False, 3, 1536)

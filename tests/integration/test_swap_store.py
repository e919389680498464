"""DeepSpeed's swap files in the direct engine: same names, same bytes, and a failed transfer is an error."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from memascend.integrations.deepspeed.aio import AioModule, IoCounters
from memascend.integrations.deepspeed.swap_store import OPTIMIZER_READ, PARAMETER_READ, WRITE, SwapStore, owner_name
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.planner.derived_sizes import IoSettings
from memascend.storage.direct_engine import DirectEngine
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError
from memascend.storage.folders import direct_limits
from memascend.storage.native import _C
from tests import forked

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


def test_written_tensors_are_read_at_any_address_and_length(store, folder):
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


def test_reserving_in_a_folder_of_another_engine_does_nothing(store, tmp_path):
    store.reserve(tmp_path / "elsewhere", 1 << 60)
    assert store.paths == []
    with pytest.raises(StorageError):
        store.reserve(tmp_path, 1 << 60)


def test_padded_read_works_though_only_the_tensor_was_written(store, folder):
    """DeepSpeed 0.16 reads it; a longer read is an error."""
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


def test_read_without_waiting_sees_the_latest_write(store, folder):
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


def test_store_has_one_file_and_removes_it_on_close(store, folder, tmp_path):
    handle = handle_on(store)
    handle.sync_pwrite(torch.ones(1000), str(folder / "a.tensor.swp"), 0)
    [path] = store.paths
    assert [str(p) for p in tmp_path.rglob("*") if p.is_file()] == [path]
    store.close()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


class SmallVolume:
    """Replaces ``os.statvfs``: a volume of ``size_bytes`` that has only the files in ``folder``."""

    f_frsize = 4096

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder, self._size = folder, size_bytes

    def __call__(self, _path: str) -> SmallVolume:
        return self

    @property
    def used_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*") if path.is_file())

    @property
    def f_bavail(self) -> int:
        return (self._size - self.used_bytes) // self.f_frsize


def test_small_volume_is_filled_before_a_write_fails(store, folder, tmp_path, monkeypatch):
    volume = SmallVolume(tmp_path, 60 << 20)
    monkeypatch.setattr("memascend.storage.scratch.os.statvfs", volume)
    handle = handle_on(store)
    handle.sync_pwrite(torch.ones(2 << 20, dtype=torch.uint8), str(folder / "0.tensor.swp"))
    assert volume.used_bytes <= 5 << 20
    for i in range(1, 29):  # 58 MiB of tensors
        handle.sync_pwrite(torch.full((2 << 20,), i, dtype=torch.uint8), str(folder / f"{i}.tensor.swp"))
    with pytest.raises(StorageError, match="has not that much free"):
        handle.sync_pwrite(torch.ones(4 << 20, dtype=torch.uint8), str(folder / "29.tensor.swp"))
    handle.sync_pread(out := torch.empty(2 << 20, dtype=torch.uint8), str(folder / "28.tensor.swp"))
    assert bool((out == 28).all())


def test_store_reports_whether_io_is_direct(store, folder, monkeypatch):
    assert store.direct
    handle = handle_on(store)
    handle.sync_pwrite(torch.ones(100), str(folder / "0.tensor.swp"))
    assert store.direct == _C.direct_limits(store.paths[0])[0]
    monkeypatch.setattr(DirectEngine, "direct", False)
    assert not store.direct


def test_swap_file_names_the_program_that_made_it(store, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/finetune.py"])
    monkeypatch.delenv("RANK", raising=False)
    handle = handle_on(store)  # the store is closed with its last handle
    handle.sync_pwrite(torch.ones(100), str(folder / "0.tensor.swp"))
    assert _C.storage_superblock(store.paths[0])["owner"] == owner_name() == "finetune.py"


def test_each_nvme_path_has_its_own_store(tmp_path):
    store = SwapStore([tmp_path / "a", tmp_path / "b"], IO, Ledger())
    handle = handle_on(store)
    for folder in "ab":
        handle.sync_pwrite(torch.ones(1000), str(tmp_path / folder / "zero_stage_3" / "w.tensor.swp"), 0)
    assert sorted(Path(path).parents[1].name for path in store.paths) == ["a", "b"]
    store.close()


def test_engine_buffers_are_in_the_ledger_while_open(tmp_path):
    ledger = Ledger()
    store = SwapStore([tmp_path], IO, ledger)
    assert not ledger.entries()
    handle = handle_on(store)
    path = str(tmp_path / "zero_stage_3" / "w.tensor.swp")
    odd = torch.arange(750_001, dtype=torch.int32).view(torch.uint8)[1:]  # at an address that O_DIRECT does not accept
    handle.sync_pwrite(odd, path, 0)
    [entry] = ledger.live()
    assert (entry.owner, entry.role) == ("nvme_engine_buffers", "host")
    assert entry.reserved_bytes < 1 << 20
    assert [check.agrees for check in verify_by_address([entry])] == [True]
    handle.sync_pread(out := torch.empty_like(odd), path, 0)
    assert torch.equal(out, odd)
    assert ledger.live() == [entry]  # no buffer is made for it
    store.close()
    assert not ledger.live()


def test_other_paths_are_ordinary_files(store, tmp_path):
    handle, path = handle_on(store), tmp_path / "checkpoint.bin"
    handle.sync_pwrite(torch.arange(1000), str(path), 0)
    assert path.stat().st_size == 8000
    with path.open("r+b") as file:  # DeepNVMe takes descriptors too
        out = torch.empty(1000, dtype=torch.int64)
        handle.sync_pread(out, file.fileno(), 0)
    assert torch.equal(out, torch.arange(1000))
    assert store.paths == []


def test_tensor_never_written_cannot_be_read(store, folder):
    with pytest.raises(ValueError, match=r"never\.tensor\.swp"):
        handle_on(store).async_pread(torch.empty(10), str(folder / "never.tensor.swp"), 0)


def test_failed_transfer_fails_the_wait_and_none_stays_pending(store, folder):
    handle, out = handle_on(store), [torch.empty(1 << 20), torch.empty(1 << 20)]
    for i in range(2):
        handle.async_pwrite(torch.ones(1 << 20), str(folder / f"{i}.tensor.swp"), 0)
    assert handle.wait() == 2
    [path] = store.paths
    os.truncate(path, 5 << 20)  # cuts off the second tensor's end
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
def test_write_without_free_space_is_an_error(engine, tmp_path):
    (tmp_path / "zero_stage_3").mkdir()
    script = FULL if engine == "file" else FULL.replace("{i % 2}", "{i}").replace("i // 2 << 25", "0")
    preamble = f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    command = [sys.executable, "-c", f"{preamble}; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{script}"]
    root = Path(__file__).resolve().parents[2]
    done = forked.run([*command, str(tmp_path), engine], cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1
    assert str(tmp_path) in done.stdout
    assert "File too large" in done.stdout


def test_parameter_reads_have_priority_over_other_transfers(store, folder, tmp_path, monkeypatch):
    """The handle sets the priority: the same path has another priority through another handle."""
    priorities = []

    def noting(stock):
        def call(self, key, tensor, *rest):
            priorities.append(rest[-1])
            return stock(self, key, tensor, *rest)

        return call

    monkeypatch.setattr(DirectEngine, "write", noting(DirectEngine.write))
    monkeypatch.setattr(DirectEngine, "read", noting(DirectEngine.read))
    parameters, states = handle_on(store), handle_on(store)
    states.read_priority = OPTIMIZER_READ
    for handle in (parameters, states):
        handle.sync_pwrite(torch.ones(100), str(folder / "optimizer" / "3_param.tensor.swp"), 0)
        handle.sync_pread(torch.ones(100), str(folder / "optimizer" / "3_param.tensor.swp"), 0)
    assert priorities == [WRITE, PARAMETER_READ, WRITE, OPTIMIZER_READ] == [0, 2, 0, 1]


def test_two_file_stores_in_one_folder_do_not_mix(tmp_path):
    """Two trainings of one model: DeepSpeed gives their tensors the same
    paths, and removes the files that it finds there."""
    stores = [SwapStore([tmp_path], IO, Ledger(), kind="file") for _ in range(2)]
    handles = [handle_on(store) for store in stores]
    path = str(tmp_path / "zero_stage_3" / "optimizer" / "rank0" / "0.tensor.swp")
    for value, handle in enumerate(handles):
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        handle.sync_pwrite(torch.full((100_000,), float(value)), path)
    for value, handle in enumerate(handles):
        handle.sync_pread(out := torch.empty(100_000), path)
        assert bool((out == value).all())
    for store in stores:
        store.close()
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == []


@pytest.mark.parametrize("kind", ["direct", "file"])
def test_store_is_removed_with_its_last_user(kind, tmp_path):
    store = SwapStore([tmp_path], IO, Ledger(), kind=kind)
    states, parameters = handle_on(store), handle_on(store)
    paths = [str(tmp_path / "zero_stage_3" / name) for name in ("states.swp", "parameters.swp")]
    states.sync_pwrite(torch.ones(5000), paths[0])
    parameters.sync_pwrite(torch.ones(5000), paths[1])
    states.close()
    states.close()
    assert store.used_bytes == 20480
    with pytest.raises(ValueError, match="no such tensor"):
        parameters.async_pread(torch.empty(5000), paths[0])
    parameters.end_training()
    parameters.sync_pread(out := torch.empty(5000), paths[1])  # a model can be saved after its training
    assert bool((out == 1).all())
    other = handle_on(store)
    store.retire()  # the training of the other handle continues
    other.sync_pwrite(torch.ones(5000), paths[0])
    assert store.paths != []
    other.end_training()
    assert store.paths == []
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == []


def test_store_is_removed_when_its_users_are_collected(tmp_path):
    store = SwapStore([tmp_path], IO, Ledger())
    handle = handle_on(store)
    handle.sync_pwrite(torch.ones(5000), str(tmp_path / "zero_stage_3" / "w.swp"))
    [path] = store.paths
    del handle
    gc.collect()
    assert any(not os.path.exists(path) for _ in range(10**6))  # another thread removes it


@pytest.mark.parametrize(
    ("asked", "alignment"), [((True, 512), 512), ((True, 4096), 4096), ((True, 4), 512), ((False, 1), 512)]
)
def test_buffers_are_aligned_as_the_device_demands(store, tmp_path, monkeypatch, asked, alignment):
    assert handle_on(store).memory_alignment_bytes == max(512, *direct_limits(tmp_path)[1:])
    monkeypatch.setattr(_C, "direct_limits", lambda path: asked)
    assert handle_on(store).memory_alignment_bytes == alignment
    assert handle_on(None).memory_alignment_bytes == 512
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class AsyncPartitionedParameterSwapper:
    """Our handle recognises swap buffers by the DeepSpeed function that allocates them."""

    @staticmethod
    def reserve_partitioned_swap_space(handle, numel):
        return handle.new_cpu_locked_tensor(numel, torch.empty(0))


swap_out_buffer = AsyncPartitionedParameterSwapper.reserve_partitioned_swap_space


@pytest.fixture
def registers(tmp_path):
    """Skip the test if the kernel, or the limit on locked memory, does not let a ring pin a buffer."""
    with DirectTier.in_file(tmp_path, "probe") as tier:
        if not tier.register(torch.empty(1 << 20, dtype=torch.uint8)):
            pytest.skip("buffers cannot be registered here")


@pytest.mark.usefixtures("registers")
def test_swap_buffers_stay_registered_until_freed_or_training_ends(store, folder):
    handle, other = handle_on(store), handle_on(store)
    early = swap_out_buffer(handle, 100_000)
    handle.new_cpu_locked_tensor(1000, torch.empty(0))  # for any other caller, which may drop it at any time
    assert store.registered_bytes == 0  # no tier is open
    handle.sync_pwrite(early, str(folder / "0.tensor.swp"))
    assert store.registered_bytes == 400_000
    late = swap_out_buffer(other, 1000)
    assert store.registered_bytes == 404_000
    assert other.free_cpu_locked_tensor(early)  # every handle knows all buffers
    assert other.free_cpu_locked_tensor(early)
    assert store.registered_bytes == late.nbytes
    other.end_training()
    assert store.registered_bytes == 0
    swap_out_buffer(handle, 1000)
    handle.close()
    assert store.registered_bytes == 0


@pytest.mark.usefixtures("registers")
def test_buffer_at_a_freed_address_is_registered_anew(store, folder):
    """A ring that still had the old pages registered would read into them."""
    handle, paths = handle_on(store), [str(folder / f"{value}.tensor.swp") for value in range(20)]
    addresses = set()
    for value, path in enumerate(paths):
        buffer = swap_out_buffer(handle, 100_000)
        addresses.add(buffer.data_ptr())
        handle.sync_pwrite(buffer.fill_(value), path)
        handle.sync_pread(buffer.zero_(), path)
        assert bool((buffer == value).all())
        assert store.registered_bytes == buffer.nbytes
        handle.free_cpu_locked_tensor(buffer)
        del buffer
    assert len(addresses) < len(paths)


@pytest.mark.usefixtures("registers")
def test_reopened_tier_registers_buffers_again(store, folder):
    handle = handle_on(store)
    buffer = swap_out_buffer(handle, 1000)
    for _ in range(2):
        handle.sync_pwrite(buffer, str(folder / "0.tensor.swp"))
        assert store.registered_bytes == buffer.nbytes
        store.close()
        assert store.registered_bytes == 0


def test_tier_that_cannot_register_buffers_still_transfers(store, folder, monkeypatch):
    monkeypatch.setattr(DirectTier, "register", lambda self, tensor: False)
    handle = handle_on(store)
    buffer = swap_out_buffer(handle, 1000)
    handle.sync_pwrite(buffer.fill_(3), str(folder / "0.tensor.swp"))
    handle.sync_pread(out := torch.empty(1000), str(folder / "0.tensor.swp"))
    assert bool((out == 3).all())
    assert store.registered_bytes == 0
    assert handle.free_cpu_locked_tensor(buffer)


def test_handle_reports_its_requested_settings(store):
    handle = AioModule(PageAlignedPinnedAllocator(), IoCounters(), IO, store).aio_handle(2048, 7, True, False, 3)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit()) == (2048, 7, True)
    assert (handle.get_overlap_events(), handle.get_intra_op_parallelism(), handle.get_alignment()) == (False, 3, 1536)

"""Files of states are readable by their owner only, and Ctrl-C ends a wait for a drive that hangs."""

import errno
import os
import resource
import signal
import stat
import threading
import time

import pytest
import torch

from memascend import _C
from memascend.engine import state_files, state_store
from memascend.engine.streaming import streaming
from memascend.integrations.deepspeed import swapped_states
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.engine_tiers import FileTier
from memascend.storage.errors import StorageError
from memascend.storage.file_engine import FileEngine
from memascend.storage.tensor_file import TensorFileWriter, TensorLayout
from memascend.training import checkpoint
from tests.unit.test_streaming_engine import SETTINGS, batches, model


def modes(folder):
    return {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink()
    }


def test_states_of_streamed_model_are_readable_only_by_owner(tmp_path):
    before = os.umask(0o022)
    try:
        session = streaming(tmp_path / "run", allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
        ours = model()
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, wait=True, **SETTINGS)
        (ids,) = batches(1)
        ours(ids).backward()
        found = modes(tmp_path / "run")
        optimizer.step()
        found |= modes(tmp_path / "run")
        session.close()
    finally:
        os.umask(before)
    assert found
    assert not {name: oct(mode) for name, mode in found.items() if mode & 0o077}


def test_link_in_place_of_state_file_is_not_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("keep me")
    folder.mkdir()
    (folder / "states.memascend").symlink_to(victim)
    session = streaming(folder)
    session.hook(model())
    with pytest.raises(ValueError, match="is not empty"):
        session.optimizer(torch.optim.AdamW)
    assert victim.read_text() == "keep me"


def test_swap_files_are_readable_only_by_their_owner(tmp_path):
    tier = FileTier(tmp_path, "test")
    tier.write("a", torch.ones(4096)).wait()
    found = {name: mode for name, mode in modes(tmp_path).items() if name != "."}
    tier.close()
    assert found
    assert not {name: oct(mode) for name, mode in found.items() if mode & 0o077}


@pytest.mark.parametrize("limit_s", [None, 30.0], ids=["without a limit", "with a limit"])
def test_ctrl_c_ends_a_wait_for_a_path_that_hangs(tmp_path, limit_s):
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    engine = FileEngine()
    # the open ends when the other end is opened for writing
    request = engine.async_read(torch.empty(4096, dtype=torch.uint8), fifo)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.wait(request, limit_s)
    assert time.monotonic() - began < 20
    writer = os.open(fifo, os.O_RDWR)  # from here on every open for reading ends
    with pytest.raises(OSError, match="hangs"):  # it is not a regular file
        engine.wait(request)
    engine.close()
    os.close(writer)


def test_symbolic_link_in_place_of_tensor_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        TensorFileWriter(tmp_path / "file", [TensorLayout("a", torch.float32, (4,))])
    with pytest.raises(OSError, match="symbolic links"):
        swapped_states._write_file(tmp_path / "file", torch.zeros(4))
    assert victim.read_text() == "keep me"
    swapped_states._write_file(tmp_path / "states", torch.zeros(4))
    assert stat.S_IMODE((tmp_path / "states").stat().st_mode) == 0o600


def test_native_engine_does_not_write_through_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (tmp_path / "file").symlink_to(victim)
    with FileEngine() as engine:
        engine.async_write(torch.zeros(1024), tmp_path / "file")
        with pytest.raises(StorageError, match="symbolic links"):
            engine.wait()
    assert victim.read_text() == "keep me"


def test_checkpoint_state_folder_is_private_to_its_owner(tmp_path):
    partial = checkpoint.begin(tmp_path / "checkpoints", 3)
    assert stat.S_IMODE((partial / "state").stat().st_mode) == 0o700


@pytest.mark.parametrize("was_there", [False, True])
def test_failed_allocation_of_states_leaves_folder_as_it_was(tmp_path, monkeypatch, was_there):
    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def full(*_):
        raise StorageError("allocation", "states", 0, 1, 0, errno.ENOSPC, "no space left")

    folder = tmp_path / "run"
    if was_there:
        folder.mkdir()
    monkeypatch.setattr(os, "posix_fallocate", refused)
    store = state_store.StateStore.create(folder, "t", state_files.StoreSpace([1 << 20]))
    path = next(folder.glob("states*"))
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # all space is allocated, also where it has to be written
    store.close()
    state_store.remove(folder, keep_folder=was_there)
    monkeypatch.setattr(state_files, "_fill_with_zeros", full)
    with pytest.raises(StorageError, match="no space left"):
        state_store.StateStore.create(folder, "t", state_files.StoreSpace([1 << 20]))
    assert folder.exists() == was_there


def test_engine_without_room_for_its_shared_file_leaves_nothing(tmp_path):
    path = tmp_path / "device"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    _C.storage_format([str(path)], "tests", [], 4096, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="share of"):
            DirectEngine([path], "tests", DirectEngineConfig(control_folder=str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each.name for each in tmp_path.iterdir()] == ["device"]

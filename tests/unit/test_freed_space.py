"""A store on a nearly full disk gets the space of one that was removed just before, which the kernel frees late."""

import time
from types import SimpleNamespace

import pytest
import torch

from memascend.engine.state_files import StoreSpace
from memascend.engine.state_store import StateStore
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage import freed_space
from memascend.storage.errors import StorageError
from tests.loop_devices import small_file_system

SIZES = [4 << 20] * 4


def trained_and_removed(folder):
    """Use and remove a store whose file is open in io_uring, with pinned memory."""
    store = StateStore.create(folder, "tests", StoreSpace(SIZES, versions=1))
    allocator = PageAlignedPinnedAllocator(lock=False)
    tensors = [allocator.allocate(1 << 20, torch.float32, name=str(key), owner="tests") for key in range(len(SIZES))]
    for tensor in tensors:
        store.register(tensor)
    for written in [store.write(key, tensor) for key, tensor in enumerate(tensors)]:
        written.wait()
    store.commit({})
    store.destroy()


def test_new_store_waits_for_space_of_a_removed_one(tmp_path):
    size = StoreSpace(SIZES, versions=1).nbytes
    with small_file_system(tmp_path / "small", size + (12 << 20)) as small:
        for _ in range(3):
            trained_and_removed(small / "states")


def test_no_wait_for_space_where_waiting_would_not_help(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(freed_space, "time", clock)
    with small_file_system(tmp_path / "small", 16 << 20) as small:
        (small / "file").write_bytes(bytes(1 << 20))
        freed_space.unlink(small / "file")
        freed_space.unlink(small / "file")  # the file is already gone
        with pytest.raises(StorageError, match="one version of all states and its auxiliary data do not fit"):
            StateStore.create(small / "states", "tests", StoreSpace(SIZES, versions=1))
        assert freed_space.free_bytes(small, 1 << 20) > 1 << 20


def test_space_freed_on_an_unmounted_file_system_is_not_awaited(tmp_path, monkeypatch):
    """The next file system may get the same device number."""
    with small_file_system(tmp_path / "one", 16 << 20) as one:
        (one / "file").write_bytes(bytes(8 << 20))
        freed_space.unlink(one / "file")
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(freed_space, "time", clock)
    with small_file_system(tmp_path / "two", 16 << 20) as two:
        free = freed_space.free_bytes(two, 0)
        assert freed_space.free_bytes(two, free + (4 << 20)) == free


def test_wait_for_space_that_stays_in_use_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(freed_space, "_MOST_S", 0.2)
    with small_file_system(tmp_path / "small", 16 << 20) as small:
        file = (small / "file").open("wb")
        file.write(bytes(8 << 20))
        file.flush()
        free = freed_space.free_bytes(small, 0)
        freed_space.unlink(small / "file")
        begin = time.monotonic()
        assert freed_space.free_bytes(small, free + (4 << 20)) == free
        assert 0.15 < time.monotonic() - begin < 5
        file.close()
        assert freed_space.free_bytes(small, free + (4 << 20)) > free


@pytest.mark.parametrize("tensors", [1023, 1024, 1025, 2001])
def test_a_store_of_any_number_of_tensors_can_be_made(tmp_path, tensors):
    """From 1,024 tensors on the log grows with each tensor, but a store takes only whole sectors."""
    store = StateStore.create(tmp_path / "states", "model", StoreSpace([4096] * tensors, versions=1))
    value, again = torch.arange(1024, dtype=torch.float32), torch.empty(1024)
    store.write("last", value).wait()
    store.commit({"step": 1})
    store.read("last", again).wait()
    assert torch.equal(again, value)
    store.close()

"""The streaming engine on a disk that fails: one clear error, the step taken back, nothing left behind."""

import errno
import os
import threading

import pytest
import torch

from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.errors import StorageError
from memascend.storage.native import _C
from tests.unit.test_streaming_engine import assert_equal, batches, groups, model, train, train_in_memory


def streamed(of, folder, faults, **options):
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    options = EngineOptions(**{"checkpoints": "device", **options})
    return StreamingEngine.start(of, folder / "home", groups(of), options, allocator=allocator, faults=faults)


def step(of, engine, ids):
    of(ids).backward()
    engine.finish_step()


@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
@pytest.mark.parametrize(("operation", "code"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_transfer_that_fails_is_one_error_and_the_step_is_taken_back(tmp_path, arm, operation, code, after):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults, arm=arm)
    losses = train(ours, engine, data[:1])
    faults.add(operation, after=after, times=1, error=code)
    with pytest.raises(StorageError) as failed:
        step(ours, engine, data[1])
    assert (failed.value.errno, failed.value.op) == (code, operation)
    assert failed.value.key  # which tensor it was
    faults.clear()
    losses += train(ours, engine, data[1:])  # as if nothing had happened
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    assert os.listdir(tmp_path) == []
    assert "memascend-updates" not in {thread.name for thread in threading.enumerate()}


def test_a_disk_that_fails_for_good_leaves_an_error_and_a_home_that_can_be_resumed(tmp_path):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults)
    losses = train(ours, engine, data[:1])
    faults.add("any", error=errno.EIO)
    with pytest.raises(StorageError):
        step(ours, engine, data[1])
    engine.close()
    again = model(seed=4)
    engine, _ = StreamingEngine.resume(again, tmp_path / "home", groups(again))
    losses += train(again, engine, data[1:])
    assert losses == train_in_memory(theirs, data)
    engine.close()


def test_a_disk_that_fails_while_the_model_moves_in_leaves_the_model_and_no_files(tmp_path):
    ours, faults = model(), _C.FaultLayer()
    before = [parameter.clone() for parameter in ours.parameters()]
    faults.add("write", after=2, error=errno.EIO)
    with pytest.raises(StorageError):
        streamed(ours, tmp_path, faults)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before, strict=True))
    ours(batches(1)[0]).backward()  # and it has its own forward again
    assert all(parameter.grad is not None for parameter in ours.parameters())
    assert os.listdir(tmp_path) == []

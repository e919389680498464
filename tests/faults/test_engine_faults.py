"""The streaming engine on a disk that fails: one clear error, the step is rolled back, and nothing is left behind."""

import errno
import os
import threading
import time

import pytest
import torch

from memascend.engine import runtime
from memascend.engine.errors import CommittedAfterAll
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError
from memascend.storage.native import _C
from tests.unit.test_streaming_engine import assert_equal, batches, groups, model, train, train_in_memory


def streamed(of, folder, faults, **options):
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    options = EngineOptions(**{"checkpoints": "device", **options})
    return StreamingEngine.start(of, folder / "session", groups(of), options, allocator=allocator, faults=faults)


def step(of, engine, ids):
    of(ids).backward()
    engine.finish_step()


@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
@pytest.mark.parametrize(("operation", "code"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_failed_transfer_raises_one_error_and_rolls_step_back(tmp_path, arm, operation, code, after):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults, arm=arm)
    losses = train(ours, engine, data[:1])
    faults.add(operation, after=after, times=1, error=code)
    with pytest.raises(StorageError) as failed:
        step(ours, engine, data[1])
    assert (failed.value.errno, failed.value.op) == (code, operation)
    assert failed.value.key  # the tensor's name
    faults.clear()
    losses += train(ours, engine, data[1:])  # as if nothing had happened
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    assert os.listdir(tmp_path) == []
    assert "memascend-updates" not in {thread.name for thread in threading.enumerate()}


def test_permanent_disk_failure_leaves_a_resumable_store(tmp_path):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults)
    losses = train(ours, engine, data[:1])
    faults.add("any", error=errno.EIO)
    with pytest.raises(StorageError):
        step(ours, engine, data[1])
    engine.close()
    again = model(seed=4)
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again))
    losses += train(again, engine, data[1:])
    assert losses == train_in_memory(theirs, data)
    engine.close()


def test_disk_failure_at_start_restores_model_and_leaves_no_files(tmp_path):
    ours, faults = model(), _C.FaultLayer()
    before = [parameter.clone() for parameter in ours.parameters()]
    faults.add("write", after=2, error=errno.EIO)
    with pytest.raises(StorageError):
        streamed(ours, tmp_path, faults)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before, strict=True))
    ours(batches(1)[0]).backward()  # the module has its own forward again
    assert all(parameter.grad is not None for parameter in ours.parameters())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", range(4))
def test_step_with_failed_commit_flush_can_be_repeated_exactly(tmp_path, after):
    """The first flush of a commit is that of the states, the second that of
    the index, which makes them the current ones."""
    data, ours, theirs, faults = batches(4), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults)
    losses = train(ours, engine, data[:1])
    faults.add("flush", after=after, times=1, error=errno.EIO)
    failed = []
    while len(losses) < len(data):
        try:
            losses += train(ours, engine, data[len(losses) :][:1])
        except StorageError as error:
            failed.append(error.op)
    assert failed == ["flush"]
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_resume_completes_uncommitted_update_of_only_version_once(tmp_path, last):
    """The last two flushes of a step are those of its own commit: all units have been updated by then."""
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults, versions=1)
    before = faults.calls("flush")
    losses = train(ours, engine, data[:1])
    faults.add("flush", after=faults.calls("flush") - before - last, times=1, error=errno.EIO)
    with pytest.raises(StorageError) as failed:
        step(ours, engine, data[1])
    assert "close the engine, and resume, which" in failed.value.__notes__[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="close the engine, and resume, which"):
            ours(data[1])
    with pytest.raises(RuntimeError, match="close the engine, and resume, which"):
        engine.finish_step()
    engine.close()
    again = model(seed=4)
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again))
    assert engine.steps["head.weight"] == 2
    losses += train(again, engine, data[2:])
    expected = train_in_memory(theirs, data)
    assert losses == [expected[0], expected[2]]
    assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("where", ["synchronize", "store"])
def test_close_interrupted_by_ctrl_c_still_finishes(tmp_path, monkeypatch, where):
    ours = model()
    engine = streamed(ours, tmp_path, _C.FaultLayer())
    train(ours, engine, batches(2))
    before, pressed = len(os.listdir("/proc/self/fd")), []

    def interrupted(*arguments):
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        return stock(*arguments)

    holder, name = (runtime, "synchronize") if where == "synchronize" else (engine.state_store, "close")
    stock = getattr(holder, name)
    monkeypatch.setattr(holder, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    del engine
    assert "memascend-updates" not in {thread.name for thread in threading.enumerate()}
    assert len(os.listdir("/proc/self/fd")) < before
    assert os.listdir(tmp_path / "session") == ["states"]


def test_commit_kept_despite_flush_error_continues_only_by_resume(tmp_path, monkeypatch):
    data, ours, theirs = batches(3), model(), model()
    engine = streamed(ours, tmp_path, _C.FaultLayer())
    losses = train(ours, engine, data[:1])
    stock = DirectTier.commit

    def kept_all_the_same(tier):
        stock(tier)
        raise StorageError("flush", "states", 0, 0, 0, errno.EIO, "Input/output error")

    with monkeypatch.context() as during:
        during.setattr(DirectTier, "commit", kept_all_the_same)
        with pytest.raises(StorageError) as failed:
            step(ours, engine, data[1])
    assert "close the engine and resume, which continues from it" in failed.value.__notes__[0]
    with pytest.raises(CommittedAfterAll, match="close the engine and resume, which continues from it"):
        ours(data[1])
    engine.close()
    again = model(seed=4)
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again))
    assert engine.steps["head.weight"] == 2
    losses += train(again, engine, data[2:])
    expected = train_in_memory(theirs, data)
    assert losses == [expected[0], expected[2]]
    engine.close()


def test_completed_step_succeeds_even_if_states_fail_to_reopen(tmp_path):
    """After the first step of a resumed training everything has been compared with its
    checksums, so the states are opened anew without that comparison."""
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, _C.FaultLayer())
    losses = train(ours, engine, data[:1])
    engine.close()
    again = model(seed=4)
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again), allocator=allocator, faults=faults)
    faults.add("open", times=2, error=errno.ENOSPC)
    losses += train(again, engine, data[1:2])
    with pytest.raises(StorageError, match="free space"):  # raised before anything of the next step
        again(data[2])
    losses += train(again, engine, data[2:])
    assert faults.injected == 2
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("times", [2, 3, 5])
def test_several_failed_writes_raise_one_error_and_next_step_succeeds(tmp_path, times):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults)
    losses = train(ours, engine, data[:1])
    faults.add("write", after=1, times=times, error=errno.EIO)
    with pytest.raises(StorageError, match="check the device"):
        step(ours, engine, data[1])
    faults.clear()
    losses += train(ours, engine, data[1:])
    assert losses == train_in_memory(theirs, data)
    engine.close()


@pytest.mark.parametrize("versions", [2, 1])
@pytest.mark.parametrize("operation", ["write", "flush"])
def test_disk_failing_during_rollback_serves_again_once_healthy(tmp_path, operation, versions):
    data, ours, theirs, faults = batches(3), model(), model(), _C.FaultLayer()
    engine = streamed(ours, tmp_path, faults, versions=versions)
    losses = train(ours, engine, data[:1])
    faults.add(operation, error=errno.EIO)
    with pytest.raises(StorageError):
        step(ours, engine, data[1])
    with pytest.raises((StorageError, RuntimeError), match=r"check the device|close the engine, and resume"):
        step(ours, engine, data[1])
    faults.clear()
    if versions == 1:  # a step that has to be repeated from its gradients
        engine.close()
        ours = model(seed=4)
        engine, _ = StreamingEngine.resume(ours, tmp_path / "session", groups(ours), EngineOptions(versions=1))
    losses += train(ours, engine, data[engine.steps["head.weight"] :])
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    assert os.listdir(tmp_path) == []


def test_concurrent_threads_create_the_auxiliary_file_once(tmp_path, monkeypatch):
    """A second one would stay open, with its threads, when the engine is closed."""
    engine, stock, made = streamed(model(), tmp_path, _C.FaultLayer()), DirectTier.in_file, []

    def slowly(*arguments):
        time.sleep(0.1)
        made.append(stock(*arguments))
        return made[-1]

    monkeypatch.setattr(DirectTier, "in_file", slowly)
    asking = [
        threading.Thread(target=ask) for ask in (engine._auxiliary.scratch, engine._auxiliary.gradient_stream) * 2
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(made) == 1
    engine.close(destroy=True)
    assert os.listdir(tmp_path) == []

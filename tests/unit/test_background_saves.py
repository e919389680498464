"""A save in the background has the bits of the step after which it began, whatever is overwritten meanwhile."""

import copy
import errno
import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from memascend.engine import buffers
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.saving import WEIGHTS, Target
from memascend.engine.snapshot import Snapshot
from memascend.engine.state_store import StateStore
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.completion import RequestCancelled
from memascend.storage.errors import StorageError
from memascend.storage.tensor_file import TensorLayout
from memascend.storage.tensor_parts import TensorPartsWriter
from tests.unit import test_partial_training as partial
from tests.unit import test_sliced_matrices as sliced
from tests.unit.test_in_place_update import assert_same, batch, begin, contents, model, resume, train
from tests.unit.test_speculated_clipping import Loop, model_of


class Saved:
    """A save in progress of an engine's weights and states, and their expected values."""

    def __init__(self, engine, folder):
        folder.mkdir()
        self.weights, self.states, _ = contents(engine)
        self.folder, self.ends = folder, []
        weights = [TensorLayout(name, each.dtype, tuple(each.shape)) for name, each in self.weights.items()]
        states = {f"{name}.{state}": each for name, of in self.states.items() for state, each in of.items()}
        layouts = [TensorLayout(name, each.dtype, tuple(each.shape)) for name, each in states.items()]
        self.expected = {"weights": self.weights, "states": states}
        self.files = [
            TensorPartsWriter(folder / "weights", weights),
            TensorPartsWriter(folder / "states", layouts, aligned=True),
        ]
        targets = {(name, WEIGHTS): [Target(self.files[0], name)] for name in self.weights}
        for name, of in self.states.items():
            targets |= {(name, state): [Target(self.files[1], f"{name}.{state}")] for state in of}
        try:
            self.save = engine.save(targets, self.end, self.give_up)
        except BaseException as error:
            self.give_up(error)
            raise

    def end(self):
        for file in self.files:
            file.close()
        self.ends.append("whole")
        return self.folder

    def give_up(self, error):
        for file in self.files:
            file.abandon()
        self.ends.append("given up")
        return error

    def assert_whole(self):
        assert self.save.wait() == self.folder
        assert self.ends == ["whole"]
        for name, expected in self.expected.items():
            found = load_file(self.folder / name)
            assert {each for each in found if not each.endswith(".padding")} == expected.keys()
            for each, values in expected.items():
                assert torch.equal(found[each], values), each


@pytest.fixture
def lazy(monkeypatch):
    """Make a save copy only what an update waits for, until the yielded event is set."""
    go_on, following = threading.Event(), Snapshot.next

    def wanted(self, in_progress=None):
        with self._changed:
            while not go_on.is_set() and self._pending and not (set(self._wanted) & set(self._pending)):
                self._changed.wait(0.005)
        return following(self, in_progress)

    monkeypatch.setattr(Snapshot, "next", wanted)
    yield go_on
    go_on.set()


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(buffers, "SAVED_BYTES", 4096)


WAYS = {
    "two versions": {"versions": 2},
    "one version": {"versions": 1},
    "one version without a redo": {"versions": 1, "redo": False},
    "states of bf16": {"versions": 2, "states": torch.bfloat16},
    "states of bf16, one version": {"versions": 1, "states": torch.bfloat16},
    "8-bit states": {"versions": 2, "states": torch.int8},
    "8-bit states, one version": {"versions": 1, "states": torch.int8},
    "clipped after backward": {"versions": 2, "clip": 0.1},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_save_holds_its_step_and_does_not_change_training(tmp_path, lazy, small_buffer, options):
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    engine, other = begin(ours, tmp_path / "ours", **options), begin(theirs, tmp_path / "theirs", **options)
    train(ours, engine, range(2))
    saved = Saved(engine, tmp_path / "save")
    train(ours, engine, range(2, 4))
    assert saved.save.waited_s > 0  # it waited for data that were copied just before they were overwritten
    lazy.set()
    saved.assert_whole()
    train(theirs, other, range(4))
    assert_same(contents(engine), contents(other))
    engine.close()
    other.close()


def test_fp32_weights_that_are_their_own_masters_are_saved(tmp_path, lazy):
    ours = model()
    engine = begin(ours, tmp_path / "session", versions=2)
    train(ours, engine, range(2))
    saved = Saved(engine, tmp_path / "save")
    train(ours, engine, range(2, 4))
    lazy.set()
    saved.assert_whole()
    engine.close()


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_steps_rolled_back_and_redone_leave_a_save_whole(tmp_path, lazy, small_buffer, states):
    loops = [Loop(tmp_path / name, model_of(False), states=states).seed() for name in ("ours", "theirs")]
    ours, theirs = loops
    for number in range(8):
        ours.step(number == 3)
        theirs.step(number == 3)
    before = ours.engine.speculation.done_again
    saved = Saved(ours.engine, tmp_path / "save")
    for loop in loops:
        loop.step(loud=True)
        loop.step()
    assert ours.engine.speculation.done_again > before
    lazy.set()
    saved.assert_whole()
    assert ours.made == theirs.made
    for loop in loops:
        loop.engine.close()


@pytest.mark.parametrize("versions", [1, 2])
def test_abandoned_step_leaves_a_save_whole(tmp_path, lazy, small_buffer, versions):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=versions)
    train(ours, engine, range(2))
    saved = Saved(engine, tmp_path / "save")
    before = contents(engine)
    ours(batch(2)).backward()
    engine.give_up()
    assert_same(contents(engine), before)
    train(ours, engine, range(2, 4))
    lazy.set()
    saved.assert_whole()
    engine.close()


def test_save_survives_the_end_of_checksum_comparison(tmp_path, lazy, small_buffer):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    train(ours, engine, range(2))
    engine.close()
    again = model(torch.bfloat16)
    engine, _ = resume(again, tmp_path / "session", versions=2)
    assert engine.state_store._compares
    saved = Saved(engine, tmp_path / "save")
    train(again, engine, range(2, 4))
    assert not engine.state_store._compares
    lazy.set()
    saved.assert_whole()
    engine.close()


def test_save_detects_a_corrupted_tensor_on_first_read(tmp_path):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    train(ours, engine, range(2))
    key = engine.layout.pieces[-1].key
    (_, offset, _), *_ = engine.state_store._tier.engine.info(key).extents
    engine.close()
    with (tmp_path / "session" / "states").open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"rot")
    engine, _ = resume(model(torch.bfloat16), tmp_path / "session", versions=2)
    names = [name for name, _ in engine.read_weights()]
    file = TensorPartsWriter(tmp_path / "weights", [])
    targets = {(name, "exp_avg"): [Target(file, name)] for name in names}
    save = engine.save(targets, file.close, lambda error: error)
    with pytest.raises(StorageError, match="checksum"):
        save.wait()
    file.abandon()
    engine.close()


@pytest.mark.parametrize("rank", [4, 5], ids=["frozen weights begin a page", "frozen weights begin within a page"])
def test_frozen_and_trained_weights_are_saved(tmp_path, lazy, small_buffer, rank):
    ours = partial.made(torch.bfloat16, rank=rank)
    engine = partial.begin(ours, tmp_path / "session")
    partial.train(ours, engine, range(1))
    saved = Saved(engine, tmp_path / "save")
    partial.train(ours, engine, range(1, 3))
    lazy.set()
    saved.assert_whole()
    engine.close()


@pytest.mark.parametrize("states", [torch.float32, torch.int8], ids=str)
def test_sliced_matrix_is_saved_as_one_tensor(tmp_path, lazy, small_buffer, states):
    ours = sliced.model(torch.bfloat16, tied=True)
    engine = sliced.streamed(ours, tmp_path, states=states)
    first, second = sliced.batches(2)
    ours(first).backward()
    engine.finish_step()
    saved = Saved(engine, tmp_path / "save")
    ours(second).backward()
    engine.finish_step()
    lazy.set()
    saved.assert_whole()
    engine.close()


def test_second_save_waits_for_the_first(tmp_path, lazy):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    train(ours, engine, range(1))
    first = Saved(engine, tmp_path / "first")
    train(ours, engine, range(1, 2))
    threading.Timer(0.1, lazy.set).start()
    second = Saved(engine, tmp_path / "second")
    assert first.save.done()
    train(ours, engine, range(2, 3))
    first.assert_whole()
    second.assert_whole()
    engine.close()


def test_save_is_refused_until_the_step_is_complete(tmp_path):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    ours(batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) first"):
        engine.save({}, lambda: None, lambda error: error)
    engine.finish_step(keep=False)
    with pytest.raises(RuntimeError, match="a step is in progress, whose states may change: complete it first"):
        engine.save({}, lambda: None, lambda error: error)
    engine.keep({})
    Saved(engine, tmp_path / "save").assert_whole()
    engine.close()


@pytest.mark.parametrize("when", ["while it copies", "at its end"])
def test_full_disk_fails_only_the_save_and_wait_raises(tmp_path, monkeypatch, when):
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    engine, other = begin(ours, tmp_path / "ours", versions=2), begin(theirs, tmp_path / "theirs", versions=2)
    train(ours, engine, range(1))

    name = "_write_at" if when == "while it copies" else "close"
    original = getattr(TensorPartsWriter, name)

    def full(*arguments):
        if threading.current_thread().name == "memascend-save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(TensorPartsWriter, name, full)
    saved = Saved(engine, tmp_path / "save")
    train(ours, engine, range(1, 3))
    with pytest.raises(OSError, match="No space left"):
        saved.save.wait()
    assert saved.ends == ["given up"]
    monkeypatch.undo()
    Saved(engine, tmp_path / "again").assert_whole()  # the error was reported, and does not affect later saves
    train(ours, engine, range(3, 4))
    train(theirs, other, range(4))
    assert_same(contents(engine), contents(other))
    engine.close()
    other.close()


def test_unreported_save_error_is_raised_by_the_next_save(tmp_path, monkeypatch):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    monkeypatch.setattr(StateStore, "read_part", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "cannot read")))
    saved = Saved(engine, tmp_path / "save")
    saved.save.join()
    monkeypatch.undo()
    with pytest.raises(OSError, match="cannot read"):
        Saved(engine, tmp_path / "next")
    Saved(engine, tmp_path / "the one after").assert_whole()
    engine.close()


def test_close_waits_for_the_save(tmp_path, lazy):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    train(ours, engine, range(1))
    saved = Saved(engine, tmp_path / "save")
    threading.Timer(0.1, lazy.set).start()
    engine.close()
    saved.assert_whole()


def test_ctrl_c_in_close_stops_the_save_and_still_closes(tmp_path, monkeypatch):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "session", versions=2)
    entered, read = threading.Event(), StateStore.read_part

    def slow(self, *part):
        entered.set()
        read(self, *part)

    def interrupted(self):
        assert entered.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(StateStore, "read_part", slow)
    monkeypatch.setattr(Snapshot, "copied", lambda *_: None)  # there is always more to copy
    saved = Saved(engine, tmp_path / "save")
    joined = type(saved.save).join
    waits = [interrupted, joined, joined]
    monkeypatch.setattr(type(saved.save), "join", lambda self: waits.pop(0)(self) if waits else joined(self))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    with pytest.raises(RequestCancelled, match="was stopped"):
        saved.save.wait()
    assert saved.ends == ["given up"]
    resume(model(torch.bfloat16), tmp_path / "session", versions=2)[0].close()


def test_saves_use_one_small_buffer_recorded_in_the_ledger(tmp_path):
    ledger = Ledger()
    ours = model(torch.bfloat16)
    groups = [{"params": list(ours.parameters()), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    engine = StreamingEngine.start(
        ours, tmp_path / "session", groups, EngineOptions(), allocator=PageAlignedPinnedAllocator(ledger, lock=False)
    )
    before = ledger.peak("host", "reserved_bytes").bytes_
    for number in range(2):
        Saved(engine, tmp_path / str(number)).assert_whole()
    entries = [each for each in ledger.entries() if each.owner == "streamed_saves"]
    assert [each.requested_bytes for each in entries] == [min(buffers.SAVED_BYTES, max(engine.layout.nbytes))]
    assert ledger.peak("host", "reserved_bytes").bytes_ == before + entries[0].reserved_bytes
    (check,) = verify_by_address(entries)
    assert check.mapped
    engine.close()


def test_transferred_bytes_exclude_the_reads_of_a_save(tmp_path):
    moved = []
    for saves in (False, True):
        ours = model(torch.bfloat16)
        engine = begin(ours, tmp_path / str(saves), versions=2)
        train(ours, engine, range(2))
        before = engine.transferred
        if saves:
            Saved(engine, tmp_path / "save").assert_whole()
            assert engine.state_store.since_opened.bytes_read > engine.state_store.transferred[0]
        moved.append(tuple(now - then for now, then in zip(engine.transferred, before, strict=True)))
        engine.close()
    assert moved == [(0, 0), moved[1]]
    assert moved[1][1] == 0


def test_model_with_a_fully_frozen_unit_is_saved(tmp_path, lazy):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    for parameter in ours[0].parameters():
        parameter.requires_grad_(False)
    start = copy.deepcopy(ours.state_dict())
    groups = [{"params": [p for p in ours.parameters() if p.requires_grad], "lr": 1e-3}]
    groups[0] |= {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    engine = StreamingEngine.start(ours, tmp_path / "session", groups, EngineOptions())
    saved = Saved(engine, tmp_path / "save")
    ours(torch.randn(4, 64)).square().mean().backward()
    engine.finish_step()
    lazy.set()
    saved.assert_whole()
    assert all(torch.equal(values, saved.weights[name]) for name, values in start.items())
    engine.close()

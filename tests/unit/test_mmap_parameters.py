"""Initialised weights are in a file, which shrinks as the engine takes them over: the disk never has both copies."""

import errno
import mmap
import os

import pytest
import torch
from torch import nn

from memascend.engine.mmap_parameters import MmapValues, flat_values, releasable_bytes, release
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.storage import freed_space
from memascend.storage.errors import StorageError

WIDTH = 512  # a matrix takes one MiB


class Model(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.sum()


def spilled(model, folder):
    with MmapValues(folder) as values:
        for module in model.modules():
            values.take(module)
    return model


def start(model, folder, **options):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    groups = [{"params": list(model.parameters()), **settings}]
    return StreamingEngine.start(model, folder, groups, EngineOptions(versions=1, redo=False, **options))


@pytest.fixture
def taken(monkeypatch):
    """Return a list that gets the bytes of each hole that `release` punches into a file."""
    seen = []

    class Counted(mmap.mmap):
        def madvise(self, option, *at):
            if option == mmap.MADV_REMOVE:
                seen.append(at[1] if at else len(self))
            return super().madvise(option, *at)

    monkeypatch.setattr(mmap, "mmap", Counted)
    return seen


def test_released_part_reads_as_zeros_and_the_rest_stays(tmp_path):
    layer = nn.Linear(WIDTH, WIDTH)
    before = layer.weight.detach().clone().flatten()
    spilled(layer, tmp_path)
    release(layer.weight, 1000, 100_000)
    page, after = mmap.PAGESIZE // 4, flat_values(layer.weight)
    first, end = -(-1000 // page) * page, 101_000 // page * page
    assert torch.equal(after[:first], before[:first])
    assert torch.equal(after[end:], before[end:])
    assert not after[first:end].any()


def test_values_leave_their_file_and_train_as_in_memory(tmp_path, taken):
    torch.manual_seed(0)
    ours = Model()
    theirs = Model()
    theirs.load_state_dict(ours.state_dict())
    nbytes = sum(p.nbytes for p in ours.parameters())
    spilled(ours, tmp_path / "values")
    taken.clear()
    assert nbytes <= releasable_bytes(ours.parameters(), tmp_path / "states") < nbytes + 16 * mmap.ALLOCATIONGRANULARITY
    engines = [start(model, tmp_path / name) for model, name in ((ours, "states"), (theirs, "others"))]
    assert nbytes - 16 * mmap.PAGESIZE <= sum(taken) < nbytes + 16 * mmap.PAGESIZE
    sizes = [os.stat(tmp_path / name / "states") for name in ("states", "others")]
    assert sizes[0].st_size == sizes[1].st_size
    assert sizes[0].st_blocks >= sizes[1].st_blocks  # its space is allocated, too
    ids = torch.arange(64)
    losses = []
    for model, engine in zip((ours, theirs), engines, strict=True):
        for _ in range(2):
            loss = model(ids)
            loss.backward()
            engine.finish_step()
        losses.append(model(ids).detach())
        engine.close(destroy=True)
    assert torch.equal(*losses)


@pytest.mark.parametrize("short_by", [0, 1])
def test_states_fit_in_free_space_plus_releasable_values(tmp_path, monkeypatch, short_by):
    monkeypatch.setattr(freed_space, "_MOST_S", 0.0)  # no other space is expected back
    model = spilled(Model(), tmp_path)
    probe = start(Model(), tmp_path / "probe")
    size = os.stat(tmp_path / "probe" / "states").st_size
    probe.close(destroy=True)
    usage = freed_space.shutil.disk_usage(tmp_path)
    free = size - releasable_bytes(model.parameters(), tmp_path) - short_by
    monkeypatch.setattr(freed_space.shutil, "disk_usage", lambda _: usage._replace(free=free))
    if short_by:
        with pytest.raises(StorageError) as full:
            start(model, tmp_path / "states")
        assert full.value.errno == errno.ENOSPC
        assert not (tmp_path / "states").exists()
    else:
        start(model, tmp_path / "states").close(destroy=True)


def test_file_system_without_hole_punching_needs_space_for_both(tmp_path, monkeypatch):
    class Whole(mmap.mmap):
        def madvise(self, option, *at):
            if option == mmap.MADV_REMOVE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return super().madvise(option, *at)

    monkeypatch.setattr(mmap, "mmap", Whole)
    model = spilled(Model(), tmp_path)
    assert releasable_bytes(model.parameters(), tmp_path) == 0
    start(model, tmp_path / "states").close(destroy=True)

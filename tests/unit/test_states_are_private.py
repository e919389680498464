"""Files of states can be read by their owner alone, and a wait for a drive that hangs can be ended by Ctrl-C."""

import os
import signal
import stat
import threading
import time

import pytest
import torch

from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.engine_tiers import FileTier
from memascend.storage.file_engine import FileEngine
from tests.unit.test_streaming_engine import SETTINGS, batches, model


def modes(folder):
    return {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink()
    }


def test_the_states_of_a_streamed_model_are_readable_by_their_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        home = streaming(tmp_path / "run", allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
        ours = model()
        home.hook(ours)
        optimizer = home.optimizer(torch.optim.AdamW, wait=True, **SETTINGS)
        (ids,) = batches(1)
        ours(ids).backward()
        found = modes(tmp_path / "run")
        optimizer.step()
        found |= modes(tmp_path / "run")
        home.close()
    finally:
        os.umask(before)
    assert found
    assert not {name: oct(mode) for name, mode in found.items() if mode & 0o077}


def test_a_link_in_the_place_of_the_states_is_not_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("keep me")
    folder.mkdir()
    (folder / "states.memascend").symlink_to(victim)
    home = streaming(folder)
    home.hook(model())
    with pytest.raises(ValueError, match="is not empty"):
        home.optimizer(torch.optim.AdamW)
    assert victim.read_text() == "keep me"


def test_swap_files_are_readable_by_their_owner_alone(tmp_path):
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
    request = engine.async_read(torch.empty(4096, dtype=torch.uint8), fifo)  # the open ends when somebody writes
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.wait(request, limit_s)
    assert time.monotonic() - began < 20
    writer = os.open(fifo, os.O_RDWR)  # every open of the reader's ends from here on
    with pytest.raises(OSError, match="hangs"):  # it is no file
        engine.wait(request)
    engine.close()
    os.close(writer)

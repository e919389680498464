"""Scratch files of living processes on other hosts stay, and a file system without locks is named."""

import errno
import fcntl
import os
import platform
import stat
from pathlib import Path

import pytest
import torch

from memascend.storage import hosts, scratch
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.errors import StorageError
from memascend.storage.scratch import collect_scratch_files
from memascend.training.folder import SwapFolder, collect_dead


def opened(kind, folder):
    if kind == "files":
        return FileTier(folder, "tests")
    return DirectTier.in_file(folder, "tests", DirectEngineConfig(control_folder=str(folder)))


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Make files as a process leaves them, or has them while it lives,
    where its locks are invisible: none is locked."""

    def leave(kind, boot, host):
        boot_id = tmp_path / "boot_id"
        boot_id.write_text(boot)
        monkeypatch.setattr(hosts, "_BOOT_ID", boot_id)
        monkeypatch.setattr(platform, "node", lambda: host)
        folder = tmp_path / "shared"
        folder.mkdir(exist_ok=True)
        if kind == "files":
            made = scratch.create_scratch_folder(folder, "theirs")
        else:
            made = scratch.create_scratch_file(folder, 1 << 20, "theirs")
        os.close(made.fd)
        made.fd = -1
        return Path(made.path)

    return leave


def be(monkeypatch, tmp_path, boot, host):
    (tmp_path / "boot_id").write_text(boot)
    monkeypatch.setattr(platform, "node", lambda: host)


@pytest.mark.parametrize("kind", ["direct", "files"])
@pytest.mark.parametrize(
    ("boot", "host", "stays"),
    [("1", "a", False), ("1", "b", False), ("2", "a", False), ("2", "b", True)],
    ids=["the same host", "another container of this kernel", "this host before it was started again", "another host"],
)
def test_scratch_files_of_other_hosts_are_not_collected(tmp_path, monkeypatch, left, kind, boot, host, stays):
    path = left(kind, "1", "a")
    be(monkeypatch, tmp_path, boot, host)
    removed = collect_scratch_files(path.parent, str(tmp_path))
    assert path.exists() == stays
    assert [each.path for each in removed] == ([] if stays else [str(path)])


@pytest.mark.parametrize(("boot", "host", "stays"), [("2", "a", False), ("2", "b", True)], ids=["same", "another"])
def test_swap_folders_of_other_hosts_are_not_collected(tmp_path, monkeypatch, boot, host, stays):
    monkeypatch.setattr(hosts, "_BOOT_ID", tmp_path / "boot_id")
    be(monkeypatch, tmp_path, "1", "a")
    theirs = SwapFolder.make(tmp_path / "shared", tmp_path / "run")
    theirs.lock.close()  # as it looks from a host that does not see the lock
    assert stat.S_IMODE(theirs.path.stat().st_mode) == 0o700
    be(monkeypatch, tmp_path, boot, host)
    assert bool(collect_dead(tmp_path / "shared")) != stays
    assert theirs.path.exists() == stays


@pytest.mark.parametrize("kind", ["direct", "files"])
def test_opening_tier_in_shared_folder_keeps_files_of_other_hosts(tmp_path, monkeypatch, left, kind):
    path = left(kind, "1", "a")
    be(monkeypatch, tmp_path, "2", "b")
    with opened(kind, path.parent) as tier:
        tier.write("a", torch.ones(1024)).wait()
    assert list(path.parent.glob(f"{scratch.SCRATCH_PREFIX}*")) == [path]


@pytest.mark.parametrize("kind", ["direct", "files"])
def test_file_system_without_locks_is_reported_and_leaves_no_files(tmp_path, monkeypatch, kind):
    real = fcntl.fcntl

    def refused(fd, command, *rest):
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return real(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    with pytest.raises(StorageError, match=r"^lock of .*No locks available: the file system keeps no locks .*: name"):
        opened(kind, tmp_path)
    assert not list(tmp_path.iterdir())

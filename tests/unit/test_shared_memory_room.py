"""A container's shared memory is 64 MiB by default: less than DeepSpeed's all-reduce needs for a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from memascend.doctor import checks
from memascend.storage import shared_memory
from memascend.training import preflight

MIB = 2**20


@pytest.fixture
def shared_of(monkeypatch):
    def set_free(mib: int) -> None:
        status = SimpleNamespace(f_bavail=mib * MIB // 4096, f_frsize=4096)
        monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: status)
        monkeypatch.setattr(preflight, "NVIDIA_DEVICE", Path("/nowhere"))

    return set_free


def test_training_that_would_fill_shared_memory_is_refused_with_fix(shared_of):
    shared_of(64)
    with pytest.raises(
        ValueError, match=r"has 64\.0 MiB free and 1 rank of DeepSpeed .* takes 69\.0 MiB: .*--shm-size=1g"
    ):
        preflight.check_shared_memory(1)
    shared_of(80)
    preflight.check_shared_memory(1)
    with pytest.raises(ValueError, match=r"80\.0 MiB free and 2 ranks of DeepSpeed on a CPU take 1"):
        preflight.check_shared_memory(2)


def test_ranks_on_gpus_pass_the_shared_memory_check(shared_of, monkeypatch, tmp_path):
    shared_of(1)
    monkeypatch.setattr(preflight, "NVIDIA_DEVICE", tmp_path)
    preflight.check_shared_memory(4)


def test_doctor_reports_free_shared_memory_and_warns_when_too_small(shared_of):
    shared_of(1024)
    assert checks.check_shared_memory(2).status == checks.OK
    shared_of(64)
    found = checks.check_shared_memory(1)
    assert (found.status, found.name) == (checks.WARN, "shared memory")
    assert "64 MiB free in /dev/shm" in found.found
    assert "--shm-size" in found.fix

"""It is known in advance what DeepSpeed would compile on first use for the accelerator that computes."""

import os
from pathlib import Path

import deepspeed.git_version_info as installed
import pytest
from deepspeed.accelerator import get_accelerator
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from memascend.integrations.deepspeed import measured, ops

pytestmark = pytest.mark.deepspeed


@pytest.fixture
def made_for(monkeypatch, tmp_path):
    """Set up prebuilt ops of an accelerator; torch's folder of extensions is empty."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def made(accelerator: str) -> None:
        monkeypatch.setattr(installed, "accelerator_name", accelerator)
        monkeypatch.setattr(installed, "installed_ops", dict.fromkeys(ops.NEEDED, True))

    return made


def test_ops_built_for_the_accelerator_are_available(made_for):
    made_for(get_accelerator()._name)
    assert ops.not_compiled() == []


def test_ops_built_for_another_accelerator_are_not_available(made_for):
    made_for("another")
    assert ops.not_compiled() == ["async_io", "cpu_adam"]
    with pytest.raises(RuntimeError, match=r"async_io, cpu_adam are not compiled for .*; run: "):
        measured.require_compiled_ops()


def test_ops_compiled_by_an_earlier_use_are_available(made_for, tmp_path):
    made_for("another")
    for name in ops.NEEDED:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    assert ops.not_compiled() == []


def test_extension_folder_is_the_one_torch_uses(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    assert not ops.kept("cpu_adam")
    assert not list(tmp_path.iterdir())
    Path(cpp_extension._get_build_directory("cpu_adam", verbose=False), "cpu_adam.so").touch()
    assert ops.kept("cpu_adam")


def test_abandoned_compile_lock_is_refused_and_a_held_one_allowed(made_for, tmp_path):
    made_for("another")
    (tmp_path / "cpu_adam").mkdir()
    baton = FileBaton(str(tmp_path / "cpu_adam/lock"))
    assert baton.try_acquire()
    ops.refuse_abandoned_locks()
    os.close(baton.fd)  # as a killed process leaves it
    with pytest.raises(ValueError, match=rf"^DeepSpeed's op cpu_adam .* rm {tmp_path}/cpu_adam/lock$"):
        ops.refuse_abandoned_locks()
    with pytest.raises(ValueError, match="cpu_adam/lock"):
        measured.require_compiled_ops()
    made_for(get_accelerator()._name)  # torch loads nothing
    ops.refuse_abandoned_locks()


@pytest.mark.parametrize(
    ("written", "read"),
    [("9.0a", "9.0"), ("8.0 9.0a+PTX", "8.0 9.0+PTX"), ("8.6;10.0f;12.0a", "8.6;10.0;12.0"), ("Hopper", "Hopper")],
)
def test_architecture_suffix_letters_are_removed(written, read):
    environment = {"TORCH_CUDA_ARCH_LIST": written}
    ops.readable_architectures(environment)
    assert environment == {"TORCH_CUDA_ARCH_LIST": read}
    ops.readable_architectures(empty := {})
    assert empty == {}

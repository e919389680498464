"""Files of a model folder are mapped whatever their size, and a refusal of the kernel is one line."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from memascend.storage import tensor_folder
from memascend.storage.tensor_file import TensorLayout, tensor_header
from memascend.storage.tensor_folder import TensorFolder


def sparse(folder: Path, nbytes: int) -> None:
    """Make a file with one tensor of zeros that takes no space."""
    header = tensor_header([TensorLayout("w", torch.uint8, (nbytes,))], None, aligned=False)
    path = folder / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + nbytes)


def test_file_larger_than_memory_and_swap_is_mapped(tmp_path):
    mode = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    if mode != "0":
        pytest.skip(f"vm.overcommit_memory is {mode}: only with 0 does a mapping's own size decide")
    known = Path("/proc/meminfo").read_text()
    total = sum(int(re.search(rf"{name}:\s+(\d+) kB", known)[1]) << 10 for name in ("MemTotal", "SwapTotal"))
    sparse(tmp_path, total + (1 << 30))
    stored = TensorFolder(tmp_path).tensors["w"]
    values = stored.flat()
    assert values.numel() == total + (1 << 30)
    assert int(values[-1]) == 0
    stored.let_go()


def test_mapping_that_the_kernel_refuses_is_one_line_with_the_fix(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    sparse(tmp_path, 1 << 20)
    monkeypatch.setattr(tensor_folder.mmap, "mmap", refuse)
    with pytest.raises(
        ValueError, match=r"^.*model\.safetensors cannot be mapped, .*: Cannot allocate memory: raise .*$"
    ):
        TensorFolder(tmp_path)

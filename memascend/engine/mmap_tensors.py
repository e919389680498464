"""Tensors in the memory of a file, which the kernel can reclaim: state dicts of models larger than memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from memascend.storage.freed_space import allocate_space

_ALIGNMENT = 64
_PREFIX = "state-dict-"


def collect_tensor_files(folder: str | os.PathLike[str]) -> None:
    """Remove the files that a killed process of an earlier version, which gave them names, has left in `folder`."""
    for path in Path(folder).glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


class TensorFile:
    """Space for copies of tensors of `sizes` bytes, in a file in `folder` that is removed with the last of them.

    Each tensor has a storage of its own, so that saving one saves only that one. Raises OSError, whose message says so,
    if the disk has no space.
    """

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        self._place, size = 0, max(1, sum(-(-each // _ALIGNMENT) * _ALIGNMENT for each in sizes))
        there = next(each for each in (folder, *folder.parents) if each.is_dir())  # it may have been removed meanwhile
        try:
            with tempfile.TemporaryFile(dir=there, prefix=_PREFIX) as file:  # unnamed: a kill leaves nothing behind
                allocate_space(file.fileno(), size)
                self._bytes = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the values of a state dict need {size} bytes in {there} for as long as they are used: "
                f"{os.strerror(error.errno or 0)}",
            ) from None

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy in the file, of the same shape. Raises ValueError if no space is left for it."""
        return self.allocate(values.dtype, values.shape).copy_(values)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor in the file for the caller to fill. Raises ValueError if no space is left for it."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end = self._place + nbytes
        if end > len(self._bytes):
            raise ValueError(f"{nbytes} bytes are more than what is left of the file")
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        made = torch.frombuffer(self._bytes, dtype=torch.uint8, count=nbytes, offset=self._place)
        self._place = -(-end // _ALIGNMENT) * _ALIGNMENT
        return made.view(dtype).view(shape)

"""A model whose weights wait in files until the engine takes them, so that it never is in memory as a whole.

Initialised ones are put into a file as they are made; those of a folder stay in its files (`wait_in`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Self

import torch
from torch import nn

from memascend.storage.byte_views import byte_view
from memascend.storage.tensor_folder import StoredTensor

_PAGES = "_memascend_pages"  # of a parameter: the map that its values lie in
_STORED = "_memascend_stored"  # of a parameter without values: the tensor of a file that has them


class SpilledValues:
    """Values of parameters in a file in `folder` that goes with the last of them. A context, in which more are taken.

    Raises OSError where the disk has no room. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="values-")  # noqa: SIM115
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, module: nn.Module) -> None:
        """The module's own parameters: equal values, in memory only while somebody looks at them."""
        for parameter in module.parameters(recurse=False):
            if parameter.device.type == "cpu" and parameter.numel() and not hasattr(parameter, _PAGES):
                self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        raw, done = byte_view(parameter), 0
        while done < len(raw):
            done += os.pwrite(self._file.fileno(), raw[done:], self._end + done)
        pages = mmap.mmap(self._file.fileno(), len(raw), offset=self._end)
        step = mmap.ALLOCATIONGRANULARITY
        self._end += -(-len(raw) // step) * step
        parameter.data = torch.frombuffer(pages, dtype=parameter.dtype).view(parameter.shape)
        setattr(parameter, _PAGES, pages)


def wait_in(parameter: nn.Parameter, stored: StoredTensor) -> None:
    """Its values are those of a file, of the same shape and of any type; what it holds itself is none."""
    setattr(parameter, _STORED, stored)


def flat_values(parameter: nn.Parameter) -> torch.Tensor:
    """One dimension; of a waiting parameter in its file's type."""
    stored = getattr(parameter, _STORED, None)
    return parameter.detach().reshape(-1) if stored is None else stored.flat()


def let_go(parameter: nn.Parameter) -> None:
    """Its values have been looked at: the kernel may have the memory back. They stay in the file."""
    pages = getattr(parameter, _PAGES, None)
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)
    if (stored := getattr(parameter, _STORED, None)) is not None:
        stored.let_go()


def forget(parameter: nn.Parameter) -> None:
    """Its values are elsewhere."""
    for name in (_PAGES, _STORED):
        if hasattr(parameter, name):
            delattr(parameter, name)

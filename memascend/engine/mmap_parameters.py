"""Parameters whose values wait in files until the engine takes them, so that no model is in memory as a whole.

Initialised weights are put into a file as they are created, and leave it as they are moved (`release`). Weights of a
checkpoint folder stay in its files (`wait_in`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from memascend.storage.byte_views import byte_view
from memascend.storage.tensor_folder import StoredTensor

_PAGES = "_memascend_pages"  # attribute of a parameter: the `_Pages` that hold its values
_STORED = "_memascend_stored"  # attribute of a parameter without values: the tensor in a file that has them


@dataclass(frozen=True)
class _Pages:
    """A memory map of a file on `device` (st_dev). `releasable`: the file system can punch holes into the file."""

    map: mmap.mmap
    device: int
    releasable: bool


class MmapValues:
    """Values of parameters in a file in `folder`, which is removed with the last of them. Modules are taken within its
    context.

    Raises OSError if the disk has no space. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="values-")  # noqa: SIM115
        self._device, self._end = os.fstat(self._file.fileno()).st_dev, 0
        self._releasable = _is_releasable(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, module: nn.Module) -> None:
        """Move the values of the module's own parameters to the file. They are in memory only while accessed."""
        for parameter in module.parameters(recurse=False):
            if parameter.device.type == "cpu" and parameter.numel() and not hasattr(parameter, _PAGES):
                self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        """Append a parameter's values to the file, and let the parameter refer to a map of them."""
        raw, done = byte_view(parameter), 0
        while done < len(raw):
            done += os.pwrite(self._file.fileno(), raw[done:], self._end + done)
        pages = mmap.mmap(self._file.fileno(), len(raw), offset=self._end)
        step = mmap.ALLOCATIONGRANULARITY
        self._end += -(-len(raw) // step) * step
        parameter.data = torch.frombuffer(pages, dtype=parameter.dtype).view(parameter.shape)
        setattr(parameter, _PAGES, _Pages(pages, self._device, self._releasable))


def _is_releasable(handle: int) -> bool:
    """Return whether the file system can punch holes into the file open as descriptor `handle`."""
    os.pwrite(handle, bytes(mmap.PAGESIZE), 0)
    with mmap.mmap(handle, mmap.PAGESIZE) as page:
        try:
            page.madvise(mmap.MADV_REMOVE)
        except OSError:
            return False
    return True


def wait_in(parameter: nn.Parameter, stored: StoredTensor) -> None:
    """Let a parameter without values have those of a file, of the same shape and of any dtype."""
    setattr(parameter, _STORED, stored)


def flat_values(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's values in one dimension; those that wait in a file have the file's dtype."""
    stored = getattr(parameter, _STORED, None)
    return parameter.detach().reshape(-1) if stored is None else stored.flat()


def release(parameter: nn.Parameter, first: int, numel: int) -> None:
    """Give back the memory of elements `first` to `first + numel`, which have been moved.

    Values in a file of `MmapValues` also leave the file, page by page, if the file system can punch holes: they read as
    zeros from then on. Those of a checkpoint folder stay in its files.
    """
    pages = getattr(parameter, _PAGES, None)
    if pages is not None:
        begin, end = (element * parameter.element_size() for element in (first, first + numel))
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if end < len(pages.map):  # else its last page holds no other values
            end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            pages.map.madvise(mmap.MADV_REMOVE if pages.releasable else mmap.MADV_DONTNEED, begin, end - begin)
    if (stored := getattr(parameter, _STORED, None)) is not None:
        stored.let_go()


def releasable_bytes(parameters: Iterable[nn.Parameter], folder: str | os.PathLike[str]) -> int:
    """Return the bytes that `release` will give back on the file system of `folder`, which need not exist."""
    where = Path(folder).absolute()
    device = next(os.stat(each).st_dev for each in (where, *where.parents) if each.exists())
    found = [pages for p in parameters if (pages := getattr(p, _PAGES, None)) is not None]
    return sum(len(pages.map) for pages in found if pages.releasable and pages.device == device)


def forget(parameter: nn.Parameter) -> None:
    """Drop the parameter's references to files, since its values are elsewhere."""
    for name in (_PAGES, _STORED):
        if hasattr(parameter, name):
            delattr(parameter, name)

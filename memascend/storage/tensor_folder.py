"""Memory-mapped access to the safetensors files of a model folder: a tensor's pages are read only when it is used.

A folder has one file, or the shards that `model.safetensors.index.json` names.
Source: https://huggingface.co/docs/safetensors, and the shard index of transformers.
"""

from __future__ import annotations

import errno
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from memascend.storage.tensor_file import tensor_spans

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` and `shape` are those that the file states."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    _pages: mmap.mmap
    _first: int

    def flat(self) -> torch.Tensor:
        """Return the elements as a 1-D tensor on the file's mapped pages: read on first access, never written back."""
        numel = torch.Size(self.shape).numel()
        if not numel:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(self._pages, dtype=self.dtype, count=numel, offset=self._first)

    def let_go(self) -> None:
        """Let the kernel drop the tensor's pages; they are read from the file again on the next access."""
        page = mmap.PAGESIZE
        begin = self._first // page * page
        end = self._first + torch.Size(self.shape).numel() * self.dtype.itemsize
        if end > begin:
            self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class TensorFolder:
    """All tensors of a folder, by name. The files stay mapped as long as any of their tensors is referenced.

    Raises ValueError, with a one-line message, for a shard that is missing, truncated, not a safetensors file, or more
    than the kernel maps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        shards, named = _shards(folder)
        for path in shards:
            self._open(path)
        if lost := next((name for name in named if name not in self.tensors), None):
            raise ValueError(f"{folder / named[lost]} lacks the tensor {lost}, which {_INDEX} says it holds: {_AGAIN}")

    def _open(self, path: Path) -> None:
        """Map a file, and add its tensors. Raises ValueError if it is truncated."""
        spans, size = tensor_spans(path, to_train=True), path.stat().st_size
        if any(end > size for _, _, _, end in spans.values()):
            whole = max(end for _, _, _, end in spans.values())
            raise ValueError(f"{path} is cut short: {size} of {whole} bytes; {_AGAIN}")
        if not spans:
            return
        pages = _mapped(path)
        for name, (dtype, shape, first, _) in spans.items():
            self.tensors[name] = StoredTensor(name, path, dtype, shape, pages, first)


_AGAIN = "copy or download the folder again"
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # asm-generic/mman.h; not every Python has it


def _mapped(path: Path) -> mmap.mmap:
    """Map a file privately, since torch requires writable memory. Raises ValueError if the kernel refuses.

    Nothing is written, so the kernel must not count the file as memory that this process may need.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise ValueError(
            f"{path} cannot be mapped, {path.stat().st_size} bytes: {error.strerror}: raise the limit on address space "
            "(ulimit -v), or set vm.overcommit_memory to 0"
        ) from None


def has_tensor_files(folder: Path) -> bool:
    """Return whether there is any safetensors file directly in the folder."""
    return next(folder.glob("*.safetensors"), None) is not None


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to open, and a dict from tensor name to the file that the index assigns it to."""
    index = folder / _INDEX
    if not index.is_file():
        one = folder / _ONE
        return [one] if one.is_file() else sorted(folder.glob("*.safetensors")), {}
    try:
        named = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of shards ({error}): {_AGAIN}") from None
    shards = sorted({folder / file for file in named.values()})
    if missing := [path.name for path in shards if not path.is_file()]:
        raise ValueError(f"{folder} lacks {missing[0]} ({len(missing)} of {len(shards)} shards are missing): {_AGAIN}")
    return shards, named

"""Safetensors files written and read tensor by tensor, so that host memory holds one tensor at a time.

The format: 8 bytes of header length, a JSON header with dtype, shape and byte range of every tensor, then the bytes.
Shapes are known before the first byte, so the header goes first and nothing is buffered.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from memascend.storage.byte_views import byte_view
from memascend.storage.reflink import BLOCK_BYTES

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_CHUNK_BYTES = 16 << 20
_PADDING = ".padding"  # after a name: bytes up to a whole block, as a tensor, since the format knows no holes


# Asked with a tensor's name and with what shares its bytes with an open file from a byte on (`Tier.share`); True: done.
Share = Callable[[str, Callable[[int, int], bool]], bool]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFileWriter:
    """Writes the tensors of `layouts` in their order; closes complete or not at all.

    `aligned`: each tensor begins at a multiple of 4096 bytes, so that one that lies on the same file system already can
    be shared (`share`) in place of being written. `checksum` (crc32; None once a tensor was shared) and `size` describe
    the whole file after `close`, `shared_bytes` those that were not written. Raises ValueError for a tensor out of
    order or of another shape, OSError where the disk refuses. Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        layouts: Sequence[TensorLayout],
        metadata: dict[str, str] | None = None,
        *,
        aligned: bool = False,
    ) -> None:
        self._path, self._next = path, 0
        self._layouts = [each for layout in layouts for each in (layout, *(padding_after(layout) if aligned else ()))]
        self.checksum: int | None = 0
        self.size = self.shared_bytes = 0
        self._file = open_anew(path)
        self._put(tensor_header(self._layouts, metadata, aligned=aligned))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        layout = self._layouts[self._next] if self._next < len(self._layouts) else None
        if layout is None or (layout.name, layout.dtype, layout.shape) != (name, tensor.dtype, tuple(tensor.shape)):
            got = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{self._path}: expected {layout} as tensor {self._next}, got {got}")
        view = byte_view(tensor)
        for start in range(0, len(view), _CHUNK_BYTES):
            self._put(view[start : start + _CHUNK_BYTES])
        self._next += 1
        if (padding := self._padding_next()) is not None:
            self._put(bytes(padding.nbytes))
            self._next += 1

    def share(self, name: str, share: Callable[[int, int], bool]) -> bool:
        """The tensor called `name`, which is the next, without moving its bytes: `share` gets the open file and where
        in it the tensor begins (`memascend.storage.tier.Tier.share`). False, as `share` says: write it."""
        layout = self._layouts[self._next]
        if layout.name != name or self.size % BLOCK_BYTES:
            raise ValueError(f"{self._path}: expected {layout} as tensor {self._next}, got {name}, to be shared")
        self._file.flush()
        if not share(self._file.fileno(), self.size):
            os.ftruncate(self._file.fileno(), self.size)
            return False
        self._next += 1
        self.size += layout.nbytes
        if (padding := self._padding_next()) is not None:  # what is behind the tensor in its last block
            self.size += padding.nbytes
            self._next += 1
        os.ftruncate(self._file.fileno(), self.size)
        self._file.seek(self.size)
        self.shared_bytes += layout.nbytes
        self.checksum = None
        return True

    def _padding_next(self) -> TensorLayout | None:
        layout = self._layouts[self._next] if self._next < len(self._layouts) else None
        return layout if layout is not None and layout.name.endswith(_PADDING) else None

    def _put(self, data: Any) -> None:
        self._file.write(data)
        self.checksum = None if self.checksum is None else zlib.crc32(data, self.checksum)
        self.size += len(data)

    def close(self) -> None:
        """All tensors are on the disk when this returns."""
        if self._next != len(self._layouts):
            self._file.close()
            raise ValueError(f"{self._path}: {self._next} of {len(self._layouts)} tensors were written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def tensor_header(layouts: Sequence[TensorLayout], metadata: dict[str, str] | None, *, aligned: bool) -> bytes:
    """What stands before the tensors of `layouts`, which follow one another."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for layout in layouts:
        span = [offset, offset + layout.nbytes]
        header[layout.name] = {"dtype": _CODES[layout.dtype], "shape": list(layout.shape), "data_offsets": span}
        offset += layout.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % (BLOCK_BYTES if aligned else 8))
    return len(text).to_bytes(8, "little") + text


def open_anew(path: Path) -> BinaryIO:
    """An empty file at `path`, to be written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")  # a checkpoint's: the folder says who may read it


def padding_after(layout: TensorLayout) -> tuple[TensorLayout, ...]:
    """What follows a tensor up to a whole block."""
    rest = -layout.nbytes % BLOCK_BYTES
    return (TensorLayout(f"{layout.name}{_PADDING}", torch.uint8, (rest,)),) if rest else ()


def _header_of(path: Path, file: Any) -> tuple[dict[str, Any], int]:
    """The header of an open file, and where the tensors begin."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"a header of {length} bytes")
        return dict(json.loads(file.read(length))), 8 + length
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def tensor_spans(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """By name: dtype, shape, and from and to which byte of the file. ValueError for a type that torch does not have."""
    with path.open("rb") as file:
        header, start = _header_of(path, file)
    spans = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} is {entry['dtype']}, which cannot be trained: use 16- or 32-bit weights")
        begin, end = entry["data_offsets"]
        spans[name] = _DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin, start + end
    return spans


class TensorFileReader:
    """Reads single tensors of a file into memory of the caller's. Raises ValueError where the file is short or odd."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        header, self._start = _header_of(path, self._file)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._header: dict[str, dict[str, Any]] = header

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order in which they were written."""
        return [name for name in self._header if not name.endswith(_PADDING)]

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, in new memory."""
        entry = self._entry(name)
        tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        self.read_into(name, tensor)
        return tensor

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._header:
            raise ValueError(f"{self._path} holds no tensor {name}")
        return self._header[name]

    def require(self, name: str, dtype: torch.dtype, numel: int) -> None:
        """Raise ValueError where there is no such tensor."""
        entry = self._entry(name)
        if entry["dtype"] != _CODES[dtype] or torch.Size(entry["shape"]).numel() != numel:
            got = f"{_CODES[dtype]} of {numel} elements"
            raise ValueError(f"{self._path}: {name} is {entry['dtype']} of {entry['shape']}, expected {got}")

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor` (contiguous, same dtype and element count) with the tensor called `name`."""
        entry = self._entry(name)
        self.require(name, tensor.dtype, tensor.numel())
        if not tensor.is_contiguous():
            raise ValueError(f"{self._path}: the memory for {name} is not contiguous")
        view, done = byte_view(tensor), 0
        self._file.seek(self._start + entry["data_offsets"][0])
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise ValueError(f"{self._path} ends inside {name}: {done} of {len(view)} bytes")
            done += count

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

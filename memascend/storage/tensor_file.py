"""Reading and writing safetensors files one tensor at a time, so that host memory never contains the whole file.

The format: 8 bytes of header length, a JSON header with the dtype, shape and byte range of every tensor, then the data.
All shapes are known in advance, so the header is written first and nothing is buffered.
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
_TRAINED = set(_CODES.values())  # codes that a model to be trained may have in its files
_CODES |= {
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_CHUNK_BYTES = 16 << 20
_PADDING = ".padding"  # name suffix of a tensor that fills up to a whole block, since the format allows no gaps


# Called with a tensor's name and a function that shares its bytes with an open file from an offset on (`Tier.share`).
# Returns whether the bytes were shared.
Share = Callable[[str, Callable[[int, int], bool]], bool]


def can_be_written(dtype: torch.dtype) -> bool:
    """Return whether the format has a code for a dtype."""
    return dtype in _CODES


@dataclass(frozen=True)
class TensorLayout:
    """Name, dtype and shape of a tensor that will be written. Raises ValueError for a dtype without a code."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not can_be_written(self.dtype):
            raise ValueError(
                f"{self.name} is {self.dtype}, for which the safetensors format has no code: convert it, or register "
                "the buffer with persistent=False"
            )

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFileWriter:
    """Writes the tensors of `layouts` in their order; `close` fails unless all of them were written.

    `aligned`: each tensor begins at a multiple of 4096 bytes, so that one that is already on the same file system can
    be shared (`share`) instead of written. After `close`, `checksum` (crc32; None once a tensor was shared) and `size`
    describe the whole file, and `shared_bytes` counts the bytes that were shared. Raises ValueError for a tensor out of
    order or of another shape or dtype, and OSError if a write fails. Not thread-safe.
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
        paddings = padding_after(layouts) if aligned else {}
        self._layouts = [each for layout in layouts for each in (layout, paddings.get(layout.name)) if each is not None]
        self._paddings = set(map(id, paddings.values()))  # by identity, since a tensor may have such a name, too
        self.checksum: int | None = 0
        self.size = self.shared_bytes = 0
        self._file = open_anew(path)
        self._put(tensor_header(self._layouts, metadata, aligned=aligned))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor called `name`, the next in order, and the padding after it, if any."""
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
        """Add the tensor called `name`, the next in order, without copying; return whether that succeeded.

        `share` gets the open file's descriptor and the offset of the tensor (`memascend.storage.tier.Tier.share`). If
        it returns False, the tensor must be written.
        """
        layout = self._layouts[self._next]
        if layout.name != name or self.size % BLOCK_BYTES:
            raise ValueError(f"{self._path}: expected {layout} as tensor {self._next}, got {name}, to be shared")
        self._file.flush()
        if not share(self._file.fileno(), self.size):
            os.ftruncate(self._file.fileno(), self.size)
            return False
        self._next += 1
        self.size += layout.nbytes
        if (padding := self._padding_next()) is not None:  # the rest of the tensor's last block
            self.size += padding.nbytes
            self._next += 1
        os.ftruncate(self._file.fileno(), self.size)
        self._file.seek(self.size)
        self.shared_bytes += layout.nbytes
        self.checksum = None
        return True

    def _padding_next(self) -> TensorLayout | None:
        """Return the layout of the next tensor if it is a padding, else None."""
        layout = self._layouts[self._next] if self._next < len(self._layouts) else None
        return layout if layout is not None and id(layout) in self._paddings else None

    def _put(self, data: Any) -> None:
        """Append data to the file, and update checksum and size."""
        self._file.write(data)
        self.checksum = None if self.checksum is None else zlib.crc32(data, self.checksum)
        self.size += len(data)

    def close(self) -> None:
        """Sync the file to disk and close it. Raises ValueError if tensors are missing."""
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
    """Return the length field and JSON header for the consecutive tensors of `layouts`."""
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
    """Open an empty file at `path` for writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")  # a checkpoint file: access is controlled by the folder


def padding_after(layouts: Sequence[TensorLayout]) -> dict[str, TensorLayout]:
    """Return the padding tensor that fills up to a whole block after each tensor, by its name, if one is needed."""
    taken = {layout.name for layout in layouts}
    paddings: dict[str, TensorLayout] = {}
    for layout in layouts:
        if rest := -layout.nbytes % BLOCK_BYTES:
            name = f"{layout.name}{_PADDING}"
            while name in taken:
                name += _PADDING
            taken.add(name)
            paddings[layout.name] = TensorLayout(name, torch.uint8, (rest,))
    return paddings


def _header_of(path: Path, file: Any) -> tuple[dict[str, Any], int]:
    """Return the header of an open file, and the offset at which the tensor data begins."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"a header of {length} bytes")
        return dict(json.loads(file.read(length))), 8 + length
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def tensor_spans(path: Path, *, to_train: bool = False) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Return dtype, shape, begin and end offset in the file, by name. Raises ValueError for an unsupported dtype, and
    with `to_train` also for one that no weights in training have."""
    supported = _TRAINED if to_train else _DTYPES
    with path.open("rb") as file:
        header, start = _header_of(path, file)
    spans = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in supported:
            raise ValueError(f"{path}: {name} is {entry['dtype']}, which cannot be trained: use 16- or 32-bit weights")
        begin, end = entry["data_offsets"]
        spans[name] = _DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin, start + end
    return spans


class TensorFileReader:
    """Reads single tensors of a file, on request. Raises ValueError if the file is truncated or invalid."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        header, self._start = _header_of(path, self._file)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._header: dict[str, dict[str, Any]] = header

    @property
    def names(self) -> list[str]:
        """Names of all tensors without padding, in the order in which they were written."""
        names = list(self._header)
        if self._start % BLOCK_BYTES:  # the file is not aligned, and has no padding
            return names
        return [name for name, before in zip(names, ["", *names], strict=False) if not self._is_padding(name, before)]

    def _is_padding(self, name: str, before: str) -> bool:
        """Return whether a tensor is the padding (`padding_after`) of the one called `before`, written just before."""
        if not (name.startswith(f"{before}{_PADDING}") and before in self._header):
            return False
        begin, end = self._header[before]["data_offsets"]
        rest = -(end - begin) % BLOCK_BYTES
        return bool(rest) and self._header[name] == {"dtype": "U8", "shape": [rest], "data_offsets": [end, end + rest]}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name` in newly allocated memory."""
        entry = self._entry(name)
        tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        self.read_into(name, tensor)
        return tensor

    def _entry(self, name: str) -> dict[str, Any]:
        """Return the header's entry of a tensor. Raises ValueError if there is none."""
        if name not in self._header:
            raise ValueError(f"{self._path} holds no tensor {name}")
        return self._header[name]

    def require(self, name: str, dtype: torch.dtype, numel: int) -> None:
        """Raise ValueError unless the file has all of a tensor called `name` with this dtype and number of elements."""
        entry, code = self._entry(name), _CODES.get(dtype, str(dtype))
        if entry["dtype"] != code or torch.Size(entry["shape"]).numel() != numel:
            got = f"{code} of {numel} elements"
            raise ValueError(f"{self._path}: {name} is {entry['dtype']} of {entry['shape']}, expected {got}")
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        if end > self._size:
            raise ValueError(f"{self._path} ends inside {name}: {max(0, self._size - begin)} of {end - begin} bytes")

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor` (contiguous, same dtype and number of elements) with the tensor called `name`."""
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

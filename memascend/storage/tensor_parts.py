"""Writing a safetensors file from tensors that arrive in parts and in any order.

The header is written first, so the position of every byte is known. The checksum of the whole file is combined from
those of its parts, as zlib's crc32_combine does: the checksum of A followed by B is that of A times x^(8 |B|) modulo
the polynomial, plus that of B.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memascend.storage.byte_views import byte_view
from memascend.storage.tensor_file import TensorLayout, open_anew, padding_after, tensor_header

_POLYNOMIAL = 0xEDB88320  # that of crc32, with the lowest power in the highest bit
_ONE, _BYTE = 1 << 31, 1 << 23  # x^0, x^8


class TensorPartsWriter:
    """Writes the tensors of `layouts`, whole or in parts, in any order; `close` fails unless all were written.

    The file is byte for byte that of `memascend.storage.tensor_file.TensorFileWriter`. `checksum` (crc32) and `size`
    describe it after `close`. Raises ValueError for a part that is out of range or written twice, and in `close` if one
    is missing; OSError if a write fails. Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        layouts: Sequence[TensorLayout],
        metadata: dict[str, str] | None = None,
        *,
        aligned: bool = False,
    ) -> None:
        self._path = path
        paddings = padding_after(layouts) if aligned else {}
        every = [each for layout in layouts for each in (layout, paddings.get(layout.name)) if each is not None]
        header = tensor_header(every, metadata, aligned=aligned)
        self._spans: dict[str, tuple[int, int]] = {}  # offset and bytes of each tensor
        place = len(header)
        for layout in every:
            self._spans[layout.name] = place, layout.nbytes
            place += layout.nbytes
        self._parts: dict[int, tuple[int, int]] = {}  # bytes and checksum of each part, by offset
        self.checksum = 0
        self.size = place
        self._file = open_anew(path)
        try:
            os.ftruncate(self._file.fileno(), self.size)
            self._write_at(0, memoryview(header))
            for padding in paddings.values():
                self.put(padding.name, 0, memoryview(bytes(padding.nbytes)))
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor."""
        self.put(name, 0, byte_view(tensor))

    def put(self, name: str, begin: int, data: memoryview) -> None:
        """Write `data` to the tensor called `name`, from its byte `begin` on."""
        place, nbytes = self._spans.get(name, (0, -1))
        if begin < 0 or begin + len(data) > nbytes:
            there = f"{nbytes} bytes" if nbytes >= 0 else "no such tensor"
            raise ValueError(f"{self._path}: bytes {begin} to {begin + len(data)} of {name} have no place: {there}")
        self._write_at(place + begin, data)

    def _write_at(self, place: int, data: memoryview) -> None:
        """Write data from byte `place` of the file on, and keep its checksum. Raises ValueError for a second time."""
        if not len(data):
            return
        if place in self._parts:
            raise ValueError(f"{self._path}: byte {place} was written already")
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], place + done)
        self._parts[place] = len(data), zlib.crc32(data)

    def close(self) -> None:
        """Check that everything was written, combine the checksum, sync the file to disk and close it."""
        try:
            self.checksum, place = 0, 0
            for begin, (nbytes, crc) in sorted(self._parts.items()):
                if begin != place:
                    break
                self.checksum, place = _joined(self.checksum, crc, nbytes), begin + nbytes
            if place != self.size:
                raise ValueError(f"{self._path}: byte {place} of {self.size} was not written")
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file, complete or not. Idempotent."""
        self._file.close()

    def __enter__(self) -> TensorPartsWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


_SHIFTS: dict[int, int] = {}  # x^(8 n) by n; most parts have one of a few sizes


def _joined(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32 of two concatenated byte strings from the crc32 of each."""
    if second_bytes not in _SHIFTS:
        if len(_SHIFTS) > 4096:
            _SHIFTS.clear()
        _SHIFTS[second_bytes] = _power_of_a_byte(second_bytes)
    return _product(_SHIFTS[second_bytes], first) ^ second


def _power_of_a_byte(count: int) -> int:
    """Return x^(8 count)."""
    result, square = _ONE, _BYTE
    while count:
        if count & 1:
            result = _product(result, square)
        square = _product(square, square)
        count >>= 1
    return result


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials modulo that of crc32."""
    result = 0
    while first:
        if first & _ONE:
            result ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return result

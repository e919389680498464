"""A safetensors file written in parts equals the one written in order, and its checksum is known without reading it."""

import errno
import os
import random
import zlib

import pytest
import torch
from safetensors.torch import load_file

from memascend.storage import tensor_parts
from memascend.storage.byte_views import byte_view
from memascend.storage.tensor_file import TensorFileWriter, TensorLayout
from memascend.storage.tensor_parts import TensorPartsWriter

SHAPES = {
    "matrix": (torch.bfloat16, (300, 70)),
    "odd": (torch.float32, (1001,)),
    "codes": (torch.uint8, (7, 3)),
    "nothing": (torch.float32, (0, 4)),
    "scalar": (torch.int64, ()),
}


def tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, 200, shape, generator=generator).to(dtype) for name, (dtype, shape) in SHAPES.items()
    }


def layouts():
    return [TensorLayout(name, dtype, shape) for name, (dtype, shape) in SHAPES.items()]


def parts_of(values, size):
    """Return (name, first byte, bytes) in a shuffled order."""
    found = []
    for name, value in values.items():
        view = byte_view(value)
        found += [(name, begin, view[begin : begin + size]) for begin in range(0, len(view), size)]
    random.Random(size).shuffle(found)
    return found


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("size", [1 << 20, 1000, 64])
def test_parts_written_in_any_order_make_the_same_file(tmp_path, aligned, size):
    values = tensors()
    with TensorFileWriter(tmp_path / "whole", layouts(), {"format": "pt"}, aligned=aligned) as whole:
        for name, value in values.items():
            whole.write(name, value)
    with TensorPartsWriter(tmp_path / "parts", layouts(), {"format": "pt"}, aligned=aligned) as parts:
        for name, begin, view in parts_of(values, size):
            parts.put(name, begin, view)
    expected = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "parts").read_bytes() == expected
    assert (parts.checksum, parts.size) == (whole.checksum, whole.size) == (zlib.crc32(expected), len(expected))
    for name, value in load_file(tmp_path / "parts").items():
        assert name.endswith(".padding") or torch.equal(value, values[name])


def test_missing_part_is_refused_with_its_byte_position(tmp_path):
    values = tensors()
    writer = TensorPartsWriter(tmp_path / "parts", layouts())
    for name, value in values.items():
        if name != "odd":
            writer.write(name, value)
    with pytest.raises(ValueError, match=r"parts: byte \d+ of \d+ was not written"):
        writer.close()


def test_misplaced_or_repeated_part_is_refused(tmp_path):
    made = TensorPartsWriter(tmp_path / "parts", layouts())
    with pytest.raises(ValueError, match="of other have no place: no such tensor"):
        made.put("other", 0, memoryview(b"x"))
    with pytest.raises(ValueError, match="bytes 4000 to 4008 of odd have no place: 4004 bytes"):
        made.put("odd", 4000, memoryview(bytes(8)))
    made.put("odd", 0, memoryview(bytes(4004)))
    with pytest.raises(ValueError, match="was written already"):
        made.put("odd", 0, memoryview(bytes(4)))
    made.abandon()


def test_short_write_is_continued(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(tensor_parts.os, "pwrite", lambda handle, data, at: write(handle, data[:97], at))
    values = tensors()
    with TensorPartsWriter(tmp_path / "parts", layouts()) as writer:
        for name, value in values.items():
            writer.write(name, value)
    assert zlib.crc32((tmp_path / "parts").read_bytes()) == writer.checksum


def test_full_disk_raises_oserror_and_leaves_no_open_file(tmp_path, monkeypatch):
    def full(handle, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tensor_parts.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        TensorPartsWriter(tmp_path / "parts", layouts())
    assert len(os.listdir("/proc/self/fd")) == before


def test_checksums_of_parts_of_any_length_combine():
    generator = random.Random(1)
    for length in (0, 1, 2, 255, 4096, 70001):
        first, second = generator.randbytes(1000), generator.randbytes(length)
        joined = tensor_parts._joined(zlib.crc32(first), zlib.crc32(second), length)
        assert joined == zlib.crc32(first + second)

"""The contents of a file after a power cut, from its contents at the beginning and a log of the writes since.

The log is that of `_C.FaultLayer.log_writes`. A drive promises one thing: what had been written when a flush began is
durable once the flush has returned. Any later write may be complete, lost or partial, in any order, but each sector of
512 bytes is either old or new.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

SECTOR = 512
WRITE, WRITTEN, FLUSH, FLUSHED = 1, 2, 3, 4
_HEADER = struct.Struct("<IIQqq")  # kind, unused, token, offset, bytes (csrc/core/fault_layer.h)


@dataclass
class Write:
    offset: int
    data: bytes
    ended: bool = False
    durable: bool = False


def replayed(log: bytes) -> list[Write]:
    """Return all writes in the order in which they began; a record that the log's end cuts off is ignored."""
    writes: list[Write] = []
    open_writes: dict[int, Write] = {}
    flushing: dict[int, list[Write]] = {}
    place = 0
    while place + _HEADER.size <= len(log):
        kind, _, token, offset, size = _HEADER.unpack_from(log, place)
        place += _HEADER.size
        if kind == WRITE:
            if place + size > len(log):
                break
            writes.append(Write(offset, log[place : place + size]))
            open_writes[token] = writes[-1]
            place += size
        elif kind == WRITTEN and token in open_writes:
            write = open_writes.pop(token)
            if size < 0:
                continue  # a failed write may have changed something, and promises nothing
            if size < len(write.data):
                write.data = write.data[:size]
            write.ended = True
        elif kind == FLUSH:
            flushing[token] = [write for write in writes if write.ended]
        elif kind == FLUSHED:
            for write in flushing.pop(token, []):
                write.durable = True
    return writes


def after_a_cut(before: bytes, log: bytes, keep: float, chance: random.Random) -> bytes:
    """Return the file's contents: every durable write, and each other one
    with probability `keep`, some only in part."""
    contents = bytearray(before)
    for write in replayed(log):
        if write.durable:
            _apply(contents, write.offset, write.data)
            continue
        if chance.random() >= keep:
            continue
        if chance.random() < 0.5:
            _apply(contents, write.offset, write.data)
            continue
        for begin in range(0, len(write.data), SECTOR):
            if chance.random() < 0.5:
                _apply(contents, write.offset + begin, write.data[begin : begin + SECTOR])
    return bytes(contents)


def _apply(contents: bytearray, offset: int, data: bytes) -> None:
    if offset + len(data) > len(contents):
        contents.extend(bytes(offset + len(data) - len(contents)))
    contents[offset : offset + len(data)] = data

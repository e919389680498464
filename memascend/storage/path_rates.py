"""Initial rates of a path, from a short benchmark at the start (MLP-Offload 3.3)."""

from __future__ import annotations

import contextlib
import errno
import time
import zlib
from collections.abc import Callable
from typing import Protocol

import torch

from memascend.storage.errors import StorageError
from memascend.storage.placement import Rates

__all__ = ["measure"]

PROBE_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
_KEY = "memascend: how fast is this path"
_LONG_S = 0.25  # for one piece


class Waited(Protocol):
    """A transfer that can be waited for."""

    def wait(self) -> object: ...


class Probed(Protocol):
    """The part of a tier that `measure` uses."""

    @property
    def free_bytes(self) -> int: ...
    def write(self, key: str, tensor: torch.Tensor) -> Waited: ...
    def read(self, key: str, tensor: torch.Tensor) -> Waited: ...
    def erase(self, key: str) -> bool: ...


def measure(tier: Probed, probe_bytes: int = PROBE_BYTES) -> Rates | None:
    """Return the rates at which `probe_bytes` are written and read in pieces; None if the path lacks free space.

    The pieces are in flight together. Needs `probe_bytes` of memory and of space meanwhile. If the first piece shows
    less than 16 MB/s twice, only that piece is measured. Raises StorageError if the path cannot be used, or returns
    other data than was written.
    """
    pieces = max(1, probe_bytes // _PIECE_BYTES)
    chance = torch.Generator().manual_seed(0)  # its own generator, so that training's random numbers do not change
    shape = (pieces, min(probe_bytes, _PIECE_BYTES))
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=chance)
    keys = [f"{_KEY} {number}" for number in range(pieces)]
    if tier.free_bytes < 2 * memory.nbytes:
        return None
    try:
        first = _seconds(tier.write, keys[:1], memory[:1])
        if first > _LONG_S:  # repeat, since a path that was busy for a moment would never be used
            first = min(first, _seconds(tier.write, keys[:1], memory[:1]))
        if first > _LONG_S:
            return Rates(memory[0].nbytes / _seconds_to_read(tier, keys[:1], memory[:1]), memory[0].nbytes / first)
        write = _seconds(tier.write, keys, memory)
        read = _seconds_to_read(tier, keys, memory)
        return Rates(memory.nbytes / read, memory.nbytes / write)
    finally:
        for key in keys:
            with contextlib.suppress(StorageError):
                tier.erase(key)


def _seconds_to_read(tier: Probed, keys: list[str], pieces: torch.Tensor) -> float:
    """Return the time to read back `pieces`, and check that the data is what was written."""
    written = [zlib.crc32(piece.numpy()) for piece in pieces]
    pieces.zero_()
    seconds = _seconds(tier.read, keys, pieces)
    if [zlib.crc32(piece.numpy()) for piece in pieces] != written:
        place = ", ".join(getattr(tier, "paths", ["a path"]))
        reason = "what was written is not what is read back: check the device or the mount (dmesg)"
        raise StorageError("check", place, 0, pieces.nbytes, pieces.nbytes, errno.EBADMSG, reason)
    return seconds


def _seconds(transfer: Callable[[str, torch.Tensor], Waited], keys: list[str], pieces: torch.Tensor) -> float:
    """Return the seconds that the transfers of all pieces take, all in flight together."""
    begin = time.perf_counter()
    for completion in [transfer(key, piece) for key, piece in zip(keys, pieces, strict=True)]:
        completion.wait()
    return max(time.perf_counter() - begin, 1e-6)

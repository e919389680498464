"""Asynchronous reads and writes of whole tensors in plain files, every completion audited.

Native threads transfer blocks of `block_bytes` past the page cache (O_DIRECT) wherever the file system, the address
and the length allow, and otherwise by a bounce buffer or the page cache: any tensor, any length, any offset.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import torch

from memascend import _C
from memascend.storage.errors import StorageError, raise_first

__all__ = ["EngineCounters", "FileEngine", "StorageError"]


@dataclass(frozen=True)
class EngineCounters:
    """Since the engine was made. `ops` are requests that ended; bounced and buffered bytes are part of the totals."""

    bytes_read: int
    bytes_written: int
    ops: int
    bounced_bytes: int
    buffered_bytes: int


class FileEngine:
    """Submit from any thread, then `wait()`. Requests are not ordered among each other.

    The engine keeps tensors in flight alive; their contents must not be changed (or, for reads, used) before `wait`
    returns. Files are not truncated: bytes outside the written range keep. Not usable in a forked child.
    """

    def __init__(self, threads: int = 4, block_bytes: int = 1 << 20) -> None:
        """`threads` in 1..256; `block_bytes` a positive multiple of 4096. Raises ValueError."""
        self.threads = threads
        self.block_bytes = block_bytes
        self._native = _C.FileEngine(threads, block_bytes)
        # Also at interpreter exit: what was submitted is written out.
        self._finalizer = weakref.finalize(self, self._native.shutdown)

    def async_read(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Fill the contiguous CPU `tensor` from `path`; returns the request's number. Raises ValueError."""
        return self._native.read(tensor, os.fspath(path), file_offset)

    def async_write(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the contiguous CPU `tensor` to `path`, made if missing; returns the request's number."""
        return self._native.write(tensor, os.fspath(path), file_offset)

    def wait(self) -> int:
        """Block until all requests have ended; returns how many did since the last call.

        Raises StorageError for the first failed request; the engine stays usable. Other threads run meanwhile.
        """
        completed, failures = self._native.wait()
        raise_first([(op, None, *rest) for op, *rest in failures])
        return completed

    def close(self) -> None:
        """End all requests and the threads; a later submission raises RuntimeError. `wait` still reports."""
        self._finalizer()

    def __enter__(self) -> FileEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return self._native.pending

    @property
    def bounce_buffer_bytes(self) -> int:
        """Host memory held for bouncing: 256 KiB a thread that has needed it."""
        return self._native.bounce_buffer_bytes

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters(**self._native.counters())

    @property
    def bytes_read(self) -> int:
        return self.counters.bytes_read

    @property
    def bytes_written(self) -> int:
        return self.counters.bytes_written

    @property
    def ops(self) -> int:
        return self.counters.ops

    @property
    def bounced_bytes(self) -> int:
        return self.counters.bounced_bytes

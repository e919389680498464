"""Asynchronous reads and writes of whole tensors in plain files, every completion audited.

Native threads transfer blocks of `block_bytes` past the page cache (O_DIRECT) wherever the file system, the address
and the length allow, and otherwise by a bounce buffer or the page cache: any tensor, any length, any offset.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch

from memascend import _C
from memascend.storage.engine import StorageEngine
from memascend.storage.errors import StorageError
from memascend.storage.leaving import end_engine

__all__ = ["FileEngine", "StorageError"]


class FileEngine(StorageEngine):
    """Submit from any thread, then wait. Requests are not ordered among each other.

    The engine keeps tensors in flight alive; their contents must not be changed (or, for reads, used) before the wait
    returns. Files are not truncated: bytes outside the written range keep. A cancelled write leaves the file as far as
    it had come. Not usable in a forked child.
    """

    _native: _C.FileEngine

    def __init__(
        self,
        threads: int = 4,
        block_bytes: int = 1 << 20,
        faults: _C.FaultLayer | None = None,
        require_direct: bool = False,
    ) -> None:
        """`threads` in 1..256; `block_bytes` a positive multiple of 4096. `require_direct`: a request on a file system
        that refuses O_DIRECT fails, where it goes through the page cache otherwise. `faults` is for tests: what stands
        between the engine and the kernel. Raises ValueError, RuntimeError (the system has no more threads).
        """
        self.threads = threads
        self.block_bytes = block_bytes
        self._native = _C.FileEngine(threads, block_bytes, require_direct, faults)
        self._pid = os.getpid()
        # Also at interpreter exit: what was submitted is written out.
        self._finalizer = weakref.finalize(self, end_engine, self._native, _place_of(self._native), self._pid)

    def async_read(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Fill the contiguous CPU `tensor` from `path`; returns the request's number. Raises ValueError."""
        return self._native.read(tensor, os.fspath(path), file_offset)

    def async_write(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the contiguous CPU `tensor` to `path`, made if missing; returns the request's number."""
        return self._native.write(tensor, os.fspath(path), file_offset)

    def close(self) -> None:
        """End all requests and the threads; a later submission raises RuntimeError. `wait` still reports.

        After Ctrl-C, what hangs is left to the end of the process, with a warning that names the file: the memory of
        its transfers must not be used again.
        """
        self._finalizer()

    def _place(self) -> str:
        return self._native.pending_path

    def __enter__(self) -> FileEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bounce_buffer_bytes(self) -> int:
        """Host memory held for bouncing: 256 KiB per thread that has needed it."""
        return self._native.bounce_buffer_bytes


def _place_of(native: _C.FileEngine) -> Callable[[], str]:
    return lambda: native.pending_path

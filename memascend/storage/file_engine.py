"""Asynchronous reads and writes of whole tensors in regular files, with every completion checked.

Native threads transfer blocks of `block_bytes`, bypassing the page cache (O_DIRECT) if the file system, the address
and the length allow it, and otherwise through a bounce buffer or the page cache: any tensor, length and offset works.
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
    """Reads and writes tensors in files. Submit from any thread, then wait; requests are not ordered.

    The engine keeps tensors in flight alive; their contents must not be changed (or, for reads, used) before the wait
    returns. Files are not truncated: bytes outside the written range are kept. A cancelled write leaves the file
    partially written. Not usable in a forked child.
    """

    _native: _C.FileEngine

    def __init__(
        self,
        threads: int = 4,
        block_bytes: int = 1 << 20,
        faults: _C.FaultLayer | None = None,
        require_direct: bool = False,
    ) -> None:
        """Start the native threads.

        `threads` is in 1..256; `block_bytes` is a positive multiple of 4096. `require_direct`: a request on a file
        system that refuses O_DIRECT fails; otherwise it uses the page cache. `faults` is for tests: a layer between the
        engine and the kernel that injects faults. Raises ValueError, RuntimeError (the system has no more threads).
        """
        self.threads = threads
        self.block_bytes = block_bytes
        self._native = _C.FileEngine(threads, block_bytes, require_direct, faults)
        self._pid = os.getpid()
        # Also runs at interpreter exit: submitted writes complete.
        self._finalizer = weakref.finalize(self, end_engine, self._native, _place_of(self._native), self._pid)

    def async_read(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Fill the contiguous CPU `tensor` from `path`; return the request's number. Raises ValueError."""
        return self._native.read(tensor, os.fspath(path), file_offset)

    def async_write(self, tensor: torch.Tensor, path: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the contiguous CPU `tensor` to `path`, created if missing; return the request's number."""
        return self._native.write(tensor, os.fspath(path), file_offset)

    def close(self) -> None:
        """End all requests and the threads; a later submission raises RuntimeError. `wait` still reports outcomes.

        After Ctrl-C, requests that hang are left until the process ends, with a warning that names the file: the memory
        of their transfers must not be used again.
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
        """Host memory of the bounce buffers: 256 KiB for each thread that has needed one."""
        return self._native.bounce_buffer_bytes


def _place_of(native: _C.FileEngine) -> Callable[[], str]:
    return lambda: native.pending_path

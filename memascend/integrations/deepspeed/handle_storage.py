"""DeepSpeed's two I/O handles as the storage of a stream of weights (:mod:`memascend.engine`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch


class HandleStorage:
    """Storage that reads by one handle and writes by another. Thread-safe.

    A handle can only be waited for as a whole, so all its transfers in flight end together. Nothing else may use the
    handles at the same time.
    """

    def __init__(self, reads: Any, writes: Any, path_of: Callable[[Hashable], str]) -> None:
        self._reads, self._writes = _Handle(reads.async_pread, reads.wait), _Handle(writes.async_pwrite, writes.wait)
        self._path_of = path_of

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> _Batch:
        """Start to fill ``tensor`` with the one under ``key``; ``priority`` has no effect. Raises RuntimeError if
        refused."""
        return self._reads.submit(tensor, self._path_of(key))

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> _Batch:
        """Start to write ``tensor`` under ``key``; ``priority`` has no effect. Raises RuntimeError if refused."""
        return self._writes.submit(tensor, self._path_of(key))


class _Handle:
    """One handle, and the batch of the transfers in flight on it. Thread-safe."""

    def __init__(self, start: Callable[..., int], wait: Callable[[], int]) -> None:
        self._start, self.wait_for_all = start, wait
        self.lock = threading.Lock()
        self._batch = _Batch(self)

    def submit(self, tensor: torch.Tensor, path: str) -> _Batch:
        with self.lock:
            if self._batch.ended:
                self._batch = _Batch(self)
            refused = self._start(tensor, path, 0)
            if refused:
                raise RuntimeError(f"memascend: the transfer of {path} ({tensor.nbytes} bytes) was refused: {refused}")
            self._batch.requests += 1
            return self._batch


class _Batch:
    """The completion of all transfers submitted to a handle between two waits."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle
        self.requests = 0
        self.ended = False
        self._failure: Exception | None = None
        self._callbacks: list[Callable[[_Batch], object]] = []

    def done(self) -> bool:
        return self.ended

    def add_done_callback(self, function: Callable[[_Batch], object]) -> None:
        """Call `function` at the end, on the thread that waits, because no thread watches a handle."""
        with self._handle.lock:
            if not self.ended:
                self._callbacks.append(function)
                return
        function(self)

    def wait(self) -> None:
        """Wait for all transfers of the handle, run the callbacks, and raise the error if any transfer failed."""
        callbacks: list[Callable[[_Batch], object]] = []
        with self._handle.lock:
            if not self.ended:
                try:
                    ended = self._handle.wait_for_all()
                    if ended != self.requests:
                        raise RuntimeError(
                            f"memascend: {self.requests} transfers were submitted, but {ended} completed"
                        )
                except Exception as error:
                    self._failure = error
                self.ended = True
                callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            function(self)
        if self._failure is not None:
            raise self._failure

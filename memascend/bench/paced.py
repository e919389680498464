"""An SSD of known speed, in the process that is measured: what it is asked for is done no sooner than it could be.

Requests are served one after the other, reads and writes by one server, those with the larger priority first: the
device that the simulator plays and that Eqs. 2, 4 and 5 of LoHan describe. The transfers are real ones, to a path that
has to be faster; `late_share` says of how much of the bytes it was not. The kernel's own controller cannot stand in for
this: it lets what a tenth of a second may move pass at once, in each direction by itself, so that a chain of
small reads and writes takes as long as the longer of them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from memascend.storage.completion import Completion, Promise, all_of
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.tier import Transferred


class Server:
    """Of `rate` bytes a second. Thread-safe; its thread ends with `close`."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._asked: list[tuple[int, int, float, int, Promise]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._bytes = self._late_bytes = 0
        self._thread = threading.Thread(target=self._serve, name="memascend-paced", daemon=True)
        self._thread.start()

    def serve(self, nbytes: int, priority: int) -> Promise:
        """Ends when the server is done with it."""
        promise = Promise(f"{nbytes} bytes at {self.rate:.3g} a second")
        with self._changed:
            heapq.heappush(self._asked, (-priority, next(self._count), time.perf_counter(), nbytes, promise))
            self._changed.notify()
        return promise

    def moved(self, nbytes: int, served: Promise) -> None:
        """The transfer itself has ended."""
        with self._changed:
            self._bytes += nbytes
            self._late_bytes += nbytes * served.done()

    @property
    def late_share(self) -> float:
        """Of all bytes, those that the path moved later than this server had them."""
        return self._late_bytes / self._bytes if self._bytes else 0.0

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        free = 0.0
        while True:
            with self._changed:
                while not self._asked and not self._closed:
                    self._changed.wait()
                if not self._asked:
                    return
                _, _, asked, nbytes, promise = heapq.heappop(self._asked)
            free = max(free, asked) + nbytes / self.rate
            if (left := free - time.perf_counter()) > 0 and not self._closed:
                time.sleep(left)
            promise.set_result()


class PacedTier(DirectTier):
    """Whose transfers end when the path and the server have done them."""

    server: ClassVar[Server]

    def read(self, key: str, tensor: Any, *, offset: int = 0, priority: int = 0) -> Completion:
        return self._paced(super().read(key, tensor, offset=offset, priority=priority), tensor.nbytes, priority)

    def write(self, key: str, tensor: Any, *, offset: int = 0, priority: int = 0) -> Completion:
        return self._paced(super().write(key, tensor, offset=offset, priority=priority), tensor.nbytes, priority)

    def _paced(self, moving: Completion, nbytes: int, priority: int) -> Completion:
        served = self.server.serve(nbytes, priority)
        moving.add_done_callback(lambda _: self.server.moved(nbytes, served))
        return all_of([moving, served]).then(lambda values: values[0])

    @property
    def transferred(self) -> Transferred:
        """With the seconds that the server takes."""
        found, rate = super().transferred, self.server.rate
        return Transferred(found.bytes_read, found.bytes_written, found.bytes_read / rate, found.bytes_written / rate)


@contextmanager
def paced(rate: float) -> Iterator[Server]:
    """Streaming engines that are made in the block share one server. Not for two blocks at a time."""
    from memascend.engine import beside, home

    server = PacedTier.server = Server(rate)
    modules = (home, beside)
    for module in modules:
        module.DirectTier = PacedTier
    try:
        yield server
    finally:
        for module in modules:
            module.DirectTier = DirectTier
        server.close()

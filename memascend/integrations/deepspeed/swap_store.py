"""DeepSpeed's swap files as tensors in the direct NVMe engine (MemAscend IV-E), under the same names.

DeepSpeed's swappers know files: a path for each tensor under ``<nvme_path>/zero_stage_3``. :class:`SwapStore` keeps
what they write there in one volatile engine, by path as the key, in a preallocated file in that folder or on devices.
Any other path (a checkpoint written through DeepNVMe) stays a file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from memascend.memory.ledger import Ledger
from memascend.storage.devices import inspect
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig, room_for
from memascend.storage.errors import StorageError

from .derived import IoSettings

SWAP_FOLDER = "zero_stage_3"  # DeepSpeed's, in nvme_path
_LEAST_GROWTH_BYTES = 64 << 20
_GROWTH, _MOST_GROWTH_BYTES = 1.25, 1 << 30

# What forward and backward wait for goes first; nothing waits for a write until its buffer is needed again.
PARAMETER_READ, OPTIMIZER_READ, WRITE = 2, 1, 0


class _Place:
    """One volatile engine, in a file of its own or on devices; opened when first needed. Thread-safe."""

    def __init__(self, folder: Path, devices: Sequence[str], io: IoSettings, ledger: Ledger) -> None:
        self._folder, self._devices, self._io, self._ledger = folder, devices, io, ledger
        self._booked: list[int] = []
        self._engine: DirectEngine | None = None
        self._sizes: dict[str, int] = {}
        self._used_bytes = self._grown_bytes = 0
        self._lock = threading.RLock()

    @property
    def engine(self) -> DirectEngine:
        if (there := self._engine) is not None:
            return there
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
                self._booked = [self._book(*buffer) for buffer in self._engine.bounce_buffers]
            return self._engine

    @property
    def paths(self) -> list[str]:
        return [] if self._engine is None else self._engine.paths

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def _open(self) -> DirectEngine:
        config = DirectEngineConfig(
            workers=max(1, self._io.workers // 2),
            block_bytes=self._io.block_bytes,
            depth=self._io.queue_depth,
            volatile=True,
        )
        if self._devices:
            return DirectEngine(self._devices, inspect(self._devices[0]).owner or "", config)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._grown_bytes = _LEAST_GROWTH_BYTES
        return DirectEngine.create_file_store(self._folder, _LEAST_GROWTH_BYTES, "memascend", config)

    def _book(self, address: int, nbytes: int) -> int:
        """DeepSpeed reads into slices of its buffers, at any address: what such transfers go through is the host's."""
        return self._ledger.record(
            "bounce buffers", "nvme_engine_buffers", nbytes, allocator="direct engine", address=address
        )

    def bytes_of(self, path: str) -> int:
        return self._sizes.get(path, 0)

    def make_room(self, path: str, nbytes: int) -> None:
        with self._lock:
            before = self._sizes.get(path)
            if before == nbytes:
                return
            self._used_bytes += room_for([nbytes]) - (0 if before is None else room_for([before]))
            self._sizes[path] = nbytes
            if self._used_bytes <= self._grown_bytes:
                return
            try:
                more = min(int(self._used_bytes * (_GROWTH - 1)), _MOST_GROWTH_BYTES)
                self._grow(self._used_bytes + max(_LEAST_GROWTH_BYTES, more))
            except StorageError:  # not that much: then just what is needed
                self._grow(self._used_bytes)

    def reserve(self, more_bytes: int) -> None:
        with self._lock:
            self._grow(self._used_bytes + more_bytes)

    def _grow(self, size_bytes: int) -> None:
        """Space on devices is what it is: a write for which there is none fails."""
        engine = self.engine
        if not self._devices and size_bytes > self._grown_bytes:
            engine.grow(size_bytes)
            self._grown_bytes = size_bytes

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
            for entry in self._booked:
                self._ledger.close(entry)
            self._engine, self._sizes, self._booked = None, {}, []
            self._used_bytes = self._grown_bytes = 0


Request = tuple[DirectEngine, int]


class SwapStore:
    """The swapped tensors of this process, by path. Thread-safe.

    Args:
        folders: the ``nvme_path`` values; tensors under ``SWAP_FOLDER`` in one of them are the store's, and lie in a
            file there.
        ledger: where the engines' own buffers are booked, from their first use to ``close``.
        devices: raw devices of one formatted store, in place of the files.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        io: IoSettings,
        ledger: Ledger,
        *,
        devices: Sequence[str] = (),
    ) -> None:
        distinct = list(dict.fromkeys(Path(folder).absolute() / SWAP_FOLDER for folder in folders))
        places = [_Place(folder, devices, io, ledger) for folder in (distinct[:1] if devices else distinct)]
        self._places = {f"{folder}{os.sep}": places[0 if devices else i] for i, folder in enumerate(distinct)}
        self._place_of: dict[str | os.PathLike[str], _Place] = {}  # of paths asked for before

    def _place(self, path: str | os.PathLike[str]) -> _Place | None:
        known = self._place_of.get(path)
        if known is not None:
            return known
        absolute = os.path.abspath(path)
        place = next((place for folder, place in self._places.items() if absolute.startswith(folder)), None)
        if place is not None and os.path.isabs(path):
            self._place_of[path] = place
        return place

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether a tensor of this path is the store's."""
        return self._place(path) is not None

    def write(self, path: str, tensor: torch.Tensor, offset: int = 0) -> Request:
        """Write ``tensor`` (contiguous, on the CPU) under ``path``, which the store holds. Raises StorageError."""
        place = self._place(path)
        if offset:
            return place.engine, place.engine.write_part(path, tensor, offset, WRITE)
        place.make_room(path, tensor.nbytes)
        return place.engine, place.engine.write(path, tensor, WRITE)

    def read(self, path: str, tensor: torch.Tensor, offset: int = 0, padding: int = 0) -> Request:
        """Fill ``tensor`` from what was written under ``path``. Raises ValueError.

        Of its end, less than ``padding`` bytes may not be there, and are left as they are: DeepSpeed 0.16 writes a
        tensor and reads it with the padding up to its alignment, which a file still has from an earlier write.
        """
        priority = OPTIMIZER_READ if f"{os.sep}optimizer{os.sep}" in path else PARAMETER_READ
        place = self._place(path)
        there = place.bytes_of(path) - offset
        if there < tensor.nbytes < there + padding:
            tensor = tensor.view(-1)[: there // tensor.element_size()]
        return place.engine, place.engine.read(path, tensor, offset, priority)

    def wait(self, requests: Iterable[Request]) -> None:
        """Until all of ``requests`` have ended, failed ones included. Then raises the first StorageError, if any."""
        failure: StorageError | None = None
        for engine, request in requests:
            try:
                engine.wait(request)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def reserve(self, nvme_path: str | os.PathLike[str], more_bytes: int) -> None:
        """Make the file in ``nvme_path`` ready for ``more_bytes`` to come, so that a full disk is found now.

        Raises StorageError.
        """
        self._places[f"{Path(nvme_path).absolute() / SWAP_FOLDER}{os.sep}"].reserve(more_bytes)

    @property
    def paths(self) -> list[str]:
        """The files or devices; empty before the first write."""
        return [path for place in dict.fromkeys(self._places.values()) for path in place.paths]

    @property
    def used_bytes(self) -> int:
        """What the tensors take, whole units each; the files are preallocated a little larger."""
        return sum(place.used_bytes for place in dict.fromkeys(self._places.values()))

    def close(self) -> None:
        """End all requests and remove the files. A later write opens an empty store."""
        for place in self._places.values():
            place.close()

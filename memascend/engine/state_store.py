"""The store of a model's weights and states during training: one file with the last completed and the current step.

A write goes to fresh space, and the previous version stays until `commit` replaces all tensors at once: after a kill or
a power cut the file holds all tensors of one completed step (28 bytes per parameter for both versions in 16-bit
training, without extra writes). A step that cannot be kept is rolled back by the same mechanism. With one version a
step is committed in parts instead: either the data needed to redo it is stored too (`in_place_update`), or, without a
redo (`replace_within`), the first part marks the states as partial until the step is completed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from memascend.engine import open_stores
from memascend.engine.errors import CommittedAfterAll, InterruptedUpdate, NotThisModel
from memascend.engine.snapshot import Snapshot
from memascend.engine.state_files import (
    CHUNK_BYTES,
    FILE,
    META_BYTES,
    StoreSpace,
    allocate,
    holds_states,
    in_chunks,
    owner_of,
    remove,
    take_space,
    undo_creation,
    with_control_folder,
)
from memascend.storage import interrupts
from memascend.storage.completion import Completion
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError
from memascend.storage.native import _C
from memascend.storage.tier import Transferred

log = logging.getLogger("memascend")

_META, _BUFFERS = "completed step", "buffers"
_NOT_STATES = {_META, _BUFFERS}
_PARTIAL = "torn"  # a key of the facts; its value is part of the file format
_DEAD_S = 30.0  # a killed process keeps its space until the kernel has released its rings


class StateStore:
    """A folder with one store. Thread-safe, except that nothing else may run during `commit`, `roll_back` and `close`.

    Why one file with a log instead of a file per tensor: a step replaces thousands of tensors, and all of them must
    appear at once or not at all. One commit record does that; a rename per tensor does not.

    A `Storage` for `WeightStream`: keys are any hashables whose `str` differ. The checksum of every write is kept.
    Reads are verified against it until every tensor that an earlier process left has been read once; after that reads
    are not verified, since this process has written the data itself and the engine has checked its writes.
    """

    def __init__(
        self, folder: Path, owner: str, config: DirectEngineConfig, faults: Any = None, *, new: bool = False
    ) -> None:
        self.folder, self._owner, self._config, self._faults = folder, owner, config, faults
        self._compares = not new  # whether reads are verified against their checksums
        self.opened_by = os.getpid()
        self._made: list[Path] = []  # folders that `create` has made
        self._registered: list[torch.Tensor] = []
        self._tier = self._open()
        self._is_open = True  # False after a failed reopening
        # Tensors of an earlier process that were not read yet.
        self._unread = {key for key, _ in self._tier.engine.items()} - _NOT_STATES
        self._moved_before = Transferred(0, 0, 0.0, 0.0)
        self._spare_bytes: int | None = None
        self._replacing = threading.Lock()
        self._replaced: deque[tuple[int, Completion]] = deque()  # bytes and writes since the last commit
        self._facts: dict[str, Any] = {}  # facts of the last completed step
        self._partial = self._is_missed = False
        self._committing: dict[str, Any] | None = None  # facts of a commit that was begun and may not have ended
        self._snapshot: Snapshot | None = None
        self._parts_bytes = 0  # bytes read for snapshots
        self._parts = threading.Lock()  # taken while a part is read for the snapshot, and while the tier is replaced
        open_stores.add(self)

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        owner: str,
        space: StoreSpace,
        *,
        released: int = 0,
        faults: Any = None,
    ) -> StateStore:
        """Create a store in the new or empty `folder`, and allocate all of `space`.

        `owner`: a string that identifies what the states belong to; `open` must be called with the same. `released`:
        bytes on the same file system that the caller frees while it fills the store; if there are any, only writes
        allocate space, and `take_space` allocates the rest. Raises StorageError if the disk has not enough space, with
        nothing left behind, and ValueError for a folder that is not empty, is in use, or cannot be created.
        """
        folder = Path(folder)
        if open_stores.is_open(folder):
            raise ValueError(open_stores.in_use(folder))
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty: name another folder for the states, or remove it")
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be created ({error.strerror}): name a folder on the SSD") from None
        path = folder / FILE
        try:
            allocate(path, space.nbytes, space.versions, released)
            _C.storage_format([str(path)], owner, [], CHUNK_BYTES, space.log_bytes)
            store = cls(folder, owner, with_control_folder(folder), faults, new=True)
        except BaseException:
            undo_creation(folder, made)
            raise
        store._made = made
        return store

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        owner: str,
        *,
        faults: Any = None,
    ) -> StateStore:
        """Open the store of a process that ended or was killed. Raises NotThisModel for another owner or no store,
        ValueError if it is in use, and StorageError."""
        folder = Path(folder)
        open_stores.require_not_open(folder)
        found = owner_of(folder)
        if found != owner:
            what = "no states" if found is None else f"states of {found!r}"
            raise NotThisModel(f"{folder} holds {what}, but {owner!r} was requested: name another folder")
        return cls(folder, owner, with_control_folder(folder), faults)

    def take_space(self) -> None:
        """Allocate the space of the whole file, as far as it is not allocated yet; its contents stay. Raises
        StorageError."""
        path = self.folder / FILE
        with open(path, "r+b") as file:
            take_space(file, path, os.fstat(file.fileno()).st_size)

    def _open(self) -> DirectTier:
        """Open the store's file. Raises ValueError if another process uses it."""
        config = self._config
        if not self._compares and config.checksums == "auto":
            config = dataclasses.replace(config, checksums="write")
        tier = DirectTier.on_devices([self.folder / FILE], self._owner, config, self._faults)
        try:
            deadline = time.monotonic() + _DEAD_S
            while tier.engine.space().processes > 1:
                interrupts.check()
                gc.collect()  # the other one may be a dropped store of this process, with transfers in flight
                if time.monotonic() > deadline:
                    raise ValueError(f"{self.folder} is in use by another process: wait for it, or name another folder")
                time.sleep(0.02)
            tier.engine.collect()
            for tensor in self._registered:
                tier.register(tensor)
        except BaseException:
            tier.close()
            raise
        return tier

    def _reopen(self) -> None:
        """Close the file and open it again, which discards all that was not committed."""
        with self._no_part_is_read():
            if self._is_open:
                self._moved_before = Transferred(*self._transferred, 0.0, 0.0)
                self._is_open = False
                self._tier.close()
            if self._tier.left is not None:  # the tier gave up on requests that may still be in flight
                raise self._tier.left
            self._tier = self._open()
            self._is_open = True

    @contextlib.contextmanager
    def _no_part_is_read(self) -> Iterator[None]:
        """Return a context in which no thread reads a part of the snapshot."""
        interrupts.wait(lambda timeout_s: self._parts.acquire(timeout=-1 if timeout_s is None else timeout_s))
        try:
            yield
        finally:
            self._parts.release()

    # -- storage -------------------------------------------------------------------------------------------------------

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the tensor was written, committed or not."""
        return self._tier.size_of(str(key)) is not None

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        self._unread.discard(str(key))
        return self._tier.read(str(key), tensor, priority=priority)

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        """Start writing a tensor; may first wait for a snapshot, and commit earlier writes (`replace_within`)."""
        self.make_way(key)
        if self._spare_bytes is None or self._tier.size_of(str(key)) is None:
            return self._tier.write(str(key), tensor, priority=priority)
        with self._replacing:
            size = in_chunks(tensor.nbytes)
            self._make_space(size)
            written = self._tier.write(str(key), tensor, priority=priority)
            self._replaced.append((size, written))
        return written

    # -- a snapshot, for a save that copies the tensors while training goes on -----------------------------------------

    def take_snapshot(self, keys: Iterable[str]) -> Snapshot:
        """Return a snapshot of the tensors of `keys` as they were last committed: a write to one of them waits until
        the tensor was copied (`read_part`). It lasts until its `end`. Raises RuntimeError if another snapshot has not
        ended, or if there are uncommitted writes."""
        if self._snapshot is not None and not self._snapshot.ended:
            raise RuntimeError(f"{self.folder}: there is a snapshot already: end it first")
        if self._tier.engine.uncommitted:
            raise RuntimeError(f"{self.folder}: a step is in progress, whose states may change: complete it first")
        self._snapshot = Snapshot(keys)
        return self._snapshot

    def make_way(self, key: Hashable) -> None:
        """Wait until the snapshot, if there is one, no longer needs the tensor. Any thread."""
        if self._snapshot is not None:
            self._snapshot.make_way(str(key))

    def size_of(self, key: str) -> int:
        """Return the size in bytes of a tensor that was written."""
        size = self._tier.size_of(key)
        assert size is not None, key
        return size

    def read_part(self, key: str, tensor: torch.Tensor, offset: int) -> None:
        """Fill `tensor` with the bytes of a snapshot's tensor from `offset` on; complete on return. Any thread, also
        during `commit` and `roll_back`. Raises StorageError, also for a damaged tensor: one that was not verified since
        the store was opened is verified first."""
        with self._parts:
            if not offset and self._compares and key in self._unread:
                for problem in self._tier.engine.verify([key]).values():
                    raise StorageError("read", str(self.folder), 0, tensor.nbytes, 0, None, problem, key=key)
            self._tier.read(key, tensor, offset=offset).wait()
            self._parts_bytes += tensor.nbytes

    # -- one version ---------------------------------------------------------------------------------------------------

    def replace_within(self, spare_bytes: int) -> None:
        """Limit second versions to `spare_bytes` from now on: a step that writes more is committed in parts, and from
        the first part to its `commit` the states are partial (`InterruptedUpdate`). Call it before the next write."""
        self._spare_bytes = spare_bytes

    def _make_space(self, size: int) -> None:
        """Commit earlier writes, as soon as they have ended, until `size` more bytes fit into the spare space."""
        assert self._spare_bytes is not None
        used = sum(each for each, _ in self._replaced)
        if used + size <= self._spare_bytes:
            return
        while self._replaced and (used + size > self._spare_bytes or self._replaced[0][1].done()):
            each, written = self._replaced.popleft()
            written.wait()
            used -= each
        if not self._partial:  # the mark goes into the commit of the first part, which is atomic
            self._write_meta({**self._facts, _PARTIAL: True})
            self._partial = True
        self._tier.commit()

    def register(self, tensor: torch.Tensor) -> bool:
        """Register long-lived memory with the engine's rings until `close`, as `DirectEngine.register_buffer` does."""
        self._registered.append(tensor)
        return self._tier.register(tensor)

    @property
    def bounce_buffers(self) -> list[tuple[int, int]]:
        """Bounce buffers of the I/O engine in host memory, as (address, bytes)."""
        return self._tier.engine.bounce_buffers

    @property
    def since_opened(self) -> Transferred:
        """Bytes moved by the I/O engine and its rates since the file was last opened; a rollback resets them."""
        return self._tier.transferred

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written since the store was opened, without the reads for snapshots."""
        read, written = self._transferred
        return read - self._parts_bytes, written

    @property
    def _transferred(self) -> tuple[int, int]:
        before = self._moved_before
        if not self._is_open:
            return before.bytes_read, before.bytes_written
        now = self._tier.transferred
        return now.bytes_read + before.bytes_read, now.bytes_written + before.bytes_written

    # -- steps ---------------------------------------------------------------------------------------------------------

    def commit(self, facts: dict[str, Any]) -> None:
        """Make all writes and `facts` the completed step, atomically. The caller has waited for the writes.

        `facts`: JSON of at most `META_BYTES` (1 MiB), or ValueError. After a StorageError the completed step is still
        the previous one, and the writes of this step are uncommitted: `roll_back` discards them. After an interrupt it
        may be either step: `roll_back` finds out which.
        """
        facts = json.loads(_as_json(facts))
        try:
            self._committing = facts
            self._write_meta(facts)
            self._tier.commit()
        except Exception:  # an error of the drive; after an interrupt, a BaseException, the outcome stays open
            self._committing = None
            raise
        self._replaced.clear()
        self._facts, self._partial = facts, False
        self._committing = None
        if not self._is_missed and not holds_states(self.folder):
            self._is_missed = True
            log.warning(
                "memascend: %s, the folder of the states, was removed or moved. If it was removed, this training is "
                "lost when the process ends: save what you need (the model's state_dict()) before",
                self.folder,
            )

    @property
    def all_compared(self) -> bool:
        """Whether every tensor was verified once while reads are still verified: `compare_no_more` saves that work."""
        return self._compares and not self._unread

    def compare_no_more(self) -> None:
        """Stop verifying reads: every tensor was read once or written by this process. Reopens the file, so that
        nothing may be in flight or uncommitted."""
        self._compares = False
        self._reopen()

    def require_space_for(self, facts: dict[str, Any]) -> None:
        """Raise ValueError if `commit` cannot keep `facts`: not JSON, or more than `META_BYTES` (1 MiB)."""
        _as_json(facts)

    def _write_meta(self, facts: dict[str, Any]) -> None:
        raw = _as_json(facts)
        self._tier.write(_META, torch.frombuffer(bytearray(raw), dtype=torch.uint8)).wait()

    def write_buffers(self, raw: bytes | memoryview | None) -> None:
        """Write a model's buffers, as bytes, for the next commit; None: keep none from then on. They take two versions
        from `StoreSpace.slack`."""
        if raw is None:
            self._tier.erase(_BUFFERS)
        else:
            self._tier.write(_BUFFERS, torch.frombuffer(bytearray(raw), dtype=torch.uint8)).wait()

    def kept_buffers(self) -> bytes | None:
        """Return the model's buffers as they were last written, or None if they were not."""
        return self._bytes_of(_BUFFERS)

    def commit_parts(self) -> None:
        """Make all writes, which the caller has waited for, the tensors' only version; the facts stay as they are."""
        self._tier.commit()

    def forget_step(self) -> None:
        """Erase the completed step; there is none until the next `commit`."""
        self._tier.erase(_META)
        self._tier.commit()
        self._partial = True

    def erase(self, keys: Iterable[str]) -> None:
        """Erase tensors with the next commit; unknown keys are ignored."""
        for key in keys:
            self._tier.erase(key)

    def completed(self) -> dict[str, Any] | None:
        """Return the facts of the last completed step, or None if there is none. Raises InterruptedUpdate if the states
        are partial."""
        found = self._kept()
        if found is None:
            return None
        if found.get(_PARTIAL):
            raise InterruptedUpdate.of(self.folder)
        self._facts = found
        return found

    def _kept(self) -> dict[str, Any] | None:
        raw = self._bytes_of(_META)
        return None if raw is None else json.loads(raw)

    def _bytes_of(self, key: str) -> bytes | None:
        size = self._tier.size_of(key)
        if size is None:
            return None
        raw = torch.empty(size, dtype=torch.uint8)
        self._tier.read(key, raw).wait()
        return bytes(raw.numpy())

    @property
    def update_was_cut_off(self) -> bool:
        """Whether the last commit is part of an interrupted update, which `StreamingEngine.resume` completes."""
        return "redo" in self._facts

    def roll_back(self) -> None:
        """Discard everything uncommitted. Nothing may be in flight. After an interrupted commit, the step that the file
        holds is the completed one.

        Raises InterruptedUpdate if the file holds only a part of a step, and CommittedAfterAll if the drive has kept a
        commit that it reported as failed."""
        if self._partial and self._spare_bytes is not None and self._committing is None:
            raise InterruptedUpdate.of(self.folder)
        facts, partial, begun = self._facts, self._partial, self._committing
        self._reopen()
        self._replaced.clear()
        if begun is not None and self._kept() == begun:
            self._facts, self._partial, self._committing = begun, False, None
            return
        self._committing = None
        if partial and self._spare_bytes is not None:
            raise InterruptedUpdate.of(self.folder)
        if not partial and (self.completed() or {}) != facts:
            raise CommittedAfterAll(
                f"{self.folder}: the drive failed while a step was being completed, but the step was saved: close the "
                "engine and resume, which continues from it"
            )

    # -- end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file; the committed step stays. Ends the snapshot, if there is one. Idempotent."""
        if self._snapshot is not None:
            self._snapshot.end()
        with self._no_part_is_read():
            self._tier.close()
        open_stores.discard(self)
        self._registered.clear()

    def destroy(self) -> None:
        """Close, and remove the store's files, and the folder if it is empty then."""
        self.close()
        remove(self.folder)

    def undo(self) -> None:
        """Close, and remove what `create` has made; a folder that existed before stays."""
        self.close()
        undo_creation(self.folder, self._made)


def _as_json(facts: dict[str, Any]) -> bytes:
    try:
        raw = json.dumps(facts).encode()
    except TypeError as error:
        raise ValueError(f"the metadata (or the note) of a step must be JSON: {error}") from error
    if len(raw) > META_BYTES:
        raise ValueError(
            f"the metadata (or the note) of a step takes {len(raw)} bytes of JSON, and {META_BYTES} are reserved: "
            "store less there"
        )
    return raw


def stored_tensors(folder: str | os.PathLike[str]) -> dict[str, tuple[str, int]]:
    """Return (dtype, bytes) of each tensor of the store in the folder, by key, whatever its owner."""
    owner = owner_of(folder)
    assert owner is not None, folder
    store = StateStore(Path(folder), owner, with_control_folder(Path(folder)))
    try:
        return {key: (each.dtype, each.bytes) for key, each in store._tier.engine.items() if key not in _NOT_STATES}
    finally:
        store.close()


def kept_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts kept with the last completed step of the store in the folder, whatever its owner; empty if there
    are none. A step that `resume` will complete counts as completed.

    Raises ValueError if the store is in use, and InterruptedUpdate if its states are partial.
    """
    folder = Path(folder)
    owner = owner_of(folder)
    if owner is None:
        return {}
    open_stores.require_not_open(folder)
    store = StateStore(folder, owner, with_control_folder(folder))
    try:
        kept = store.completed() or {}
        facts: dict[str, Any] = kept.get("redo", kept).get("facts", {})
        return facts
    finally:
        store.close()

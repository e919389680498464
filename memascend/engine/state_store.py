"""Where a model lives while it is trained: a store in one file, with the last completed step and the current one.

A write goes to fresh space and the version before stays until `commit` replaces all of them at once: whatever a kill or
a power cut leaves, the tensors of one completed step are there, whole (28 bytes per parameter for both versions in
16-bit training, without extra writes). A step that cannot be kept is taken back in the same way. With one version a
step is committed in parts instead: what it takes to redo it is stored too (`in_place_update`), or, if that is not
wanted (`replace_within`), the states are marked as partial with the first part, until the step is completed."""

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
_PARTIAL = "torn"  # among the facts; the word that all versions write
_DEAD_S = 30.0  # a killed process holds its space until the kernel has taken down its rings


class StateStore:
    """A folder with one store. Thread-safe, but for `commit`, `roll_back` and `close`, which nothing else may run with.

    Why one file with a log and not a file per tensor: a step replaces thousands of tensors, and all of them must appear
    at once or not at all. One commit record does that; a rename per tensor does not.

    Storage for `WeightStream`s: keys are any hashable with a distinct `str`. Every write's checksum is kept. A read is
    compared with it until all that an earlier process has left has been read once; what this one has written, and the
    engine has audited, is not summed up again in every step.
    """

    def __init__(
        self, folder: Path, owner: str, config: DirectEngineConfig, faults: Any = None, *, new: bool = False
    ) -> None:
        self.folder, self._owner, self._config, self._faults = folder, owner, config, faults
        self._compares = not new  # reads with their checksums
        self.opened_by = os.getpid()
        self._made: list[Path] = []  # folders, by `create`
        self._registered: list[torch.Tensor] = []
        self._tier = self._open()
        self._is_open = True  # not where it could not be opened again
        self._unread = {key for key, _ in self._tier.engine.items()} - _NOT_STATES  # of an earlier process
        self._moved_before = Transferred(0, 0, 0.0, 0.0)
        self._spare_bytes: int | None = None
        self._replacing = threading.Lock()
        self._replaced: deque[tuple[int, Completion]] = deque()  # bytes and writes since the last commit
        self._facts: dict[str, Any] = {}  # of the last completed step
        self._partial = self._is_missed = False
        self._committing: dict[str, Any] | None = None  # facts of a commit that was begun, and of which no end is known
        self._snapshot: Snapshot | None = None
        self._parts_bytes = 0  # read for snapshots
        self._parts = threading.Lock()  # held while a part is read for the snapshot, and while the tier is replaced
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
        """In the new or empty `folder`; all of `space` is taken now.

        `owner`: what the states are of; whoever opens them says the same. `released`: bytes on the same file system
        that the caller gives back while it fills the store; where there are any, space is taken by what is written, and
        the rest by `take_space`. Raises StorageError where there is no space, with nothing left behind, and ValueError
        for a folder that holds something.
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
        """Of a process that ended, or was killed. Raises NotThisModel for another owner's, StorageError."""
        folder = Path(folder)
        open_stores.require_not_open(folder)
        found = owner_of(folder)
        if found != owner:
            what = "no states" if found is None else f"states of {found!r}"
            raise NotThisModel(f"{folder} holds {what}, but {owner!r} was requested: name another folder")
        return cls(folder, owner, with_control_folder(folder), faults)

    def take_space(self) -> None:
        """Take the space of the whole file, as far as it is not taken yet: what is in it stays. Raises StorageError."""
        path = self.folder / FILE
        with open(path, "r+b") as file:
            take_space(file, path, os.fstat(file.fileno()).st_size)

    def _open(self) -> DirectTier:
        config = self._config
        if not self._compares and config.checksums == "auto":
            config = dataclasses.replace(config, checksums="write")
        tier = DirectTier.on_devices([self.folder / FILE], self._owner, config, self._faults)
        try:
            deadline = time.monotonic() + _DEAD_S
            while tier.engine.space().processes > 1:
                interrupts.check()
                gc.collect()  # a store of ours that a dropped store has left with transfers in flight
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
        """What was not committed is forgotten."""
        with self._no_part_is_read():
            if self._is_open:
                self._moved_before = Transferred(*self._transferred, 0.0, 0.0)
                self._is_open = False
                self._tier.close()
            if self._tier.left is not None:  # it still has the store
                raise self._tier.left
            self._tier = self._open()
            self._is_open = True

    @contextlib.contextmanager
    def _no_part_is_read(self) -> Iterator[None]:
        interrupts.wait(lambda timeout_s: self._parts.acquire(timeout=-1 if timeout_s is None else timeout_s))
        try:
            yield
        finally:
            self._parts.release()

    # -- storage -------------------------------------------------------------------------------------------------------

    def __contains__(self, key: Hashable) -> bool:
        """Whether the tensor was written, committed or not."""
        return self._tier.size_of(str(key)) is not None

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        self._unread.discard(str(key))
        return self._tier.read(str(key), tensor, priority=priority)

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        self.make_way(key)
        if self._spare_bytes is None or self._tier.size_of(str(key)) is None:
            return self._tier.write(str(key), tensor, priority=priority)
        with self._replacing:
            size = in_chunks(tensor.nbytes)
            self._make_space(size)
            written = self._tier.write(str(key), tensor, priority=priority)
            self._replaced.append((size, written))
        return written

    # -- a snapshot, for whoever copies the tensors while training goes on ---------------------------------------------

    def take_snapshot(self, keys: Iterable[str]) -> Snapshot:
        """The tensors of `keys` as they are now, which is as they were committed: whoever overwrites one waits until it
        was copied (`read_part`). It is there until its `end`. RuntimeError where another one is, or where writes were
        not committed."""
        if self._snapshot is not None and not self._snapshot.ended:
            raise RuntimeError(f"{self.folder}: there is a snapshot already: end it first")
        if self._tier.engine.uncommitted:
            raise RuntimeError(f"{self.folder}: a step is in progress, whose states may change: complete it first")
        self._snapshot = Snapshot(keys)
        return self._snapshot

    def make_way(self, key: Hashable) -> None:
        """Wait until the snapshot, if there is one, does not need the tensor any more. Any thread."""
        if self._snapshot is not None:
            self._snapshot.make_way(str(key))

    def size_of(self, key: str) -> int:
        """Bytes of a tensor that was written."""
        size = self._tier.size_of(key)
        assert size is not None, key
        return size

    def read_part(self, key: str, tensor: torch.Tensor, offset: int) -> None:
        """Bytes of a snapshot's tensor from `offset` on; they are there on return. Any thread, also during `commit` and
        `roll_back`. Raises StorageError, also for a tensor that is damaged, where it was not compared since the store
        was opened."""
        with self._parts:
            if not offset and self._compares and key in self._unread:
                for problem in self._tier.engine.verify([key]).values():
                    raise StorageError("read", str(self.folder), 0, tensor.nbytes, 0, None, problem, key=key)
            self._tier.read(key, tensor, offset=offset).wait()
            self._parts_bytes += tensor.nbytes

    # -- one version ---------------------------------------------------------------------------------------------------

    def replace_within(self, spare_bytes: int) -> None:
        """From here on there is space for so many bytes of second versions: a step that writes more is committed in
        parts, and from the first of them to its `commit` the states are partial (`InterruptedUpdate`). Before the next
        write."""
        self._spare_bytes = spare_bytes

    def _make_space(self, size: int) -> None:
        assert self._spare_bytes is not None
        used = sum(each for each, _ in self._replaced)
        if used + size <= self._spare_bytes:
            return
        while self._replaced and (used + size > self._spare_bytes or self._replaced[0][1].done()):
            each, written = self._replaced.popleft()
            written.wait()
            used -= each
        if not self._partial:  # with the first part, since all of a commit lasts or none of it
            self._write_meta({**self._facts, _PARTIAL: True})
            self._partial = True
        self._tier.commit()

    def register(self, tensor: torch.Tensor) -> bool:
        """Pin long-lived memory in the engine's rings, as `DirectEngine.register_buffer`, until `close`."""
        self._registered.append(tensor)
        return self._tier.register(tensor)

    @property
    def bounce_buffers(self) -> list[tuple[int, int]]:
        """Host memory of the engine below: (address, bytes)."""
        return self._tier.engine.bounce_buffers

    @property
    def since_opened(self) -> Transferred:
        """Of the engine below, with its rates; begins anew with a step that is taken back."""
        return self._tier.transferred

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written since the store was opened, but for a snapshot's."""
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
        """All writes, which the caller has waited for, and `facts` become the completed step: all or none.

        `facts`: JSON of at most `META_BYTES` (1 MiB), or ValueError. After a StorageError the completed step is still
        the one before, and the writes of this one are uncommitted: `roll_back` forgets them. After an interrupt either
        may be: `roll_back` finds out.
        """
        facts = json.loads(_as_json(facts))
        try:
            self._committing = facts
            self._write_meta(facts)
            self._tier.commit()
        except Exception:  # of the drive; an interrupt is none
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
        """Whether there is nothing left to compare, and reads still are: `compare_no_more` saves that."""
        return self._compares and not self._unread

    def compare_no_more(self) -> None:
        """All of the store was read once, or written by this process. Nothing may be in flight, nor uncommitted."""
        self._compares = False
        self._reopen()

    def require_space_for(self, facts: dict[str, Any]) -> None:
        """ValueError where `commit` could not keep `facts`: they are no JSON, or more than `META_BYTES` (1 MiB)."""
        _as_json(facts)

    def _write_meta(self, facts: dict[str, Any]) -> None:
        raw = _as_json(facts)
        self._tier.write(_META, torch.frombuffer(bytearray(raw), dtype=torch.uint8)).wait()

    def write_buffers(self, raw: bytes | memoryview | None) -> None:
        """A model's buffers, as bytes, with the next commit; None: none are kept from then on. The space for two
        versions is `StoreSpace.slack`."""
        if raw is None:
            self._tier.erase(_BUFFERS)
        else:
            self._tier.write(_BUFFERS, torch.frombuffer(bytearray(raw), dtype=torch.uint8)).wait()

    def kept_buffers(self) -> bytes | None:
        """As they were written last; None: they were not."""
        return self._bytes_of(_BUFFERS)

    def commit_parts(self) -> None:
        """All writes that the caller has waited for become the tensors' only version, with the facts as they are."""
        self._tier.commit()

    def forget_step(self) -> None:
        """No step is completed from here on, until the next `commit`."""
        self._tier.erase(_META)
        self._tier.commit()
        self._partial = True

    def erase(self, keys: Iterable[str]) -> None:
        """With the next commit; those that are not there are none."""
        for key in keys:
            self._tier.erase(key)

    def completed(self) -> dict[str, Any] | None:
        """The facts of the last completed step; None: nothing was ever committed. Raises InterruptedUpdate."""
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
        """Whether the last commit is a part of a step's update, which `StreamingEngine.resume` completes."""
        return "redo" in self._facts

    def roll_back(self) -> None:
        """Forget what was not committed. Nothing may be in flight. A commit that was interrupted is the completed step
        if the folder holds it. Raises InterruptedUpdate where that is not the whole of a step, or where the drive has
        kept a commit that it had said to have failed in."""
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
        """What was committed stays. Idempotent."""
        if self._snapshot is not None:
            self._snapshot.end()
        with self._no_part_is_read():
            self._tier.close()
        open_stores.discard(self)
        self._registered.clear()

    def destroy(self) -> None:
        """Close, and remove the folder."""
        self.close()
        remove(self.folder)

    def undo(self) -> None:
        """Close, and remove what `create` has made: a folder that was there stays."""
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
    """(dtype, bytes) of the tensors of whatever store is in the folder, by their keys."""
    owner = owner_of(folder)
    assert owner is not None, folder
    store = StateStore(Path(folder), owner, with_control_folder(Path(folder)))
    try:
        return {key: (each.dtype, each.bytes) for key, each in store._tier.engine.items() if key not in _NOT_STATES}
    finally:
        store.close()


def kept_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What was kept with the last completed step of whatever store is in the folder; empty where nothing was. A step
    that `resume` is going to complete counts as completed.

    Raises ValueError where another process uses it, InterruptedUpdate.
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
